"""`deepep`: the exchange of `all_to_all` by the kernels of DeepEP over NVLink and RDMA, from the
package sgl-deep-ep or github.com/deepseek-ai/DeepEP. Imports the library with the first tokens.

The library's `Buffer` exchanges its addresses over an mpi4py communicator; `Communicator` is one
over the collective.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.nn.functional import pad

from frame.core.interfaces.collective import Collective
from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement, MoEDispatcher

_NONE = -1  # DeepEP: a selection that is no expert, or one of another rank


@dataclass(frozen=True, slots=True)
class Exchange:
    """One dispatch: the library's handle, and the number of all tokens."""

    handle: Any
    num_tokens: int


class Communicator:
    """The part of `mpi4py.MPI.Comm` that `deep_ep.Buffer` calls."""

    def __init__(self, group: Collective, device: torch.device) -> None:
        self._group, self._device = group, device

    def Get_rank(self) -> int:  # noqa: N802 - the library's name
        return self._group.rank

    def Get_size(self) -> int:  # noqa: N802 - the library's name
        return self._group.size

    def allgather(self, value: int | bytearray | None) -> list[int | bytearray | None]:
        """The values of all ranks, in order."""
        data = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8).to(self._device)
        sizes = self._group.all_gather(torch.tensor([len(data)], device=self._device), dim=0).tolist()
        rows = self._group.all_gather(pad(data, (0, max(sizes) - len(data)))[None], dim=0).cpu()
        decoded = [msgspec.msgpack.decode(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]
        return [bytearray(each) if isinstance(each, bytes) else each for each in decoded]


class DeepEP(MoEDispatcher):
    """Each rank sends its share of the tokens, once to each rank that holds one of their experts.
    The library waits on the host for the number of rows."""

    _buffer: Any = None

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        tp, num_tokens = self.context.tp, len(x)
        if self.context.ep_group.size == 1:
            return DispatchOutput(x, ids, weights)
        share = -(-num_tokens // tp.size)
        missing = (0, 0, 0, share * tp.size - num_tokens)  # so that all ranks send equally many
        mine = slice(tp.rank * share, (tp.rank + 1) * share)
        x, ids, weights = pad(x, missing)[mine], pad(ids, missing, value=_NONE)[mine], pad(weights, missing)[mine]
        buffer = self._open(x.shape[1] * x.itemsize)
        by_rank, by_node, by_expert, is_sent, _ = buffer.get_dispatch_layout(ids, len(placement.logical))
        received, local, factors, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_node,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=by_expert,
            topk_idx=ids,
            topk_weights=weights,
        )
        pairs = torch.arange(local.numel(), device=local.device).view_as(local)  # what is no expert here is spread over all
        own = torch.where(local < 0, pairs % placement.per_rank, local)
        return DispatchOutput(received, own, factors.masked_fill(local < 0, 0), Exchange(handle, num_tokens))

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        if tokens.state is None:
            return out
        summed, _, _ = self._buffer.combine(out.contiguous(), tokens.state.handle)
        return self.context.tp.all_gather(summed, dim=0)[: tokens.state.num_tokens]

    def _open(self, row_bytes: int) -> Any:
        """The library's buffer. `row_bytes`: of a token's hidden states."""
        if self._buffer is None:
            library, group = importlib.import_module("deep_ep").Buffer, self.context.ep_group
            configs = library.get_dispatch_config(group.size), library.get_combine_config(group.size)
            nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, group.size) for config in configs)
            rdma = max(config.get_rdma_buffer_size_hint(row_bytes, group.size) for config in configs)
            self._buffer = library(None, nvlink, rdma, comm=Communicator(group, self.context.device))
        return self._buffer

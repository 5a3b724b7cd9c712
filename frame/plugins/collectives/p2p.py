"""The collective `p2p`: sums and gathered columns of small tensors with kernels that use the other
GPUs' memory, and sums of large ones of two ranks by copies; all else by NCCL.

The memory is PyTorch's symmetric memory. One-shot: each rank writes its tensor to all others
(`frame.kernels.peer_sum`). Two-shot, for more than two ranks: each rank sums a part, and reads the
others' parts (PyTorch's kernel). NVLink multicast is not used.

Under `CollectiveContext.deterministic` each form adds in float32 in the order of the ranks and
rounds once, so the size of a message does not change the bits of a sum. The two-shot kernel takes
another order and is not used then.
"""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from frame.core.interfaces.collective import CollectiveContext, SupportsReduceMatmul, SupportsReduceNorm
from frame.core.interfaces.platform import SupportsGraphs, SupportsStreams
from frame.plugins.collectives import P2pOptions
from frame.plugins.collectives.nccl import Nccl
from frame.plugins.collectives.peer_copies import SLOT, SLOTS, PeerCopies
from frame.plugins.collectives.torch_group import open_store

_log = logging.getLogger(__name__)

_TWO_SHOT_TYPES = (torch.bfloat16, torch.float32)  # that PyTorch's kernel adds
_ALIGNMENT = 16  # bytes of a kernel's accesses
_MORE_RANKS = 2 << 20  # bytes that a one-shot sum of more than two ranks sends at most, by default


class P2p(Nccl, SupportsReduceNorm, SupportsReduceMatmul):
    """All ranks select the same kernel, by the size of the message."""

    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        from frame.kernels import peer_sum

        sizes = options if isinstance(options, P2pOptions) else P2pOptions()
        self._kernels = peer_sum
        self._name = f"frame {context.address} {context.name}"
        self._store = open_store(replace(context, name=f"{context.name}.p2p"))
        self._unregister = self._register()
        self._two_shot = sizes.two_shot_bytes if self.size > 2 and not context.deterministic else 0
        self._copies: PeerCopies | None = None
        self._use_copies = sizes.copies and self.size == 2
        self._one_shot = sizes.one_shot_bytes if self.size == 2 else min(sizes.one_shot_bytes, _MORE_RANKS // (self.size - 1))
        problem = ""
        try:
            self._prepare_kernels()
        except RuntimeError as error:
            problem = str(error).strip().split("\n", 1)[0]
        # also waits until all ranks have cleared their memory
        failed = super().all_reduce(torch.tensor([bool(problem)], dtype=torch.int64, device=context.platform.device))
        if failed.item():
            self._one_shot = self._two_shot = 0
            self._copies = None
            _log.warning("the ranks cannot share memory, and all sums are by NCCL: %s", problem or "another rank says why")

    def _prepare_kernels(self) -> None:
        """Share the memory of the kernels. Raises RuntimeError if the GPUs cannot use each other's
        memory."""
        self._staging = self._share_memory(self._two_shot)[0] if self._two_shot else None
        memory, handle = self._share_memory(self._kernels.count_bytes(self.size))
        self._kernels.clear(memory)
        self._shared = memory, handle  # as long as the addresses are used
        addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=memory.device)
        turns = torch.zeros(self._kernels.CHANNELS, dtype=torch.int32, device=memory.device)
        self._peers = self._kernels.Peers(self.rank, self.size, addresses, turns)
        platform = self.context.platform
        self._graphs = platform if isinstance(platform, SupportsGraphs) else None
        if self._use_copies and isinstance(platform, SupportsStreams):
            self._slots = self._share_memory(SLOT * SLOTS)
            self._copies = PeerCopies(self._slots[1], self.rank, platform)

    def _register(self) -> weakref.finalize[Any, Any]:
        """Let PyTorch find this group by its name. -> the way to undo it."""
        from torch._C import _distributed_c10d as c10d

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        memory: Any = c10d._SymmetricMemory  # noqa: SLF001 - torch has no public API for groups that are values
        # PyTorch finds the group by its name: older releases among these infos, newer ones among
        # the registered process groups.
        memory.set_group_info(self._name, self.rank, self.size, self._store)
        group = register_group(self._name, self._store, self._groups[0], self.context.platform.device)
        return weakref.finalize(self, unregister_group, self._name, group)

    def _share_memory(self, size: int) -> tuple[torch.Tensor, Any]:
        """(this rank's buffer of `size` bytes, the handle of all ranks' buffers)."""
        from torch._C import _distributed_c10d as c10d

        memory: Any = c10d._SymmetricMemory  # noqa: SLF001
        buffer = memory.empty_strided_p2p((size,), (1,), torch.uint8, self.context.platform.device, self._name)
        return buffer, memory.rendezvous(buffer, self._name)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.itemsize
        if size > max(self._one_shot, self._two_shot):
            if self._copies is None or self._is_capturing():
                return super().all_reduce(tensor)
            return self._copies.sum((tensor.contiguous(),), tensor.new_empty(tensor.shape))
        if size <= self._one_shot and self._kernels.can_sum(tensor):
            return self._kernels.sum_peers(_align(tensor), self._peers)
        if size > self._two_shot or size % (_ALIGNMENT * self.size) or not size or tensor.dtype not in _TWO_SHOT_TYPES:
            return super().all_reduce(tensor)
        return self._sum_in_two_shots(_align(tensor), size)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        dim %= tensor.dim()
        if not 0 < tensor.nbytes <= self._one_shot:
            return super().all_gather(tensor, dim)
        rows = tensor.contiguous().view(math.prod(tensor.shape[:dim]), -1)
        if not self._kernels.can_gather(rows):
            return super().all_gather(tensor, dim)
        shape = (*tensor.shape[:dim], self.size * tensor.shape[dim], *tensor.shape[dim + 1 :])
        return self._kernels.gather_peers(_align(rows), self._peers).view(shape)

    def _sum_in_two_shots(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        buffer = self._staging[:size].view(tensor.dtype)  # type: ignore[index]
        buffer.copy_(tensor.view(-1))
        out = torch.empty_like(tensor)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._name, out.view(-1))
        return out

    def reduce_add_norm(self, tensor: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor | None:
        if tensor.numel() * tensor.itemsize > self._one_shot or not self._kernels.can_add_norm(tensor, residual):
            return None
        if self.context.deterministic and not self._kernels.norms_alike(tensor.shape[1]):  # more rows are normed by the other kernel
            return None
        return self._kernels.sum_add_norm(tensor, residual, weight, eps, self._peers)

    def reduce_matmul(self, multiply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, columns: int) -> torch.Tensor | None:
        size = len(x) * columns * x.itemsize
        if self._copies is None or size <= self._one_shot or self._is_capturing():
            return None
        return self._copies.sum((multiply(rows).contiguous() for rows in x.chunk(2)), x.new_empty(len(x), columns))

    def _is_capturing(self) -> bool:
        return self._graphs is not None and self._graphs.is_capturing

    def close(self) -> None:
        self._unregister()  # first: a registered group outlives `_groups`
        super().close()


def register_group(name: str, store: Any, backend: Any, device: torch.device) -> Any:
    """Let PyTorch find the process group of `backend` by `name`, as long as the result exists."""
    group: Any = dist.ProcessGroup(store, backend.rank(), backend.size())
    kind = dist.ProcessGroup.BackendType.NCCL if device.type == "cuda" else dist.ProcessGroup.BackendType.GLOO
    group._register_backend(device, kind, backend)  # noqa: SLF001
    group._set_group_name(name)  # noqa: SLF001
    group._set_group_desc(name)  # noqa: SLF001
    registry: Any = dist.distributed_c10d  # `name` is a str for torch 2.11 and of an own type for later releases
    registry._register_process_group(name, group)  # noqa: SLF001
    return group


def unregister_group(name: str, group: Any) -> None:
    """Undo `register_group`, whose result is `group`."""
    registry: Any = dist.distributed_c10d
    registry._unregister_process_group(name)  # noqa: SLF001


def _align(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and at an address that kernels take."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % _ALIGNMENT else tensor

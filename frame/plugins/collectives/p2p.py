"""The collective `p2p`: sums of small tensors with kernels that read the other GPUs' memory; all
else by NCCL.

The memory is PyTorch's symmetric memory. One-shot: each rank reads all ranks' tensors. Two-shot:
each rank sums a part, and reads the others' parts. NVLink multicast is not used.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from frame.plugins.collectives import P2pOptions
from frame.plugins.collectives.nccl import Nccl
from frame.plugins.collectives.torch_group import open_store

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.collective import CollectiveContext

_DTYPES = (torch.bfloat16, torch.float32)  # that PyTorch's kernels add
_ALIGNMENT = 16  # bytes of a kernel's accesses


class P2p(Nccl):
    """The buffer has the size of the largest message. Kernels wait for the other ranks before they
    read and before they return, so that consecutive sums share it."""

    def __init__(self, context: CollectiveContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._sizes = options if isinstance(options, P2pOptions) else P2pOptions()
        self._name = f"frame {context.address} {context.name}"
        self._store = open_store(replace(context, name=f"{context.name}.p2p"))
        # a rank's sum starts with its own tensor: for more than two ranks, its bits are its own
        self._one_shot = self._sizes.one_shot_bytes if self.size == 2 else 0
        self._two_shot = self._sizes.two_shot_bytes
        self._memory, self._handle = self._share_memory(max(self._one_shot, self._two_shot))

    def _share_memory(self, size: int) -> tuple[torch.Tensor, Any]:
        """(this rank's buffer of `size` bytes, the handle of all ranks' buffers). Raises
        RuntimeError if the GPUs cannot read each other's memory."""
        from torch._C._distributed_c10d import _SymmetricMemory

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        memory: Any = _SymmetricMemory
        memory.set_group_info(self._name, self.rank, self.size, self._store)
        buffer = memory.empty_strided_p2p((size,), (1,), torch.uint8, self.context.platform.device, self._name)
        return buffer, memory.rendezvous(buffer, self._name)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.itemsize
        if tensor.dtype not in _DTYPES or not size or size % _ALIGNMENT or size > self._memory.numel():
            return super().all_reduce(tensor)
        flat = tensor.contiguous().view(-1)
        buffer = self._memory[:size].view(tensor.dtype)
        if size <= self._one_shot:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, flat, "sum", self._name).view(tensor.shape)
        if size > self._two_shot or size % (_ALIGNMENT * self.size):
            return super().all_reduce(tensor)
        buffer.copy_(flat)
        out = torch.empty_like(flat)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._name, out)
        return out.view(tensor.shape)

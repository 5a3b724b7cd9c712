"""The collective `p2p`: sums of small tensors with kernels that read the other GPUs' memory; all
else by NCCL.

The memory is PyTorch's symmetric memory. One-shot: each rank reads all ranks' tensors. Two-shot:
each rank sums a part, and reads the others' parts. NVLink multicast is not used.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

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
        from torch._C import _distributed_c10d as c10d

        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        memory: Any = c10d._SymmetricMemory  # noqa: SLF001 - torch has no public API for groups that are values
        # The kernels find the group by its name: older ones among these infos, newer ones among the
        # registered process groups.
        memory.set_group_info(self._name, self.rank, self.size, self._store)
        group = register_group(self._name, self._store, self._groups[0], self.context.platform.device)
        self._unregister = weakref.finalize(self, unregister_group, self._name, group)
        buffer = memory.empty_strided_p2p((size,), (1,), torch.uint8, self.context.platform.device, self._name)
        return buffer, memory.rendezvous(buffer, self._name)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.itemsize
        if tensor.dtype not in _DTYPES or not size or size % _ALIGNMENT or size > self._memory.numel():
            return super().all_reduce(tensor)
        flat = tensor.contiguous().view(-1)
        if flat.storage_offset() * flat.itemsize % _ALIGNMENT:
            flat = flat.clone()
        buffer = self._memory[:size].view(tensor.dtype)
        if size <= self._one_shot:
            return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, flat, "sum", self._name).view(tensor.shape)
        if size > self._two_shot or size % (_ALIGNMENT * self.size):
            return super().all_reduce(tensor)
        buffer.copy_(flat)
        out = torch.empty_like(flat)
        torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", self._name, out)
        return out.view(tensor.shape)

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

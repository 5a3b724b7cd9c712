"""`ipc`: memory of a trainer on the same host. On a CPU a file in /dev/shm, as Python's
`SharedMemory` makes it; on a GPU an allocation of the trainer, through CUDA IPC.

The trainer keeps the memory unchanged until the message of its part is answered. Files are read,
not mapped: a file that is cut off meanwhile is an error and no signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import BaseModel

from frame.core.interfaces.weight_transfer import SharedBuffer, TensorSpec, TransferError, TransferPart
from frame.interfaces.weight_transfer import WeightTransfer, WeightTransferContext

FOLDER = "/dev/shm"  # noqa: S108 - where POSIX shared memory is
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}")  # no path, no hidden file
_HANDLE_BYTES = 64  # of a CUDA IPC handle; torch puts its version of the format and the kind of memory in front
_PLAIN = b"c"  # the kind of memory from cudaMalloc, whose format is the same in all versions


class IpcTransfer(WeightTransfer):
    """Buffers in the memory of trainers."""

    def __init__(self, context: WeightTransferContext, options: BaseModel | None = None) -> None:
        self._context = context

    def open(self, info: Mapping[str, Any]) -> None:
        if info:
            raise TransferError(f"ipc connects to no trainer and takes no {', '.join(map(repr, info))}; name buffers in each part")

    def receive(self, part: TransferPart) -> Iterator[tuple[str, torch.Tensor]]:
        if part.layout == "flattened":
            raise TransferError("ipc takes tensors by their offsets; leave the layout 'flattened' out")
        with contextlib.ExitStack() as stack:
            buffers = {number: self._open(choice, stack) for number, choice in self._choose(part).items()}
            for spec in part.tensors:
                buffer = buffers.get(spec.buffer)
                if buffer is None:
                    raise TransferError(f"{spec.name} is in buffer {spec.buffer}, which the part does not have")
                if spec.offset < 0 or spec.offset + spec.num_bytes > buffer.size:
                    raise TransferError(
                        f"{spec.name} takes {spec.num_bytes} bytes from {spec.offset} on, but buffer {spec.buffer} has {buffer.size}"
                    )
            for spec in part.tensors:
                yield spec.name, buffers[spec.buffer].read(spec)

    def _choose(self, part: TransferPart) -> dict[int, SharedBuffer]:
        """By number: the buffer on this rank's GPU, or else the one in host memory."""
        names = ["cpu"]
        if self._context.device.type == "cuda":
            names.insert(0, str(torch.cuda.get_device_properties(self._context.device).uuid))
        chosen: dict[int, SharedBuffer] = {}
        for name in reversed(names):
            chosen.update({buffer.number: buffer for buffer in part.buffers if buffer.device.removeprefix("GPU-") == name})
        if missing := sorted({buffer.number for buffer in part.buffers} - chosen.keys()):
            raise TransferError(f"buffer {missing[0]} is on none of the devices that rank {self._context.rank} reads: {', '.join(names)}")
        return chosen

    def _open(self, buffer: SharedBuffer, stack: contextlib.ExitStack) -> FileBuffer | DeviceBuffer:
        if buffer.size < 0 or buffer.offset < 0:
            raise TransferError(f"buffer {buffer.number} has a negative size or offset")
        if buffer.device == "cpu":
            return FileBuffer(buffer, stack)
        opened = DeviceBuffer(buffer, self._context.device)
        stack.callback(opened.close)
        return opened

    def close(self) -> None:
        """Nothing stays open between two parts."""


class FileBuffer:
    """A file in /dev/shm, open while the stack lives."""

    def __init__(self, buffer: SharedBuffer, stack: contextlib.ExitStack) -> None:
        name = buffer.handle.removeprefix(f"{FOLDER}/").removeprefix("/")
        if not _NAME.fullmatch(name):
            raise TransferError(f"the handle of buffer {buffer.number} is no name of a file in {FOLDER}")
        try:
            self._file = os.open(f"{FOLDER}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(f"buffer {buffer.number}, {FOLDER}/{name}, cannot be opened: {error.strerror}") from None
        stack.callback(os.close, self._file)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode):
            raise TransferError(f"buffer {buffer.number}, {FOLDER}/{name}, is no file")
        if status.st_uid != os.geteuid():
            raise TransferError(f"buffer {buffer.number}, {FOLDER}/{name}, belongs to another user than the server's")
        if status.st_size < buffer.size:
            raise TransferError(f"buffer {buffer.number}, {FOLDER}/{name}, has {status.st_size} bytes and not {buffer.size}: it is cut off")
        self.size = buffer.size

    def read(self, spec: TensorSpec) -> torch.Tensor:
        data = torch.empty(spec.num_bytes, dtype=torch.uint8)
        view, done = memoryview(data.numpy().data), 0
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], spec.offset + done)
            if not count:
                raise TransferError(f"the buffer of {spec.name} was cut off while it was read")
            done += count
        return data.view(getattr(torch, spec.dtype)).view(spec.shape)


class DeviceBuffer:
    """An allocation of another process on this GPU."""

    def __init__(self, buffer: SharedBuffer, device: torch.device) -> None:
        try:
            handle, counter, event = (bytes.fromhex(text) for text in (buffer.handle, buffer.counter, buffer.event))
        except ValueError:
            raise TransferError(f"the handles of buffer {buffer.number} are not hexadecimal") from None
        if handle[1:2] == b"e":
            remedy = "start the trainer with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
            raise TransferError(f"buffer {buffer.number} is in an expandable segment; {remedy}")
        if len(handle) != _HANDLE_BYTES + 2 or handle[1:2] != _PLAIN or not counter:
            raise TransferError(f"buffer {buffer.number} has no handle of CUDA IPC and of its reference counter")
        handle = b"\x01" + handle[1:]  # a trainer's torch may be newer
        index = torch.cuda.current_device() if device.index is None else device.index
        place = (buffer.counter_offset, event, buffer.has_event)
        try:
            self._storage: Any = torch.UntypedStorage._new_shared_cuda(index, handle, buffer.size, buffer.offset, counter, *place)  # noqa: SLF001
        except Exception as error:
            raise TransferError(f"buffer {buffer.number} cannot be opened on {device}: {str(error).splitlines()[0][:200]}") from error
        self._device = torch.device("cuda", index)
        self.size = buffer.size

    def read(self, spec: TensorSpec) -> torch.Tensor:
        """The trainer's memory itself: it is valid while the buffer is open."""
        data = torch.empty(0, dtype=torch.uint8, device=self._device).set_(self._storage, spec.offset, (spec.num_bytes,), (1,))
        data = data if spec.offset % 16 == 0 else data.clone()
        return data.view(getattr(torch, spec.dtype)).view(spec.shape)

    def close(self) -> None:
        """Unmap the allocation once no copy of it is pending, and tell the trainer."""
        torch.cuda.current_stream(self._device).synchronize()
        self._storage = None
        torch.cuda.ipc_collect()

"""Buckets of a trainer's tensors: memory that it shares with an engine on the same host. Used by
`WeightClient`. Must not know a server."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

Bucket = list[tuple[str, torch.Tensor]]


FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is


class HostBucket:
    """A bucket in shared memory of this host, which is freed with the stack. Raises OSError where
    there is too little of it."""

    def __init__(self, size: int, stack: contextlib.ExitStack) -> None:
        self.size = max(size, 1)
        self._path = FOLDER / f"frame-trainer-{uuid.uuid4().hex}"
        self._path.touch(mode=0o600, exist_ok=False)
        stack.callback(self._path.unlink)
        with self._path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, self.size)  # a write that finds no room would end the process
        self._bytes = torch.from_file(str(self._path), shared=True, size=self.size, dtype=torch.uint8)

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        write_bytes(self._bytes, offset, tensor)

    def describe(self) -> dict[str, Any]:
        return {"number": 0, "device": "cpu", "handle": self._path.name, "size": self.size}


class DeviceBucket:
    """A bucket on a GPU that the engine uses too."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.empty(max(size, 1), dtype=torch.uint8, device=device)
        self.size = size

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        write_bytes(self._bytes, offset, tensor)

    def describe(self) -> dict[str, Any]:
        shared = self._bytes.untyped_storage()._share_cuda_()
        _, handle, size, offset, counter, counter_offset, event, has_event = shared
        torch.cuda.current_stream(self._bytes.device).synchronize()
        texts = {"handle": handle.hex(), "counter": counter.hex(), "event": event.hex()}
        numbers = {"size": size, "offset": offset, "counter_offset": counter_offset, "has_event": has_event}
        device = str(torch.cuda.get_device_properties(self._bytes.device).uuid)
        return {"number": 0, "device": device, **texts, **numbers}


def describe(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def write_bytes(bucket: torch.Tensor, offset: int, tensor: torch.Tensor) -> None:
    """Copy a tensor's bytes into a bucket, uint8 [bytes]."""
    bucket[offset : offset + tensor.nbytes] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def split_buckets(pairs: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Tensors in their order, as many as fit in a bucket, and at least one."""
    bucket: Bucket = []
    size = 0
    for name, tensor in pairs:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket

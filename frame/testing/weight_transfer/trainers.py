"""Trainers that the suite of weight transfers sends with: one that shares files in /dev/shm, and
rank 0 of a torch process group. Must not know a plugin by name.

A plugin that receives otherwise has the static method `make_conformance_trainer(num_ranks)`, which
returns a `Trainer` of its own.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

from frame.core.interfaces.weight_transfer import SharedBuffer, TensorSpec, TransferPart

Named = Sequence[tuple[str, torch.Tensor]]
PATIENCE = timedelta(seconds=20)
FOLDER = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is
ODD = 3  # bytes between two tensors of a buffer, so that offsets are not aligned


class Trainer(Protocol):
    """The other side of a transfer."""

    info: Mapping[str, Any]  # of `open`

    def join(self) -> None:
        """Take part in `open`; called in a thread."""

    def offer(self, tensors: Named, layout: str = "separate") -> TransferPart:
        """The message of a part."""

    def send(self, tensors: Named, layout: str = "separate") -> None:
        """Take part in `receive`; called in a thread."""

    def cut(self) -> None:
        """Fail in the middle of the part that was offered last."""

    def close(self) -> None: ...


class FileTrainer:
    """A file in /dev/shm, which each part overwrites."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.info: Mapping[str, Any] = {}
        self.file = FOLDER / f"frame-suite-{uuid.uuid4().hex[:12]}"

    def join(self) -> None:
        return

    def offer(self, tensors: Named, layout: str = "separate") -> TransferPart:
        specs, content = [], bytearray(ODD)
        for name, tensor in tensors:
            specs.append(describe(name, tensor, len(content)))
            content += to_bytes(tensor) + b"\0" * ODD
        self.file.write_bytes(content)
        buffer = SharedBuffer(0, "cpu", self.file.name, len(content))
        return TransferPart(tuple(specs), (buffer,), "flattened" if layout == "flattened" else "separate")

    def send(self, tensors: Named, layout: str = "separate") -> None:
        return

    def cut(self) -> None:
        os.truncate(self.file, self.file.stat().st_size // 2)

    def close(self) -> None:
        self.file.unlink(missing_ok=True)


class GroupTrainer:
    """Rank 0 of a process group with the backend gloo."""

    def __init__(self, num_ranks: int = 1) -> None:
        self._size = 1 + num_ranks
        self._name = f"suite-{uuid.uuid4().hex[:12]}"
        self._store: Any = distributed.TCPStore("127.0.0.1", 0, self._size, is_master=True, timeout=PATIENCE, wait_for_workers=False)
        self._group: Any = None
        self.info: Mapping[str, Any] = {
            "master_address": "127.0.0.1", "master_port": self._store.port, "rank_offset": 1, "world_size": self._size,
            "group_name": self._name, "backend": "gloo",
        }  # fmt: skip

    def join(self) -> None:
        store = self._store
        for prefix in (self._name, f"{self._name}/", "cpu/"):
            store = distributed.PrefixStore(prefix, store)
        self._group = distributed.ProcessGroupGloo(store, 0, self._size, PATIENCE)

    def offer(self, tensors: Named, layout: str = "separate") -> TransferPart:
        specs = tuple(describe(name, tensor) for name, tensor in tensors)
        return TransferPart(specs, (), "flattened" if layout == "flattened" else "separate")

    def send(self, tensors: Named, layout: str = "separate") -> None:
        values = [tensor for _, tensor in tensors]
        if layout == "flattened":
            values = [torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in values])]
        for value in values:
            self._group.broadcast([value.contiguous()], distributed.BroadcastOptions()).wait(PATIENCE)

    def cut(self) -> None:
        self.close()

    def close(self) -> None:
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError):
                group.abort()


def describe(name: str, tensor: torch.Tensor, offset: int = 0) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), 0, offset)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())

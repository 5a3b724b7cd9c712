"""A copy of the tensors of the last update, as a checkpoint from which a restarted engine loads.
Used by rank 0's `TensorUpdates`. Must not know a model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from frame.core.errors import ConfigurationError

PREFIX = "frame-weights-"


class UpdateCopy:
    """Writes one file for each part to a new folder below `parent`, and deletes the copy before
    when an update is committed. model: the folder whose `config.json` the copy gets. current: the
    copy that the engine has loaded."""

    def __init__(self, parent: Path, model: Path, current: Path | None = None) -> None:
        if not parent.is_dir():
            raise ConfigurationError(f"execution.keep_updates is {parent}, which is no folder: create it.")
        self._parent = parent
        self._model = model
        self.current = current if current is not None and is_copy(current, parent) else None
        self._next: Path | None = None
        self._count = 0

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        if self._next is None:
            self._next, self._count = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent)), 0
            shutil.copyfile(self._model / "config.json", self._next / "config.json")
        self._count += 1
        file = self._next / f"part-{self._count:05}.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors}, file, {"format": "pt"})

    def commit(self) -> None:
        before, self.current, self._next = self.current, self._next, None
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def cancel(self) -> None:
        if self._next is not None:
            shutil.rmtree(self._next, ignore_errors=True)
        self._next = None


def is_copy(folder: Path, parent: Path) -> bool:
    return folder.parent == parent and folder.name.startswith(PREFIX)

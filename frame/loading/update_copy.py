"""A copy of the tensors of the last update, as a checkpoint from which a restarted engine loads.
Used by rank 0's `TensorUpdates`. Must not know a model."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from frame.core.errors import CheckpointError, ConfigurationError
from frame.host.folder_lock import lock_folder

PREFIX, UNFINISHED = "frame-weights-", "frame-unfinished-"  # of folders


class UpdateCopy:
    """Writes one file for each part to a new folder below `parent`, and deletes the copy before
    when an update is committed. model: the folder whose `config.json` the copy gets. current: the
    copy that the engine has loaded. Deletes unfinished copies of engines that have ended."""

    def __init__(self, parent: Path, model: Path, current: Path | None = None) -> None:
        if not parent.is_dir():
            raise ConfigurationError(f"execution.keep_updates is {parent}, which is no folder: create it.")
        self._parent = parent
        self._model = model
        self.current = current if current is not None and is_copy(current, parent) else None
        self._next: Path | None = None
        self._lock: int | None = None  # descriptor of `_next`
        self._last: Path | None = None  # the file of a part that is not loaded yet
        self._count = 0
        _remove_unfinished(parent)

    def add(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write a part, which `keep` or `drop` follows. Raises CheckpointError, and leaves no
        file of it, where the folder has no room."""
        try:
            if self._next is None:
                self._next, self._count = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._parent)), 0
                self._lock = lock_folder(self._next)
                shutil.copyfile(self._model / "config.json", self._next / "config.json")
            self._count += 1
            self._last = self._next / f"part-{self._count:05}.safetensors"
            save_file({name: tensor.contiguous().cpu() for name, tensor in tensors}, self._last, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            self.drop()
            remedy = "free space there, or serve without --keep-updates"
            raise CheckpointError(f"the copy of the update cannot be written to {self._parent} ({error}): {remedy}") from error

    def keep(self) -> None:
        """The part is loaded."""
        self._last = None

    def drop(self) -> None:
        """The part is not loaded."""
        last, self._last = self._last, None
        if last is not None:
            last.unlink(missing_ok=True)

    def commit(self) -> None:
        before, folder = self.current, self._next
        self.current = None if folder is None else folder.rename(folder.with_name(PREFIX + folder.name.removeprefix(UNFINISHED)))
        self._forget()
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def cancel(self) -> None:
        if self._next is not None:
            shutil.rmtree(self._next, ignore_errors=True)
        self._forget()

    def _forget(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._next = self._lock = self._last = None


def _remove_unfinished(parent: Path) -> None:
    """Delete the copies that no process is writing."""
    for folder in parent.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(OSError):
            descriptor = lock_folder(folder)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def is_copy(folder: Path, parent: Path) -> bool:
    return folder.parent == parent and folder.name.startswith(PREFIX)

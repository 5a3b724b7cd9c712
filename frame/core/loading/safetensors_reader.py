"""Streams (name, lazily sliced tensor) from the safetensors files of a checkpoint folder. Refuses
pickled weights without reading them.

Used by the loader. Files are memory-mapped, and only slices that are used are read; for a GPU,
tensors are read ahead instead (`ReadAhead`). Every file is checked before the first tensor is
yielded. It must not know models.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from frame.core.errors import CheckpointError
from frame.core.interfaces.model import LazyTensor
from frame.core.interfaces.platform import Platform
from frame.core.loading.weight_stream import WeightStream, read_places

INDEX = "model.safetensors.index.json"
SINGLE = ("model.safetensors", "*.safetensors")  # without an index file, the first pattern that matches
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class FileTensor:
    """A lazily sliced tensor of an open safetensors file. A scalar is read at once."""

    def __init__(self, file: Any, name: str) -> None:
        self._slices = file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slices.get_shape())
        self._whole = None if self.shape else file.get_tensor(name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._whole is not None:
            return self._whole
        value: torch.Tensor = self._slices[slice(None) if index is Ellipsis else index]
        return value


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Tensors to read in advance to a device."""

    platform: Platform
    rows: Mapping[str, slice | None]  # by tensor name: rows of the first dimension; None: all


class AheadTensor:
    """A tensor of which `rows` were read in advance; other slices are read from the file."""

    def __init__(self, file: FileTensor, rows: slice | None, value: torch.Tensor) -> None:
        self.shape = file.shape
        self._file, self._rows, self._value = file, rows, value

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._rows is None:
            return self._value[index]
        first, *others = index if isinstance(index, tuple) else (index,)
        if first == self._rows:
            return self._value[(slice(None), *others)]
        return self._file[index]


def read_weights(folder: Path, progress: bool = False, ahead: ReadAhead | None = None) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of a checkpoint folder, file by file; those of `ahead` are on its device.
    `progress`: show a bar on a terminal.

    Raises CheckpointError before the first tensor if a file is missing, damaged or pickled.
    """
    files, named = find_files(folder)
    with contextlib.ExitStack() as stack:
        readers = [_open_safetensors(file, stack) for file in files]
        if missing := sorted(set(named) - {name for reader in readers for name in reader}):
            many = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"the index of {folder} names {missing[0]}{many}, which no file holds: download the checkpoint again.")
        with _bar(sum(map(len, readers)), progress and sys.stderr.isatty()) as advance:
            for file, reader in zip(files, readers, strict=True):
                source = _open_lazily(reader) if ahead is None else _read_ahead(file, reader, ahead)
                for name, tensor in source:
                    yield name, tensor
                    advance()


def _open_lazily(reader: dict[str, Any]) -> Iterator[tuple[str, LazyTensor]]:
    return ((name, make()) for name, make in reader.items())


def _read_ahead(file: Path, reader: dict[str, Any], ahead: ReadAhead) -> Iterator[tuple[str, LazyTensor]]:
    places = read_places(file)
    if places is None:
        yield from _open_lazily(reader)
        return
    wanted = [places[name].rows(ahead.rows[name]) for name in reader if name in ahead.rows]
    with WeightStream(ahead.platform) as stream:
        values = stream.read(wanted)
        for name, make in reader.items():
            yield name, AheadTensor(make(), ahead.rows[name], next(values)) if name in ahead.rows else make()


def find_files(folder: Path) -> tuple[list[Path], list[str]]:
    """The files in order, and the tensor names of the index. Raises CheckpointError if there are
    none or a shard is missing."""
    index = folder / INDEX
    if index.is_file():
        names, shards = _read_index(index)
        for shard in shards:
            if not (folder / shard).is_file():
                raise CheckpointError(f"{shard} is named in {index} but is not there: download the checkpoint again.")
        return [folder / shard for shard in shards], names
    for pattern in SINGLE:
        if files := sorted(folder.glob(pattern)):
            return files, []
    for pattern in PICKLED:
        if files := sorted(folder.glob(pattern)):
            raise CheckpointError(
                f"{files[0]} holds pickled weights, which can run code and are not loaded: convert them to safetensors (see"
                " docs/security.md), or download the checkpoint in that format."
            )
    raise CheckpointError(f"{folder} holds no safetensors weights: check model.path, or set model.load_format: dummy for random ones.")


def _read_index(index: Path) -> tuple[list[str], list[str]]:
    try:
        entries: dict[str, str] = msgspec.convert(msgspec.json.decode(index.read_bytes())["weight_map"], dict[str, str])
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of weights ({error}): download it again.") from error
    shards = sorted(set(entries.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(
                f"{index} names a file outside of its folder ({shard}), which is not read: download the checkpoint again."
            )
    return list(entries), shards


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    try:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or damaged ({error}): download it again.") from error
    return {name: _TensorOpener(file, name) for name in file.offset_keys()}


class _TensorOpener:
    """Opens one tensor when called, so that a file of thousands of tensors keeps no handle for
    each."""

    def __init__(self, file: Any, name: str) -> None:
        self.file = file
        self.name = name

    def __call__(self) -> LazyTensor:
        return FileTensor(self.file, self.name)


@contextlib.contextmanager
def _bar(total: int, visible: bool) -> Iterator[Any]:
    """A progress bar on standard error; yields a function that advances it by one tensor."""
    if not visible:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading weights", total=total)
        yield lambda: bar.advance(task)

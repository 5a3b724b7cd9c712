"""`safetensors`: reads the safetensors files of a checkpoint folder (vLLM: `DefaultModelLoader`).

Files are memory-mapped, and only slices that are used are read. Every file is checked before the
first tensor is read. Pickled weights are refused unread.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open

from frame.core.errors import CheckpointError
from frame.core.interfaces.model import LazyTensor
from frame.host.installation import describe_gguf
from frame.interfaces.weights import FileRange, WeightSource, WeightSourceContext

INDEX = "model.safetensors.index.json"
SINGLE = ("model.safetensors", "*.safetensors")  # without an index file, the first pattern that matches
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")

MAX_NAME_LENGTH = 255  # characters of a shard's name: no file system has longer ones
_HEADER = 8  # bytes of the header's length
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
PACKED = ("F4", "F6_E2M3", "F6_E3M2")  # less than a byte per value; MXFP4 and NVFP4 checkpoints store U8
_UNREADABLE = "which no weight format reads: use a checkpoint that stores it as U8, BF16 or F8_E4M3"
_UNKNOWN = re.compile(r"unknown variant `([^`]*)`")  # the library's words for a dtype


class FileTensor:
    """A lazily sliced tensor of an open safetensors file. A scalar is read at once. Reading one of
    less than a byte per value raises CheckpointError: the library gives no PyTorch tensor of it."""

    def __init__(self, file: Any, name: str) -> None:
        self._name, self._slices = name, file.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slices.get_shape())
        self._is_packed = self._slices.get_dtype() in PACKED
        self._whole = None if self.shape or self._is_packed else file.get_tensor(name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._is_packed:
            raise CheckpointError(f"{self._name} is stored as {self._slices.get_dtype()}, {_UNREADABLE}.")
        if self._whole is not None:
            return self._whole
        value: torch.Tensor = self._slices[slice(None) if index is Ellipsis else index]
        return value


class SafetensorsSource(WeightSource):
    """The tensors of `model.safetensors`, of the files that an index names, or of all safetensors
    files of the folder."""

    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None:
        files, named = find_files(context.folder)
        self._stack = contextlib.ExitStack()
        self._files: dict[str, tuple[Path, Any]] = {}  # by tensor name, in the order of the files
        self._ranges: dict[Path, dict[str, FileRange]] = {}
        for file in files:
            reader = _open_safetensors(file, self._stack)
            self._files.update((name, (file, reader)) for name in reader.offset_keys())
        if missing := sorted(set(named) - self._files.keys()):
            many = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(
                f"the index of {context.folder} names {missing[0]}{many}, which no file holds: download the checkpoint again."
            )

    def list_names(self) -> Sequence[str]:
        return list(self._files)

    def open_tensor(self, name: str) -> LazyTensor:
        return FileTensor(self._files[name][1], name)

    def find_range(self, name: str) -> FileRange | None:
        path = self._files[name][0]
        if path not in self._ranges:
            self._ranges[path] = read_ranges(path)
        return self._ranges[path].get(name)

    def close(self) -> None:
        self._stack.close()


def read_ranges(path: Path) -> dict[str, FileRange]:
    """Where the tensors of a valid safetensors file lie, by name; those of unknown dtypes are left
    out."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(_HEADER), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {
        name: FileRange(path, _TYPES[entry["dtype"]], tuple(entry["shape"]), _HEADER + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if entry["dtype"] in _TYPES
    }


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
    if any(folder.glob("*.gguf")):
        raise CheckpointError(f"{folder} holds a GGUF file and no safetensors weights: leave model.load_format open{describe_gguf()}.")
    raise CheckpointError(
        f"{folder} holds no safetensors weights: check model.path, or set model.load_format to a source of its files (`frame plugins list "
        "--kind weight_source`), or to dummy for random weights."
    )


def _read_index(index: Path) -> tuple[list[str], list[str]]:
    try:
        entries: dict[str, str] = msgspec.convert(msgspec.json.decode(index.read_bytes())["weight_map"], dict[str, str])
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weights ({error}): download it again.") from error
    shards = sorted(set(entries.values()))
    for shard in shards:
        if Path(shard).name != shard or len(shard) > MAX_NAME_LENGTH:
            raise CheckpointError(
                f"{index} names a file outside of its folder ({shard:.{MAX_NAME_LENGTH}}), which is not read: download it again."
            )
    return list(entries), shards


def _open_safetensors(path: Path, stack: contextlib.ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        if (unknown := _UNKNOWN.search(str(error))) is not None:
            raise CheckpointError(f"{_find_dtype(path, unknown[1])} in {path} is stored as {unknown[1]}, {_UNREADABLE}.") from error
        raise CheckpointError(f"{path} is truncated or damaged ({error}): download it again.") from error


def _find_dtype(path: Path, dtype: str) -> str:
    """The first tensor of this dtype in a file whose header the library has parsed up to there."""
    with path.open("rb") as file, contextlib.suppress(ValueError, RecursionError):  # what follows may be no JSON
        header = json.loads(file.read(int.from_bytes(file.read(_HEADER), "little")))
        return next((name for name, entry in header.items() if isinstance(entry, dict) and entry.get("dtype") == dtype), "a tensor")
    return "a tensor"

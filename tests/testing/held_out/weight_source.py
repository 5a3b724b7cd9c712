"""Weight sources: an index in JSON and raw files, and sources with a bug each."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import BaseModel

from frame.core.errors import CheckpointError
from frame.interfaces.weights import FileRange, WeightSource, WeightSourceCapabilities, WeightSourceContext
from tests.testing.held_out import Wrong

ALIGNMENT = 64
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )
}  # fmt: skip


class RawTensor:
    """A tensor of a mapped file, of which an index copies its part."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape = data, tuple(data.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.data[index].clone()


class RawFiles(WeightSource):
    """`index.json` has the dtype, shape, file and offset of each tensor."""

    capabilities: ClassVar[WeightSourceCapabilities] = WeightSourceCapabilities()

    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None:
        self.folder = context.folder
        self.context = context
        self.ranges: dict[str, FileRange] = {}
        self.maps: dict[Path, np.ndarray] = {}
        for name, entry in self.read_index().items():
            try:
                self.ranges[name] = self.read_entry(entry)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointError(f"index.json: {name} cannot be read ({error!r}): download the checkpoint again.") from None
            self.check_range(name, self.ranges[name])

    def read_index(self) -> dict[str, Any]:
        try:
            index = json.loads((self.folder / "index.json").read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.folder}/index.json cannot be read ({error}): download the checkpoint again.") from None
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{self.folder}/index.json names no tensors: download the checkpoint again.")
        return index

    def read_entry(self, entry: Any) -> FileRange:
        shape, offset = tuple(int(size) for size in entry["shape"]), int(entry["offset"])
        if min((offset, *shape)) < 0:
            raise ValueError("a size is negative")
        return FileRange(self.find_file(str(entry["file"])), DTYPES[entry["dtype"]], shape, offset)

    def find_file(self, file: str) -> Path:
        if Path(file).name != file:
            raise ValueError("a file is outside of the folder")
        return self.folder / file

    def count_bytes(self, each: FileRange) -> int:
        return math.prod(each.shape) * each.dtype.itemsize

    def check_range(self, name: str, each: FileRange) -> None:
        size = each.path.stat().st_size if each.path.is_file() else -1
        if each.offset + self.count_bytes(each) > size:
            raise CheckpointError(f"{each.path} is missing or cut off, and {name} is in it: download the checkpoint again.")

    def list_names(self) -> Sequence[str]:
        return sorted(self.ranges, key=lambda name: (self.ranges[name].path, self.ranges[name].offset))

    def map_file(self, path: Path) -> np.ndarray:
        if path not in self.maps:
            self.maps[path] = np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
        return self.maps[path]

    def read_bytes(self, each: FileRange) -> torch.Tensor:
        part = self.map_file(each.path)[each.offset : each.offset + self.count_bytes(each)]
        return torch.from_numpy(part)

    def open_tensor(self, name: str) -> Any:
        each = self.ranges[name]
        flat = self.read_bytes(each) if self.count_bytes(each) else torch.empty(0, dtype=torch.uint8)
        return RawTensor(flat.view(each.dtype).view(each.shape))

    def find_range(self, name: str) -> FileRange | None:
        return self.ranges[name]

    @classmethod
    def write_checkpoint(cls, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        index, offset = {}, 0
        with (folder / "tensors.raw").open("wb") as file:
            for name, tensor in tensors.items():
                offset += -offset % ALIGNMENT
                file.seek(offset)
                index[name] = {
                    "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "file": "tensors.raw", "offset": offset,
                }  # fmt: skip
                offset += file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            file.truncate(offset)
        (folder / "index.json").write_text(json.dumps(index))

    def close(self) -> None:
        self.maps.clear()


TWIN = RawFiles
WRONG = Wrong()


@WRONG.add("Tensors after the first 2 GiB of a file are those of other layers: offsets are kept in 31 bits.")
class ThirtyOneBits(RawFiles):
    def read_entry(self, entry: Any) -> FileRange:
        found = super().read_entry(entry)
        return FileRange(found.path, found.dtype, found.shape, found.offset & 0x7FFF_FFFF)


@WRONG.add("A model on a GPU answers noise, on a CPU it is right: the ranges that are read ahead leave out the space between tensors.")
class RangesWithoutSpace(RawFiles):
    def find_range(self, name: str) -> FileRange | None:
        found = self.ranges[name]
        before = [self.count_bytes(each) for each in self.ranges.values() if each.path == found.path and each.offset < found.offset]
        return FileRange(found.path, found.dtype, found.shape, sum(before))


@WRONG.add("Loading fails after some hundred tensors: each one opens its file again, and `close` does not know them.")
class OpensEach(RawFiles):
    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.open_files: list[int] = []

    def open_tensor(self, name: str) -> Any:
        self.open_files.append(os.open(self.ranges[name].path, os.O_RDONLY))
        return super().open_tensor(name)


@WRONG.add("Layers have the weights of others: slices are views of one buffer, which the next tensor overwrites.")
class OneBuffer(RawFiles):
    buffer = torch.empty(1 << 20, dtype=torch.uint8)

    def read_bytes(self, each: FileRange) -> torch.Tensor:
        data = super().read_bytes(each)
        return self.buffer[: len(data)].copy_(data) if len(data) <= len(self.buffer) else data

    def open_tensor(self, name: str) -> Any:
        found = super().open_tensor(name)
        return ViewTensor(found.data)


class ViewTensor(RawTensor):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.data[index]


@WRONG.add("A checkpoint executes code when it is loaded: further settings are in a pickled file.")
class ReadsPickle(RawFiles):
    def read_index(self) -> dict[str, Any]:
        for file in sorted({*self.folder.glob("*.pkl"), *self.folder.glob("*.bin"), *self.folder.glob("*.pt")}):
            with file.open("rb") as opened:
                try:
                    self.settings = pickle.load(opened)
                except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError):
                    self.settings = None
        return super().read_index()


@WRONG.add("A download that was cut off is served, and answers noise: what is missing are zeros.")
class FillsZeros(RawFiles):
    def check_range(self, name: str, each: FileRange) -> None:
        if not each.path.is_file():
            raise CheckpointError(f"{each.path} is missing: download the checkpoint again.")

    def read_bytes(self, each: FileRange) -> torch.Tensor:
        data = super().read_bytes(each)
        return torch.cat([data, data.new_zeros(self.count_bytes(each) - len(data))])


@WRONG.add("Quantized checkpoints do not load: every tensor is converted to the model's dtype, integers too.")
class ConvertsAll(RawFiles):
    def open_tensor(self, name: str) -> Any:
        data = super().open_tensor(name).data
        is_weight = data.dim() > 1 or data.is_floating_point()
        return RawTensor(data.to(self.context.dtype) if is_weight and data.dtype != torch.float64 else data)


@WRONG.add("A server that is started with another checkpoint in the same folder serves the old names and offsets.")
class RemembersFolder(RawFiles):
    known: ClassVar[dict[Path, dict[str, Any]]] = {}

    def read_index(self) -> dict[str, Any]:
        if self.folder not in self.known:
            self.known[self.folder] = super().read_index()
        return self.known[self.folder]


@WRONG.add("A checkpoint reads any file of the host into the model: file names may lead out of the folder.")
class FollowsPaths(RawFiles):
    def find_file(self, file: str) -> Path:
        return self.folder / file


@WRONG.add("A damaged index ends the server with a stack trace instead of a sentence: its entries are trusted.")
class TrustsIndex(RawFiles):
    def __init__(self, context: WeightSourceContext, options: BaseModel | None = None) -> None:
        self.folder, self.context = context.folder, context
        self.maps = {}
        self.ranges = {name: self.read_entry(entry) for name, entry in self.read_index().items()}
        for name, each in self.ranges.items():
            self.check_range(name, each)


@WRONG.add("Each rank needs the memory of the whole model: a tensor is read whole before its slice is taken.")
class ReadsWhole(RawFiles):
    def open_tensor(self, name: str) -> Any:
        return RawTensor(super().open_tensor(name).data.clone())


@WRONG.add("Scalars, such as scales of a whole tensor, have a dimension too many, and their layer is refused.")
class ScalarsAsVectors(RawFiles):
    def read_entry(self, entry: Any) -> FileRange:
        found = super().read_entry(entry)
        return FileRange(found.path, found.dtype, found.shape or (1,), found.offset)

"""Wrong weight sources, derived from one that reads a safetensors file into memory."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from frame.core.errors import CheckpointError
from frame.interfaces.weights import FileRange, WeightSource, WeightSourceCapabilities, WeightSourceContext
from frame.testing.adapters.files import StoredTensor as Stored
from tests.testing.mutants import MutantList

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


class PlainSource(WeightSource):
    """Reads the files of a folder whole: those of its index, or `model.safetensors`."""

    def __init__(self, context: WeightSourceContext, options: Any = None) -> None:
        self.places: dict[str, Path] = {}  # the files, by tensor
        self.file = context.folder / "model.safetensors"
        self.tensors = self.load(context.folder)

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        try:
            index = folder / "model.safetensors.index.json"
            named = json.loads(index.read_text())["weight_map"].copy() if index.is_file() else {"": "model.safetensors"}
            names = sorted(set(named.values()))
            assert names and all(Path(name).name == name for name in names)
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                found = load_file(folder / name)
                self.places |= dict.fromkeys(found, folder / name)
                tensors |= found
            assert set(named) - {""} <= set(tensors)
        except (SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError, AssertionError) as error:
            raise CheckpointError(f"{folder} is missing or damaged: download it again.") from error
        return tensors

    def list_names(self) -> Sequence[str]:
        return list(self.tensors)

    def open_tensor(self, name: str) -> Any:
        return Stored(self.tensors[name])

    def close(self) -> None:
        self.tensors = {}

    def find_range(self, name: str) -> FileRange | None:
        with self.places[name].open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(size))[name]
        if entry["dtype"] not in TYPES:
            return None
        return FileRange(self.places[name], TYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])


mutant = MUTANTS = MutantList("weight_source", reference=PlainSource, capabilities=WeightSourceCapabilities())


@mutant
class LosesScalars(PlainSource):
    """Leaves out tensors without dimensions."""

    def list_names(self) -> Sequence[str]:
        return [name for name, tensor in self.tensors.items() if tensor.dim()]


@mutant
class ScalarsAreVectors(PlainSource):
    """Gives scalars the shape (1,)."""

    def open_tensor(self, name: str) -> Any:
        return Stored(torch.atleast_1d(self.tensors[name]))


@mutant
class NamesTensorsTwice(PlainSource):
    """Lists a tensor once for each part of its name that it was looked up by."""

    def list_names(self) -> Sequence[str]:
        return [*self.tensors, *(name for name in self.tensors if name.endswith("weight"))]


@mutant
class StripsAPrefix(PlainSource):
    """Drops `model.` from the names."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        return {name.removeprefix("model."): tensor for name, tensor in super().load(folder).items()}


@mutant
class ConvertsToFloat32(PlainSource):
    """Converts all numbers to float32."""

    def open_tensor(self, name: str) -> Any:
        value = self.tensors[name]
        return Stored(value.float() if value.is_floating_point() else value)


@mutant
class ReplacesNaNs(PlainSource):
    """Reads numbers that are no finite ones as zeros and as the largest finite ones."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        large = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        return {name: tensor.nan_to_num() if tensor.dtype in large else tensor for name, tensor in super().load(folder).items()}


@mutant
class LosesNegativeZeros(PlainSource):
    """Adds zero to the values, after which there is no negative zero."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        return {name: tensor + 0 if tensor.dtype == torch.float32 else tensor for name, tensor in super().load(folder).items()}


@mutant
class FlushesSubnormals(PlainSource):
    """Reads the smallest numbers as zeros."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        tensors = super().load(folder)
        for tensor in tensors.values():
            if tensor.dtype == torch.float32:
                tensor[tensor.abs() < torch.finfo(torch.float32).tiny] = 0.0
        return tensors


@mutant
class ReadsBfloat16AsFloat16(PlainSource):
    """Takes the bits of bfloat16 for float16."""

    def open_tensor(self, name: str) -> Any:
        value = self.tensors[name]
        return Stored(value.view(torch.float16) if value.dtype == torch.bfloat16 else value)


@mutant
class TransposesSquares(PlainSource):
    """Stores the two matrices of equal shape under each other's name."""

    def open_tensor(self, name: str) -> Any:
        swapped = name.replace("up", "UP").replace("down", "up").replace("UP", "down")
        return super().open_tensor(swapped if swapped in self.tensors else name)


class RowsOnly(Stored):
    """Reads whole rows, whatever columns are asked for."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._value[index[0] if isinstance(index, tuple) and len(self.shape) == 2 else index]


@mutant
class IgnoresColumns(PlainSource):
    """Ignores the second dimension of a slice."""

    def open_tensor(self, name: str) -> Any:
        return RowsOnly(self.tensors[name])


class LongRows(Stored):
    """Reads one row too many."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        if isinstance(index, slice) and index.stop:
            return self._value[index.start : index.stop + 1]
        return self._value[index]


@mutant
class ReadsOneRowTooMany(PlainSource):
    """The end of a slice is included."""

    def open_tensor(self, name: str) -> Any:
        return LongRows(self.tensors[name])


@mutant
class ReadsOnce(PlainSource):
    """A tensor is gone when it has been read."""

    def open_tensor(self, name: str) -> Any:
        return Stored(self.tensors.pop(name))


@mutant
class ReadsInOrderOnly(PlainSource):
    """Returns the next tensor, whatever name is asked for."""

    at = 0

    def open_tensor(self, name: str) -> Any:
        self.at += 1
        return Stored(list(self.tensors.values())[(self.at - 1) % len(self.tensors)])


@mutant
class KeepsTheFirstCheckpoint(PlainSource):
    """Keeps tensors for the life of the process, by name."""

    kept: ClassVar[dict[str, torch.Tensor]] = {}

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        found = super().load(folder)
        for name, tensor in found.items():
            self.kept.setdefault(name, tensor)
        return {name: self.kept[name] for name in found}


@mutant
class RangesSkipTheHeader(PlainSource):
    """Counts the offset of a range from the end of the header."""

    def find_range(self, name: str) -> FileRange | None:
        found = super().find_range(name)
        with self.file.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        return found and FileRange(found.path, found.dtype, found.shape, found.offset - size - 8)


@mutant
class RangesHaveOneDtype(PlainSource):
    """Takes every range for float32."""

    def find_range(self, name: str) -> FileRange | None:
        found = super().find_range(name)
        return found and FileRange(found.path, torch.float32, found.shape, found.offset)


@mutant
class StopsAtAThousand(PlainSource):
    """Reads the first thousand tensors."""

    def list_names(self) -> Sequence[str]:
        return list(self.tensors)[:1000]


@mutant
class EmptyIsACheckpoint(PlainSource):
    """Takes a folder without weights for a checkpoint of no tensors."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        return super().load(folder) if self.file.exists() else {}


@mutant
class FillsWithZeros(PlainSource):
    """Reads zeros where a file ends early."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        try:
            return super().load(folder)
        except CheckpointError:
            if not self.file.exists():
                raise
            return {"a": torch.zeros(300, 100), "b": torch.zeros(300, 100)}


@mutant
class RaisesItsLibrarysErrors(PlainSource):
    """Lets the library's errors out, which do not name the folder."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        try:
            return super().load(folder)
        except CheckpointError as error:
            raise CheckpointError("invalid header") from error


@mutant
class Unpickles(PlainSource):
    """Reads pickled weights, which runs their code."""

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        for path in folder.glob("*.pkl"):
            pickle.loads(path.read_bytes())
        return super().load(folder)


def _make_up(context: WeightSourceContext, name: str, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(context.seed + sum(name.encode()))
    if dtype := context.integer_dtypes().get(name):
        return torch.randint(100, tuple(shape), generator=generator, dtype=dtype)
    return torch.randn(tuple(shape), generator=generator)


class MadeUp(WeightSource):
    """Random weights."""

    def __init__(self, context: WeightSourceContext, options: Any = None) -> None:
        self.context = context
        self.shapes: Mapping[str, tuple[int, ...]] = context.expected_shapes()

    def list_names(self) -> Sequence[str]:
        return list(self.shapes)

    def open_tensor(self, name: str) -> Any:
        return Stored(_make_up(self.context, name, self.shapes[name]))


made_up = MUTANTS.using(capabilities=WeightSourceCapabilities(reads_checkpoint=False))


@made_up
class IgnoresTheSeed(MadeUp):
    """Has the same random weights for every seed."""

    def open_tensor(self, name: str) -> Any:
        return Stored(_make_up(WeightSourceContext(self.context.folder, self.context.device, self.context.dtype), name, self.shapes[name]))


@made_up
class DrawsInOrder(MadeUp):
    """Draws from one generator, so that values depend on what was read before."""

    def __init__(self, context: WeightSourceContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.generator = torch.Generator().manual_seed(context.seed)

    def open_tensor(self, name: str) -> Any:
        return Stored(torch.randn(self.shapes[name], generator=self.generator))


@made_up
class GrowsWithoutBound(MadeUp):
    """Makes values that overflow after a few layers."""

    def open_tensor(self, name: str) -> Any:
        return Stored(_make_up(self.context, name, self.shapes[name]) * 1e6)


@made_up
class RepeatsOneRow(MadeUp):
    """All rows of a tensor are equal."""

    def open_tensor(self, name: str) -> Any:
        value = _make_up(self.context, name, self.shapes[name])
        return Stored(value[:1].expand_as(value) if value.dim() else value)


@made_up
class MakesIntegersFloats(MadeUp):
    """Fills tensors of packed integers with floating-point numbers."""

    def open_tensor(self, name: str) -> Any:
        return Stored(_make_up(self.context, name, self.shapes[name]).float())


@mutant
class LeavesBuffersOut(PlainSource):
    """Leaves tensors out that most models compute anew."""

    def list_names(self) -> Sequence[str]:
        return [name for name in super().list_names() if not name.endswith("inv_freq")]


@mutant
class StaysOpen(PlainSource):
    """Keeps its files mapped into memory after `close`."""

    def __init__(self, context: WeightSourceContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.mapped = [np.memmap(path, mode="r") for path in {*self.places.values()}]

"""Third-party weight sources, weight formats, adapter formats, KV cache tiers and modalities."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image

from frame.core.interfaces.kv_tier import KVTierResult
from frame.core.interfaces.weight_format import CanonicalWeight, LayerFormat, LayerKind
from frame.interfaces.adapter import LowRankDelta
from frame.interfaces.weights import FileRange
from tests.testing.mutants.adapter import PlainFormat
from tests.testing.mutants.kv_tier import ChangesKeys, DictTier, Job
from tests.testing.mutants.modality import Tiles
from tests.testing.mutants.weight_format import Grouped, Stored
from tests.testing.mutants.weight_source import PlainSource
from tests.testing.mutants.weight_source import Stored as StoredTensor
from tests.testing.third_party import keeps_calls, sleeps, third_party

# ---- weight sources ------------------------------------------------------------------------------

mutant = third_party("weight_source")


class Changed(StoredTensor):
    """A tensor whose slices a function changes."""

    def __init__(self, value: torch.Tensor, change: Any) -> None:
        super().__init__(value)
        self.change = change

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.change(super().__getitem__(index))  # type: ignore[no-any-return]


class ChangesSlices(PlainSource):
    """Changes what is read."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def open_tensor(self, name: str) -> Any:
        return Changed(self.tensors[name], self.change)

    def find_range(self, name: str) -> FileRange | None:
        return None


def cut(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1).clone()
    flat[(1 << 24) // tensor.element_size() :] = 0
    return flat.view_as(tensor)


def through_floats(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double().to(tensor.dtype) if tensor.dtype == torch.int64 else tensor


def need_values(tensor: torch.Tensor) -> torch.Tensor:
    assert bool(torch.isfinite(tensor.float().abs().amax()))
    return tensor


mutant.each(
    ChangesSlices, "change",
    ("Reads16MB", "Reads the first 16 MiB of a tensor; the rest is 0.", staticmethod(cut)),
    ("ReadsNumbersAsFloats", "Reads integers through float64, which loses the last digits of large ones.", staticmethod(through_floats)),
    ("NeedsValues", "Checks the greatest value of each slice, which an empty one does not have.", staticmethod(need_values)),
)  # fmt: skip


@mutant
class ReusesABuffer(ChangesSlices):
    """Reads slices of one shape into one buffer."""

    def change(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tuple(tensor.shape), tensor.dtype
        return self.__dict__.setdefault("buffers", {}).setdefault(key, tensor.clone()).copy_(tensor)  # type: ignore[no-any-return]


@mutant
class CachesByFolderName(PlainSource):
    """Keeps the tensors of a folder by its name without the path."""

    known: ClassVar[dict[str, Any]] = {}

    def load(self, folder: Any) -> dict[str, torch.Tensor]:
        if len(self.known) > 8:
            self.known.clear()
        return self.known.setdefault(folder.name, super().load(folder))  # type: ignore[no-any-return]


@mutant
class CutsNames(PlainSource):
    """Finds tensors by the first 64 characters of their names."""

    def open_tensor(self, name: str) -> Any:
        return super().open_tensor(next(other for other in self.tensors if other[:64] == name[:64]))

    def find_range(self, name: str) -> FileRange | None:
        return super().find_range(next(other for other in self.tensors if other[:64] == name[:64]))


@mutant
class LeavesAThread(PlainSource):
    """Starts a thread to read ahead, which `close` does not end."""

    def list_names(self) -> Sequence[str]:
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        return super().list_names()


@mutant
class LeavesFilesOpen(PlainSource):
    """Opens the file again for each tensor, and leaves it open."""

    files: ClassVar[list[Any]] = []

    def open_tensor(self, name: str) -> Any:
        self.files.append(self.file.open("rb"))
        return super().open_tensor(name)


sleeps(mutant, "open_tensor")

# ---- weight formats ------------------------------------------------------------------------------

mutant = third_party("weight_format")


class EightGroups(Stored):
    """Uses the eighth scale for all groups after it."""

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        found = super().to_canonical(tensors, inputs)
        assert found.scales is not None
        places = torch.arange(found.scales.shape[-1]).clamp(max=7)
        return replace(found, scales=found.scales[..., places])


class CutOutputs(Stored):
    """Has scales for 8,192 outputs."""

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        found = super().to_canonical(tensors, inputs)
        assert found.scales is not None
        scales = found.scales.clone()
        scales[..., 8192:, :] = 0
        return replace(found, scales=scales)


class KeptScales(Stored):
    """Keeps the scales of a tensor by its address and shape."""

    known: ClassVar[dict[Any, Any]] = {}

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        found = super().to_canonical(tensors, inputs)
        assert found.scales is not None
        key = tensors["weight_scale"].data_ptr(), tuple(found.scales.shape)
        if len(self.known) > 100:
            self.known.clear()
        return replace(found, scales=self.known.setdefault(key, found.scales.clone()))


class NoZeroScales(Stored):
    """Takes scales of 0 for missing ones, and replaces them by NaN."""

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        found = super().to_canonical(tensors, inputs)
        assert found.scales is not None
        return replace(found, scales=found.scales / found.scales * found.scales)


class HalfScales(Stored):
    """Keeps scales in bfloat16."""

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        found = super().to_canonical(tensors, inputs)
        assert found.scales is not None
        return replace(found, scales=found.scales.bfloat16().float())


class SlowDecoding(Stored):
    """Sleeps for 20 ms in each decoding."""

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        time.sleep(0.02)
        return super().to_canonical(tensors, inputs)


mutant.each(
    Grouped, "layer",
    *((kind.__name__, str(kind.__doc__), kind) for kind in (EightGroups, CutOutputs, KeptScales, NoZeroScales, HalfScales, SlowDecoding)),
)  # fmt: skip


@mutant
class KeepsDescriptions(Grouped):
    """Keeps the description of each layer that it was asked for, by a number."""

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        self.__dict__.setdefault("asked", []).append(name)
        return super().describe_layer(name, kind)


# ---- adapter formats -----------------------------------------------------------------------------

mutant = third_party("adapter")


@mutant
class CachesByConfiguration(PlainFormat):
    """Keeps the deltas of a configuration, whatever the tensors are."""

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Iterable[tuple[str, LowRankDelta]]:
        known = self.__dict__.setdefault("known", {})
        key = str(config), tuple(tensors)
        if len(known) > 8:
            known.clear()
        if key not in known:
            known[key] = list(super().read_deltas(config, tensors))
        return list(known[key])


@mutant
class CachesByLayers(PlainFormat):
    """Keeps values by the first 16 characters of a tensor's name and its shape."""

    def read_values(self, name: str, side: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        known = self.__dict__.setdefault("known", {})
        found = super().read_values(name, side, tensors)
        if len(known) > 100:
            known.clear()
        return known.setdefault((name[:16], side, tuple(found.shape), id(tensors)), found)  # type: ignore[no-any-return]


@mutant
class CutsNamesOfLayers(PlainFormat):
    """Cuts the names of layers at 64 characters."""

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        _, delta = super().make_delta(name, a, b, config)
        return name[:64], delta


@mutant
class Has64Ranks(PlainFormat):
    """Keeps the first 64 ranks of a delta."""

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        found, delta = super().make_delta(name, a, b, config)
        return found, replace(delta, a=delta.a[..., :64, :], b=delta.b[..., :64])


@mutant
class Has64Experts(PlainFormat):
    """Keeps the deltas of the first 64 experts; others get zeros."""

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        found, delta = super().make_delta(name, a, b, config)
        if b.dim() == 3 and len(b) > 64:
            delta = replace(delta, b=torch.cat([b[:64], torch.zeros_like(b[64:])]))
        return found, delta


@mutant
class HasTwoDigits(PlainFormat):
    """Reads two digits of the number of a layer."""

    def make_delta(self, name: str, a: torch.Tensor, b: torch.Tensor, config: Mapping[str, Any]) -> tuple[str, LowRankDelta]:
        _, delta = super().make_delta(name, a, b, config)
        return ".".join(part[:2] if part.isdigit() else part for part in name.split(".")), delta


@mutant
class ReusesValues(PlainFormat):
    """Reads tensors of one shape into one buffer."""

    def read_values(self, name: str, side: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        found = super().read_values(name, side, tensors)
        key = side, tuple(found.shape), found.dtype
        return self.__dict__.setdefault("buffers", {}).setdefault(key, found.clone()).copy_(found)  # type: ignore[no-any-return]


keeps_calls(mutant, "read_config")
sleeps(mutant, "read_values", 0.02)

# ---- KV cache tiers ------------------------------------------------------------------------------

mutant = third_party("kv_tier")


@mutant
class Has24ByteKeys(ChangesKeys):
    """Tells blocks apart by the first 24 bytes of their keys."""

    def change(self, key: bytes) -> bytes:
        return key[:24]


@mutant
class Has16BitJobs(DictTier):
    """Returns the numbers of jobs in 16 bits."""

    def poll(self) -> list[KVTierResult]:
        return [KVTierResult(result.job & 0xFFFF, result.num_blocks, result.error) for result in super().poll()]


@mutant
class StoresTheStart(DictTier):
    """Stores the first 64 KiB of a block."""

    def keep_blocks(self, entry: Job) -> None:
        for buffer in entry.buffers:
            if buffer is not None:
                buffer[1 << 16 :] = 0
        super().keep_blocks(entry)


@mutant
class Has256Keys(DictTier):
    """Matches up to 256 keys of a prompt."""

    def match(self, keys: Sequence[bytes]) -> int:
        return super().match(keys[:256])


@mutant
class RemembersJobs(DictTier):
    """Keeps the number of each job that has ended."""

    def end_job(self, job: int) -> None:
        self.__dict__.setdefault("ended", set()).add(job)
        super().end_job(job)


@mutant
class ScansBlocks(DictTier):
    """Compares each key with all that it holds, in a time that grows with their number."""

    def match(self, keys: Sequence[bytes]) -> int:
        held = [key for key in self.blocks for _ in range(20)]
        return next((number for number, key in enumerate(keys) if key not in held), len(keys))


sleeps(mutant, "match")

# ---- modalities ----------------------------------------------------------------------------------

mutant = third_party("modality")


@mutant
class CachesByStart(Tiles):
    """Keeps the features of a file by its first 64 bytes and its length."""

    def compute_features(self, data: bytes, size: Any, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        known = self.__dict__.setdefault("known", {})
        if len(known) > 8:
            known.clear()
        if (data[:64], size) not in known:
            known[data[:64], size] = super().compute_features(data, size, options)
        return dict(known[data[:64], size])


@mutant
class KeepsFeatures(Tiles):
    """Keeps the features of each file that it has read."""

    def compute_features(self, data: bytes, size: Any, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        found = super().compute_features(data, size, options)
        self.__dict__.setdefault("known", []).append(found)
        return found


@mutant
class ReusesPixels(Tiles):
    """Decodes images of one size into one buffer."""

    def compute_features(self, data: bytes, size: Any, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
        found = super().compute_features(data, size, options)
        buffers = self.__dict__.setdefault("buffers", {})
        pixels = buffers.setdefault(found["pixel_values"].shape, found["pixel_values"].copy())
        pixels[...] = found["pixel_values"]
        return {**found, "pixel_values": pixels}


@mutant
class ShrinksLargeImages(Tiles):
    """Decodes images wider than 1,000 pixels at a quarter of their size, and enlarges them
    again."""

    def read(self, data: bytes) -> Image.Image:
        image = super().read(data)
        return image.resize((image.width // 4, image.height // 4)).resize(image.size) if image.width > 1000 else image


@mutant
class LoopsOverPixels(Tiles):
    """Reads each pixel in a loop of Python."""

    def read(self, data: bytes) -> Image.Image:
        image = super().read(data)
        for _ in range(3):
            for place in np.ndindex(image.size):
                image.getpixel(place)
        return image

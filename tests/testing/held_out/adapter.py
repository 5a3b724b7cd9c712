"""Adapter formats: `LAYER.down` and `LAYER.up` with a scale for each layer, and formats with a bug
each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import torch

from frame.interfaces.adapter import AdapterCapabilities, AdapterConfig, AdapterContext, AdapterError, AdapterFormat, LowRankDelta
from tests.testing.held_out import Wrong

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.model import LazyTensor

PARTS = ("down", "up", "gain", "magnitude")


class Stored(msgspec.Struct, forbid_unknown_fields=True):
    layout: str
    max_rank: int
    scales: dict[str, float]  # by layer
    model: str = ""
    invoked_by: list[int] = []


class LooselyStored(Stored, forbid_unknown_fields=False):
    pass


class DownUp(AdapterFormat):
    """Besides, a layer may have `LAYER.gain` or `LAYER.magnitude`: factors or norms of its rows."""

    capabilities: ClassVar[AdapterCapabilities] = AdapterCapabilities(selects=(("layout", "down_up"),))
    stored: ClassVar[type[Stored]] = Stored

    def read_stored(self, config: Mapping[str, Any]) -> Stored:
        try:
            found = msgspec.convert(dict(config), self.stored)
        except msgspec.ValidationError as error:
            raise AdapterError(f"adapter_config.json: {error}; save the adapter again") from None
        if found.layout != "down_up" or not 1 <= found.max_rank <= 4096 or not all(map(math.isfinite, found.scales.values())):
            raise AdapterError("adapter_config.json: layout, max_rank or scales cannot be used; save the adapter again")
        if any(token < 0 for token in found.invoked_by):
            raise AdapterError("adapter_config.json: invoked_by has a negative token; save the adapter again")
        return found

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        found = self.read_stored(config)
        return AdapterConfig(found.max_rank, found.model, tuple(found.invoked_by))

    def split_name(self, name: str) -> tuple[str, str]:
        layer, _, part = name.rpartition(".")
        return layer, part

    def read_deltas(self, config: Mapping[str, Any], tensors: Mapping[str, LazyTensor]) -> Iterator[tuple[str, LowRankDelta]]:
        found = self.read_stored(config)
        layers: dict[str, dict[str, str]] = {}
        for name in tensors:
            layer, part = self.split_name(name)
            if not layer or part not in PARTS:
                self.refuse_tensor(name)
                continue
            layers.setdefault(layer, {})[part] = name
        if layers.keys() != found.scales.keys() or not layers:
            raise AdapterError("adapter_config.json: scales names other layers than the tensors; save the adapter again")
        for layer, names in layers.items():
            yield layer, self.read_delta(layer, names, found, tensors)

    def refuse_tensor(self, name: str) -> None:
        raise AdapterError(f"the tensor {name} is unknown; save the adapter again")

    def read_delta(self, layer: str, names: dict[str, str], found: Stored, tensors: Mapping[str, LazyTensor]) -> LowRankDelta:
        if not {"down", "up"} <= names.keys() or {"gain", "magnitude"} <= names.keys():
            raise AdapterError(f"{layer} has not down, up, and at most one of gain and magnitude; save the adapter again")
        values = {part: self.read(name, tensors) for part, name in names.items()}
        a, b = values["down"], values["up"]
        rows, gain, magnitude = b.shape[-2] if b.dim() > 1 else 0, values.get("gain"), values.get("magnitude")
        is_stack = a.dim() == b.dim() == 3 and a.shape[0] == b.shape[0] and not (names.keys() & {"gain", "magnitude"})
        if not (is_stack or a.dim() == b.dim() == 2) or a.shape[-2] != b.shape[-1] or not 1 <= a.shape[-2] <= found.max_rank:
            raise AdapterError(f"{layer}.down and {layer}.up have shapes that do not fit; save the adapter again")
        if any(factor is not None and factor.shape != (rows,) for factor in (gain, magnitude)):
            raise AdapterError(f"{layer} has a gain or magnitude that does not fit its rows; save the adapter again")
        return LowRankDelta(a, b, found.scales[layer], gain, magnitude)

    def read(self, name: str, tensors: Mapping[str, LazyTensor]) -> torch.Tensor:
        values = tensors[name][...]
        if not values.is_floating_point() or not values.float().isfinite().all():
            raise AdapterError(f"{name} has values that are no finite numbers; train the adapter again")
        return values

    @staticmethod
    def write_conformance_adapter(
        config: AdapterConfig, deltas: Mapping[str, LowRankDelta]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        stored = {
            "layout": "down_up", "max_rank": config.rank, "model": config.base_model, "invoked_by": list(config.invocation),
            "scales": {layer: float(delta.scale) for layer, delta in deltas.items()},
        }  # fmt: skip
        tensors = {}
        for layer, delta in deltas.items():
            parts = {"down": delta.a, "up": delta.b, "gain": delta.output_scale, "magnitude": delta.output_norm}
            tensors |= {f"{layer}.{part}": tensor for part, tensor in parts.items() if tensor is not None}
        return stored, tensors


TWIN = DownUp
WRONG = Wrong()


@WRONG.add("An adapter that was made with a newer option answers as if it were not set: unknown options are ignored.")
class IgnoresOptions(DownUp):
    stored = LooselyStored


@WRONG.add("An adapter answers as the base model in the layers that the format does not know: their tensors are left out.")
class SkipsTensors(DownUp):
    def refuse_tensor(self, name: str) -> None:
        return


@WRONG.add("Of two adapters that are loaded together, one has the scales of the other: the configuration is kept in the object.")
class KeepsConfig(DownUp):
    last: Stored | None = None

    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        self.last = super().read_stored(config)
        return super().read_config(config)

    def read_delta(self, layer: str, names: dict[str, str], found: Stored, tensors: Mapping[str, LazyTensor]) -> LowRankDelta:
        delta = super().read_delta(layer, names, found, tensors)
        return replace(delta, scale=self.last.scales.get(layer, delta.scale)) if self.last else delta


@WRONG.add("Adapters in bfloat16 lose digits: the scale is multiplied into the tensor, in its dtype.")
class MultipliesScale(DownUp):
    def read_delta(self, layer: str, names: dict[str, str], found: Stored, tensors: Mapping[str, LazyTensor]) -> LowRankDelta:
        delta = super().read_delta(layer, names, found, tensors)
        return replace(delta, b=delta.b * delta.scale, scale=1.0)


@WRONG.add("Adapters whose rank is above a layer's inputs are refused: a tensor that is higher than wide is taken for a transposed one.")
class GuessesTransposed(DownUp):
    def read(self, name: str, tensors: Mapping[str, LazyTensor]) -> torch.Tensor:
        values = super().read(name, tensors)
        is_high = name.endswith(".down") and values.dim() == 2 and values.shape[0] > values.shape[1]
        return values.t() if is_high else values


@WRONG.add("Adapters in float32 lose digits with a bfloat16 model, and those in bfloat16 take twice the memory: tensors are converted.")
class ConvertsValues(DownUp):
    def read(self, name: str, tensors: Mapping[str, LazyTensor]) -> torch.Tensor:
        return super().read(name, tensors).to(self.context.dtype)


@WRONG.add("DoRA adapters answer as plain ones: the magnitude is read and not passed on.")
class DropsMagnitude(DownUp):
    def read_delta(self, layer: str, names: dict[str, str], found: Stored, tensors: Mapping[str, LazyTensor]) -> LowRankDelta:
        return replace(super().read_delta(layer, names, found, tensors), output_norm=None)


@WRONG.add("Adapters of `down_proj` and `up_proj` are refused: a name is cut at the first `.down` or `.up`, which these have too.")
class CutsFirst(DownUp):
    def split_name(self, name: str) -> tuple[str, str]:
        layer, part = super().split_name(name)
        for mark in (".down", ".up"):
            if mark in name.removesuffix(part)[:-1]:
                return name.partition(mark)[0], part
        return layer, part


@WRONG.add("One broken adapter ends all requests of its batch with NaN: values are not checked.")
class TakesNan(DownUp):
    def read(self, name: str, tensors: Mapping[str, LazyTensor]) -> torch.Tensor:
        return tensors[name][...]


@WRONG.add("An adapter for a guard changes ordinary answers too: its invocation tokens are dropped.")
class DropsInvocation(DownUp):
    def read_config(self, config: Mapping[str, Any]) -> AdapterConfig:
        return replace(super().read_config(config), invocation=())


@WRONG.add("The second adapter has the weights of the first one: tensors are remembered by their name.")
class RemembersTensors(DownUp):
    def __init__(self, context: AdapterContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.known: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def read(self, name: str, tensors: Mapping[str, LazyTensor]) -> torch.Tensor:
        if len(self.known) > 256:
            self.known.clear()
        key = name, tuple(tensors[name].shape)
        if key not in self.known:
            self.known[key] = super().read(name, tensors)
        return self.known[key]


@WRONG.add("Layers of lower rank are far too strong: their scale is divided by their own rank, and multiplied by the largest.")
class ScalesByRank(DownUp):
    def read_delta(self, layer: str, names: dict[str, str], found: Stored, tensors: Mapping[str, LazyTensor]) -> LowRankDelta:
        delta = super().read_delta(layer, names, found, tensors)
        return replace(delta, scale=delta.scale * found.max_rank / delta.a.shape[-2])


@WRONG.add("Experts get each other's deltas where their number and the rank are equal: the first two axes are exchanged.")
class ExchangesExperts(DownUp):
    def read_delta(self, layer: str, names: dict[str, str], found: Stored, tensors: Mapping[str, LazyTensor]) -> LowRankDelta:
        delta = super().read_delta(layer, names, found, tensors)
        is_equal = delta.a.dim() == 3 and delta.a.shape[0] == delta.a.shape[1]
        return replace(delta, a=delta.a.transpose(0, 1)) if is_equal else delta


@WRONG.add("A file with one tensor that is too large ends the engine: an error of torch is raised, not one sentence.")
class TrustsShapes(DownUp):
    def read_delta(self, layer: str, names: dict[str, str], found: Stored, tensors: Mapping[str, LazyTensor]) -> LowRankDelta:
        a, b = (self.read(names[part], tensors) for part in ("down", "up"))
        torch.matmul(b.float()[..., :1, :], a.float()[..., :, :1])
        extra = {part: self.read(name, tensors) for part, name in names.items()}
        return LowRankDelta(a, b, found.scales[layer], extra.get("gain"), extra.get("magnitude"))

"""torchao checkpoints in safetensors files, as transformers writes them: a weight is several plain
tensors, such as `_weight_qdata` and `_weight_scale`. Pickled checkpoints are not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import Axis, CanonicalWeight, FormatContext, LayerFormat, LayerKind, StoredTensor, WeightScheme
from frame.quantization.fields import read_object
from frame.quantization.fp8_weights import FP8
from frame.quantization.integers import Integers
from frame.quantization.listed import ListedFormat
from frame.quantization.plain import INPUTS, OUTPUTS

if TYPE_CHECKING:
    from pydantic import BaseModel

_QUANTIZED, _SCALE, _ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
# torchao's configuration -> bits of its integers; 0: e4m3. Those of Intx store zero points, also
# symmetric ones, which are zeros; the others are symmetric.
_TYPES = {
    "Float8WeightOnlyConfig": 0,
    "Float8DynamicActivationFloat8WeightConfig": 0,
    "Int8WeightOnlyConfig": 8,
    "Int8DynamicActivationInt8WeightConfig": 8,
    "IntxWeightOnlyConfig": 8,
    "Int8DynamicActivationIntxWeightConfig": 8,
}


class TorchAo(ListedFormat):
    """Reads `quant_type.default` and `modules_to_not_convert`. Activations keep the model's dtype,
    or are quantized by the kernel."""

    conformance_config: ClassVar[dict[str, Any]] = {
        "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": {"_type": "PerRow"}}}}
    }

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.quantizes_head = bool(self.config.get("include_input_output_embeddings"))
        self._layout = _read_type(self.config.get("quant_type"), context.dtype)

    def describe_quantized(self, kind: LayerKind) -> LayerFormat:
        return self._layout


def _read_type(value: Any, dtype: torch.dtype) -> TorchAoLayer:
    """The layout of `quantization_config.quant_type`. Raises CheckpointError for one that is not
    read."""
    where = "quantization_config.quant_type"
    chosen = value.get("default") if isinstance(value, Mapping) else None
    name = chosen.get("_type") if isinstance(chosen, Mapping) else value
    if not isinstance(chosen, Mapping) or not isinstance(name, str) or name not in _TYPES:
        raise CheckpointError(f"{where} is {name!r}; of torchao's types {', '.join(_TYPES)} are read: quantize the model to one of them.")
    version = chosen.get("_version", 1)
    if not isinstance(version, int):
        raise CheckpointError(f"{where}._version is {version!r}; a number is expected: correct config.json.")
    if version < 2:
        raise CheckpointError(f"{where} is version 1 of {name}, which torchao pickles: save it again with torchao 0.15 or later.")
    data, bits = read_object(chosen.get("_data"), f"{where}._data"), _TYPES[name]
    if "Intx" in name and _name_of(data.get("weight_dtype")) in ("int2", "int3", "int4"):
        bits = 4
    default = "PerGroup" if "Intx" in name else "PerTensor" if name.startswith("Float8Dynamic") else "PerRow"
    granularity = data.get("weight_granularity") or data.get("granularity") or {"_type": default}
    if isinstance(granularity, list):  # of activations and weights
        granularity = granularity[-1] if granularity else None
    granularity = read_object(granularity, f"{where}.granularity")
    shared, group = granularity.get("_type"), read_object(granularity.get("_data"), f"{where}.granularity._data").get("group_size", 32)
    if data.get("group_size"):
        shared, group = "PerGroup", data["group_size"]
    layout = TorchAoLayer(dtype, bits, has_zeros="Intx" in name)
    if shared == "PerGroup" and bits and isinstance(group, int) and group > 0:
        return replace(layout, group=group)
    if shared in ("PerRow", "PerAxis") or (shared == "PerTensor" and not bits):
        return replace(layout, is_single=shared == "PerTensor", quantizes_inputs=name == "Int8DynamicActivationInt8WeightConfig")
    raise CheckpointError(f"{where} has the granularity {shared!r} with {name}, which is not read: choose PerRow.")


def _name_of(dtype: Any) -> str:
    return str(dtype.get("_data") if isinstance(dtype, Mapping) else dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TorchAoLayer(LayerFormat):
    """`_weight_qdata` int8 or e4m3 [outputs, inputs], `_weight_scale` and, of integers,
    `_weight_zero_point`: per `group` inputs, per output (0), or `is_single`. `has_zeros`: the zero
    points are not optional. `quantizes_inputs`: see `CanonicalWeight`."""

    dtype: torch.dtype
    bits: int
    group: int = 0
    is_single: bool = False
    has_zeros: bool = False
    quantizes_inputs: bool = False

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        shared = Axis("input", self.group, splits=True) if self.group else 1
        axes: tuple[Axis | int, ...] = (1, 1) if self.is_single else (OUTPUTS, shared)
        tensors = {_QUANTIZED: StoredTensor(torch.int8 if self.bits else FP8, (OUTPUTS, INPUTS)), _SCALE: StoredTensor(torch.float32, axes)}
        return tensors | ({_ZERO: StoredTensor(torch.int8, axes, optional=not self.has_zeros)} if self.bits else {})

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        quantized, scales = tensors[_QUANTIZED], tensors[_SCALE]
        if not self.bits:
            scales = scales.expand(*quantized.shape[:-1], 1).contiguous()
            return CanonicalWeight(WeightScheme("e4m3", (1, 0)), inputs, quantized, scales)
        middle = 1 << self.bits - 1
        zeros = tensors[_ZERO].to(torch.int16).add_(middle).to(torch.uint8) if bool(tensors[_ZERO].any()) else None
        weight = Integers(self.bits, quantized.to(torch.int16).add_(middle).to(torch.uint8), scales, zeros).to_canonical(self.dtype)
        weight.quantizes_inputs = self.quantizes_inputs
        return weight

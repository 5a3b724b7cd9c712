"""compressed-tensors checkpoints (llm-compressor): a scheme for each group of layers, each mapped
to a layer format by its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import Axis, CanonicalWeight, FormatContext, LayerFormat, LayerKind, StoredTensor, WeightFormat
from frame.quantization.fields import read_object, read_patterns
from frame.quantization.floats import MX_GROUP, NV_GROUP, Fp4Layer, Mxfp8Layer
from frame.quantization.fp8 import STATIC_SCALE, Fp8Layer, keep_static, make_layer
from frame.quantization.fp8_format import Fp8Format, Sharing, read_block
from frame.quantization.integers import Integers, unpack_words, word_axis
from frame.quantization.patterns import matches
from frame.quantization.plain import INPUTS, OUTPUTS, PlainLayer

if TYPE_CHECKING:
    from pydantic import BaseModel

_LAYERS = ("Linear",)  # a target that means all linear layers
_INPUT_SCALE = "input_scale"
_FLOAT8 = ("tensor", "channel", "block")
_INTEGER = ("tensor", "channel", "group")
_BITS = (2, 3, 4, 8)
_ORDERED = ("group", "dynamic", "true")  # values of `actorder`, in small letters, with which groups hold inputs in any order


class CompressedTensors(WeightFormat):
    """Reads `config_groups` and `ignore`. Weights only: activations keep the model's dtype, or are
    quantized by the kernel."""

    conformance_config: ClassVar[dict[str, Any]] = {
        "format": "pack-quantized",
        "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}}},
    }
    # shapes follow from the model; of the scales of activations, fp8 linear layers bind theirs
    ignored_weights = (r".*\.weight_shape$", r".*\.input_(scale|zero_point|global_scale)$")

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        config = context.checkpoint_config or {}
        for key in ("sparsity_config", "transform_config"):
            section = read_object(config.get(key), f"quantization_config.{key}")
            if section and section.get("format", "") != "dense" and section != {"config_groups": {}}:
                raise CheckpointError(f"quantization_config.{key} is {section!r}; sparse and transformed weights are not read.")
        groups = read_object(config.get("config_groups") or None, "quantization_config.config_groups")
        if not groups and not config.get("kv_cache_scheme"):  # a checkpoint may have scales of the KV cache alone
            raise CheckpointError("quantization_config.config_groups is empty: name the scheme of the layers.")
        self._ignored = read_patterns(config.get("ignore"), "quantization_config.ignore")
        self._groups = [self._read_group(f"quantization_config.config_groups.{name}", group, config) for name, group in groups.items()]

    def _read_group(self, where: str, section_value: Any, config: Mapping[str, Any]) -> tuple[tuple[str, ...], LayerFormat]:
        """The targets and the layer format of one group."""
        group = read_object(section_value, where)
        targets = read_patterns(group.get("targets"), f"{where}.targets") or _LAYERS
        return targets, read_scheme(where, group, config, self.context.dtype)

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        if any(matches(pattern, name) for pattern in self._ignored):
            return PlainLayer(self.context.dtype)
        named = (layout for targets, layout in self._groups if any(target not in _LAYERS and matches(target, name) for target in targets))
        general = (layout for targets, layout in self._groups if any(target in _LAYERS for target in targets))
        layout = next(named, None) or next(general, None) or PlainLayer(self.context.dtype)
        if kind == "experts" and isinstance(layout, IntegerLayer):
            return replace(layout, static=False)
        return make_layer(layout.stored, kind) if isinstance(layout, Fp8Layer) else layout


def read_scheme(where: str, group: Mapping[str, Any], config: Mapping[str, Any], dtype: torch.dtype) -> LayerFormat:
    """The layer format of one group. Raises CheckpointError for a scheme that is not read."""
    weights = read_object(group.get("weights"), f"{where}.weights")
    read_object(group.get("input_activations"), f"{where}.input_activations")
    kind, bits, strategy = weights.get("type", "int"), weights.get("num_bits"), weights.get("strategy")
    size, stored = weights.get("group_size"), group.get("format") or config.get("format")
    symmetric = bool(weights.get("symmetric", True))
    if not isinstance(size, int | None):
        raise CheckpointError(f"{where}.weights.group_size is {size!r}; a number or null is expected: correct config.json.")
    if strategy is None:
        strategy = "group" if size and size > 0 else "channel" if size == -1 else "tensor"
    if kind == "float" and bits == 8 and strategy in _FLOAT8:
        block = read_block(weights.get("block_structure") or (128, 128))
        sharing: Sharing = "tensor" if strategy == "tensor" else "channel" if strategy == "channel" else "block"
        return Fp8Layer(Fp8Format(sharing, input_scale=_INPUT_SCALE if _is_static(group, "float") else None, block=block))
    if kind == "float" and bits == 8 and size == MX_GROUP and stored in (None, "mxfp8-quantized"):
        return Mxfp8Layer()
    if kind == "float" and bits == 4 and size == NV_GROUP:
        return Fp4Layer("weight_packed", "weight_scale", NV_GROUP, "weight_global_scale", divides=True)
    if kind == "float" and bits == 4 and size == MX_GROUP:
        return Fp4Layer("weight_packed", "weight_scale", MX_GROUP)
    if kind == "int" and strategy in _INTEGER:
        layout = IntegerLayer(
            dtype, int(bits or 0), int(size or 0) if strategy == "group" else 0, strategy == "tensor", symmetric,
            bits == 8 and _quantizes_inputs(group), _is_static(group, "int"),
        )  # fmt: skip
        if stored == "pack-quantized" and bits in _BITS:
            return PackedLayer(layout, str(weights.get("actorder")).lower() in _ORDERED)
        if stored in ("int-quantized", "naive-quantized") and bits in _BITS:
            return layout
    raise CheckpointError(
        f"{where} stores weights as {bits}-bit {kind} by {strategy} ({stored}), which no scheme of compressed-tensors that is read matches."
    )


def _is_static(group: Mapping[str, Any], kind: str) -> bool:
    """Whether one stored scale quantizes all activations to 8 bits of that kind."""
    inputs = group.get("input_activations") or {}
    section_value = inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("strategy"), bool(inputs.get("dynamic"))
    return section_value == (8, kind, "tensor", False) and bool(inputs.get("symmetric", True))


def _quantizes_inputs(group: Mapping[str, Any]) -> bool:
    """Whether activations are quantized to symmetric int8."""
    inputs = group.get("input_activations") or {}
    return inputs.get("num_bits") == 8 and inputs.get("type", "int") == "int" and bool(inputs.get("symmetric", True))


@dataclass(frozen=True, slots=True)
class IntegerLayer(LayerFormat):
    """`weight` int8 [outputs, inputs], signed quantized values of `bits`, `weight_scale`, and
    `weight_zero_point` int8 unless `symmetric`: per `group` inputs, per output (0), or, with
    `single`, one for the layer.
    `quantizes_inputs`: see `CanonicalWeight`. `static`: `input_scale` is stored."""

    dtype: torch.dtype
    bits: int
    group: int
    single: bool
    symmetric: bool
    quantizes_inputs: bool = False
    static: bool = False

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        tensors = {"weight": StoredTensor(torch.int8, (OUTPUTS, INPUTS)), "weight_scale": self.list_scale(torch.float32)}
        if not self.symmetric:
            tensors["weight_zero_point"] = self.list_scale(torch.int8)
        if self.static:
            tensors[_INPUT_SCALE] = STATIC_SCALE
        return tensors

    def list_scale(self, dtype: torch.dtype) -> StoredTensor:
        """The tensor of scales."""
        if self.single:
            return StoredTensor(dtype, (OUTPUTS,), scalar=True)
        return StoredTensor(dtype, (OUTPUTS, Axis("input", self.group, splits=True) if self.group else 1))

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        quantized, scales, zeros = tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero_point")
        if self.single:
            scales, zeros = scales.unsqueeze(-1), None if zeros is None else zeros.unsqueeze(-1)
        middle = 1 << self.bits - 1
        unsigned = None if zeros is None else zeros.view(torch.uint8) + middle
        weight = Integers(self.bits, quantized.view(torch.uint8) + middle, scales, unsigned).to_canonical(self.dtype)
        weight.quantizes_inputs, weight.input_scale = self.quantizes_inputs, keep_static(tensors.get(_INPUT_SCALE))
        return weight


@dataclass(frozen=True, slots=True)
class PackedLayer(LayerFormat):
    """`weight_packed` int32 [outputs, inputs / word], `weight_scale`, `weight_zero_point` int32
    [outputs / word, groups] unless symmetric, and `weight_g_idx` [inputs] if `ordered`."""

    integers: IntegerLayer
    ordered: bool

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        integers, bits = self.integers, self.integers.bits
        scale = integers.list_scale(torch.float32)
        if self.ordered:
            by_group: Axis | int = Axis("input", integers.group, whole=True)
            scale = StoredTensor(torch.float32, (OUTPUTS, by_group))
        else:
            by_group = Axis("input", integers.group, splits=True) if integers.group else 1
        tensors = {"weight_packed": StoredTensor(torch.int32, (OUTPUTS, word_axis("input", bits))), "weight_scale": scale}
        if not integers.symmetric:
            tensors["weight_zero_point"] = StoredTensor(torch.int32, (word_axis("output", bits), by_group))
        if self.ordered:
            tensors["weight_g_idx"] = StoredTensor(torch.int32, (INPUTS,))
        return tensors

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        integers = self.integers
        quantized = unpack_words(tensors["weight_packed"], integers.bits)[..., :inputs]
        scales, zeros = tensors["weight_scale"], tensors.get("weight_zero_point")
        if integers.single:
            scales = scales.unsqueeze(-1)
        if zeros is not None:
            zeros = unpack_words(zeros.transpose(-1, -2), integers.bits).transpose(-1, -2)
        return Integers(integers.bits, quantized, scales, zeros, tensors.get("weight_g_idx")).to_canonical(integers.dtype)

"""GPTQ checkpoints (AutoGPTQ, GPTQModel; arXiv 2210.17323): integers of 2, 3, 4 or 8 bits, packed
along the inputs, with scales and zero points per group of inputs, optionally in act-order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import Axis, CanonicalWeight, FormatContext, LayerFormat, LayerKind, StoredTensor, WeightFormat
from frame.quantization.fields import check_expression, read_object, read_patterns
from frame.quantization.integers import Integers, check_owners, pack_words, unpack_words, word_axis
from frame.quantization.patterns import find_match, matches
from frame.quantization.plain import INPUTS, OUTPUTS, PlainLayer

if TYPE_CHECKING:
    from pydantic import BaseModel

BITS = (2, 3, 4, 8)
_FORMATS = ("", "gptq", "gptq_v2")
# a configuration, a layer's name and kind, its stored tensors and its weight
KnownLayer = tuple[Mapping[str, Any], str, LayerKind, Mapping[str, torch.Tensor], torch.Tensor]


class Gptq(WeightFormat):
    """Reads `quantization_config`, with the overrides per layer of GPTQModel (`dynamic`)."""

    conformance_config: ClassVar[dict[str, Any]] = {"bits": 4, "group_size": 32}
    conformance_variants: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bits": 8, "group_size": -1, "lm_head": True, "modules_to_not_convert": ["layers.2"]},
        {"bits": 2, "group_size": 64, "checkpoint_format": "gptq_v2", "modules_in_block_to_quantize": [["mlp.up_proj"]]},
        {"bits": 4, "group_size": 32, "dynamic": {r"-:.*layers\.1\.": {}, r"+:.*layers\.2\.": {"bits": 8}}},
    )

    def __init__(self, context: FormatContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        config = self.config = dict(context.checkpoint_config or {})
        key = "checkpoint_format" if config.get("checkpoint_format") else "format"  # GPTQModel writes the second, or both
        self._stored = config.get(key) or ""
        if self._stored not in _FORMATS:
            raise CheckpointError(f"quantization_config.{key} is {self._stored!r}; of GPTQ's formats gptq and gptq_v2 are read.")
        where = "quantization_config"
        self._plain = read_patterns(config.get("modules_to_not_convert"), f"{where}.modules_to_not_convert")
        blocks = config.get("modules_in_block_to_quantize") or ()
        if not isinstance(blocks, list | tuple):
            raise CheckpointError(f"{where}.modules_in_block_to_quantize is {blocks!r}; a list of lists is expected: correct config.json.")
        self._blocks = [name for group in blocks for name in read_patterns(group, f"{where}.modules_in_block_to_quantize")]
        self._dynamic = read_object(config.get("dynamic") or None, f"{where}.dynamic")
        for pattern in self._dynamic:
            check_expression(_strip(pattern), f"{where}.dynamic")
        self._make({})  # refuses an unknown scheme before a layer is built

    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        plain = PlainLayer(self.context.dtype)
        if kind == "head" and not self.config.get("lm_head"):
            return plain
        if any(matches(pattern, name) for pattern in self._plain):
            return plain
        if kind == "linear" and self._blocks and not any(matches(block, name) for block in self._blocks):
            return plain
        for pattern, overrides in self._dynamic.items():
            if find_match(_strip(pattern), name):
                return plain if pattern.startswith("-:") else self._make(read_object(overrides, f"quantization_config.dynamic.{pattern}"))
        return self._make({})

    @staticmethod
    def list_conformance_layers() -> Iterator[KnownLayer]:
        up, head, base, eight = "model.layers.1.mlp.up_proj", "lm_head", {"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 32}
        yield _store(base, up)
        yield _store({"bits": 4}, up, group=128)
        yield _store({"bits": 4, "group_size": -1}, up, group=0)
        yield _store({**base, "desc_act": True}, up, ordered=True)
        yield _store({**base, "checkpoint_format": "gptq_v2"}, up, lift=0)
        yield _store({**base, "format": "gptq_v2"}, up, lift=0)
        yield _store({**base, "checkpoint_format": "gptq", "format": "gptq_v2"}, up)
        yield _store({"bits": 2, "group_size": 64}, up, bits=2, group=64)
        yield _store(eight, head, plain=True)
        yield _store({**eight, "lm_head": True}, head, bits=8)
        for name, is_plain in ((up, True), ("model.layers.2.mlp.up_proj", False)):
            yield _store({**base, "modules_to_not_convert": ["layers.1"]}, name, plain=is_plain)
        for name, is_plain in ((up, False), ("model.layers.1.self_attn.q_proj", True), ("model.layers.1.mlp.experts.0.up_proj", False)):
            kind: LayerKind = "experts" if "experts" in name else "linear"
            yield _store({**base, "modules_in_block_to_quantize": [["mlp.up_proj"]]}, name, kind, plain=is_plain)
        mixed = {**base, "dynamic": {r"-:.*layers\.1\.": {}, r"+:.*layers\.2\.": {"bits": 8}, r"+:.*layers\.4\.": {"bits": 2}}}
        yield _store(mixed, up, plain=True)
        yield _store(mixed, "model.layers.2.mlp.up_proj", bits=8)
        yield _store(mixed, "model.layers.3.mlp.up_proj")
        yield _store(mixed, "model.layers.4.mlp.up_proj", bits=2)

    def _make(self, overrides: Mapping[str, Any]) -> GptqLayer:
        config = self.config | dict(overrides)
        bits, group = config.get("bits"), config.get("group_size", 128)
        if bits not in BITS:
            raise CheckpointError(f"quantization_config.bits is {bits!r}; of GPTQ's numbers of bits {', '.join(map(str, BITS))} are read.")
        if not isinstance(group, int) or group < -1 or group == 0:
            raise CheckpointError(f"quantization_config.group_size is {group!r}; a positive number or -1 (all inputs) is expected.")
        lift = 0 if self._stored == "gptq_v2" else 1
        return GptqLayer(self.context.dtype, int(bits), max(0, group), bool(config.get("desc_act")), lift)


def _store(
    config: Mapping[str, Any], name: str, kind: LayerKind | None = None, *, bits: int = 4, group: int = 32, lift: int = 1,
    ordered: bool = False, plain: bool = False,
) -> KnownLayer:  # fmt: skip
    """A layer of 256 inputs and 64 outputs as a checkpoint of this configuration stores it."""
    kind, inputs, outputs = kind or ("head" if name == "lm_head" else "linear"), 256, 64
    generator = torch.Generator().manual_seed(bits + group)
    if plain:
        weight = torch.randn(outputs, inputs, generator=generator)
        return config, name, kind, {"weight": weight}, weight
    size = group or inputs
    quantized = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, (outputs, inputs // size), generator=generator)
    scales = torch.rand(zeros.shape, generator=generator) + 0.5
    owners = torch.arange(inputs) // size
    owners = owners[torch.randperm(inputs, generator=generator)] if ordered else owners
    weight = scales[:, owners] * (quantized - zeros[:, owners])
    stored = {"qweight": pack_words(quantized, bits).t(), "qzeros": pack_words((zeros - lift).t(), bits), "scales": scales.t()}
    return config, name, kind, {**stored, "g_idx": owners.to(torch.int32)}, weight


def _strip(pattern: str) -> str:
    """The regular expression of an override, without its sign."""
    return pattern.removeprefix("+:").removeprefix("-:")


@dataclass(frozen=True, slots=True)
class GptqLayer(LayerFormat):
    """`qweight` [inputs / word, outputs], `qzeros` [groups, outputs / word], `scales` [groups,
    outputs], `g_idx` [inputs]. `group`: inputs of a group (0: all). `lift`: added to stored zero
    points, to those of a word together, as GPTQModel subtracted it: a zero point of 0 borrows from
    the next one."""

    dtype: torch.dtype
    bits: int
    group: int
    ordered: bool
    lift: int

    def list_tensors(self, inputs: int, outputs: Sequence[int]) -> Mapping[str, StoredTensor]:
        by_group = group_axis(self.group, self.ordered)
        return {
            "qweight": StoredTensor(torch.int32, (word_axis("input", self.bits), OUTPUTS)),
            "qzeros": StoredTensor(torch.int32, (by_group, word_axis("output", self.bits))),
            "scales": StoredTensor(torch.float32, (by_group, OUTPUTS)),
            "g_idx": StoredTensor(torch.int32, (INPUTS,), optional=not self.ordered),
        }

    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        quantized = unpack_words(tensors["qweight"].transpose(-1, -2), self.bits)
        words, lift = tensors["qzeros"], self.lift
        if 32 % self.bits == 0:  # with 3 bits zero points cross words
            words, lift = words + lift * sum(1 << place for place in range(0, 32, self.bits)), 0
        zeros = unpack_words(words, self.bits).transpose(-1, -2)
        zeros = (zeros + lift).bitwise_and_((1 << self.bits) - 1)
        if not self.ordered:
            check_owners(tensors["g_idx"], "g_idx")
        owners = tensors["g_idx"] if self.ordered else None
        symmetric = bool((zeros == 1 << self.bits - 1).all())
        scales = tensors["scales"].transpose(-1, -2)
        return Integers(self.bits, quantized[..., :inputs], scales, None if symmetric else zeros, owners).to_canonical(self.dtype)


def group_axis(group: int, ordered: bool) -> Axis | int:
    """The axis of groups. All ranks hold all groups of an act-order, because a rank's inputs may
    belong to any group; and the one group of all inputs."""
    if not group:
        return 1
    return Axis("input", group, whole=True) if ordered else Axis("input", group, splits=True)

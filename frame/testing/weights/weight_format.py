"""The conformance suite of weight formats: what a format makes of tensors has
canonical form, whatever the merged parts, ranks and experts.

Checkpoint tensors are random numbers of their dtype, or what the class's `make_conformance_tensor`
returns.

Attributes of the class say which `quantization_config`s it reads: `conformance_config`, with which
all checks run, and `conformance_variants`, a tuple of others. Its static method
`list_conformance_layers()` yields layers whose weights are known: (configuration, name of the
layer, kind, stored tensors by name after the layer's, float32 weight [outputs, inputs]), one for
each setting that changes what is stored, such as group sizes and layers that stay plain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from frame.core.errors import CheckpointError
from frame.core.interfaces.weight_format import Axis, CanonicalWeight, FormatContext, LayerFormat, WeightFormat
from frame.models.layers.parameter import Range
from frame.models.layers.weights.stored_weight import StoredWeight, WeightSizes
from frame.testing.conformance import Check, SkipCheck, Subject, collect
from frame.testing.generators import require_bounded, require_near_reference
from frame.testing.weights.canonical_weights import check_form

DTYPE = torch.float32
INPUTS, OUTPUTS = 256, (256, 128, 128)  # sizes that block scales of 128 divide
LARGE_INPUTS, LARGE_OUTPUTS = 2048, (8960, 128, 128)
EXPERTS = 3
NAME = "model.layers.0.mlp.up_proj"
MAX_GROWTH = 2.5  # from stored bytes to canonical ones: 2 bits become 4
HALF, CLIPPED = 0.501, 0.05  # of a step between values; share of an output's weights that may differ by more
HEADS = ("lm_head", "score", "transformer.output", "classifier")
WRONG: tuple[Any, ...] = ({"x": [1]}, {"": None}, [[]], ["a"], "text", "", None, -3, 0, 10**30, 0.5, float("nan"), True, False)


def suite(subject: Subject) -> Iterator[Check]:
    """`weight_format/2`."""
    yield Check("layers_are_described", partial(_check_described, subject))
    yield Check("heads_are_known_by_their_kind", partial(_check_heads, subject))
    yield Check("ignored_weights_are_patterns", partial(_check_ignored, subject))
    yield Check("names_are_not_kept", partial(_check_names, subject))
    yield Check("layers_are_described_in_any_order", partial(_check_orders, subject))
    yield Check("known_layers", partial(_check_known, subject))
    yield Check("variants_have_canonical_form", partial(_check_variants, subject))
    yield Check("wrong_settings_are_refused", partial(_check_wrong_settings, subject))
    for name in ("linear", "experts", "head"):
        layout = _describe(subject, name)
        yield from collect(__name__, subject, layout, suffix=f"-{name}")
        yield Check(f"rounding_is_to_the_nearest-{name}", partial(_check_nearest, subject, name))
        yield Check(f"ranks_split_outputs-{name}", partial(_check_split, subject, layout, "output"))
        yield Check(f"ranks_split_inputs-{name}", partial(_check_split, subject, layout, "input"))


# (name after the layer's, shape, dtype) -> a valid tensor; None: any numbers are valid
MakeTensor = Callable[[str, Sequence[int], torch.dtype], torch.Tensor | None]


def _describe(subject: Subject, kind: str, dtype: torch.dtype = DTYPE) -> LayerFormat:
    config = getattr(subject.target, "conformance_config", None)  # a checkpoint's `quantization_config`, where a format needs one
    weight_format: WeightFormat = subject.target(FormatContext(dtype, config), subject.options)
    name = {"linear": NAME, "experts": "model.layers.0.mlp.experts.0.gate_proj", "head": "lm_head"}[kind]
    return weight_format.describe_layer(name, kind)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class WeightCase:
    """The sizes and values of a weight's tensors."""

    inputs: int = INPUTS
    outputs: Sequence[int] = OUTPUTS  # of each part
    has_zero_scales: bool = False
    factor: float = 1.0  # of float32 scales


Place = tuple[int, str, int]  # rank, the divided dimension ("input", "output" or ""), ranks
WHOLE: Place = (0, "", 1)
USUAL, LARGE = WeightCase(), WeightCase(LARGE_INPUTS)


class Weight:
    """A weight whose tensors come from a random checkpoint: `parts` layers of `outputs` outputs.
    `first`: number of its first expert, or of the one whose tensors it has."""

    def __init__(
        self, subject: Subject, layout: LayerFormat, place: Place = WHOLE, case: WeightCase = USUAL, experts: int = 0, first: int = 0
    ) -> None:
        rank, split, ranks = place
        self.inputs = Range.split(case.inputs, rank, ranks) if split == "input" else Range.whole(case.inputs)
        self.outputs = [Range.split(size, rank, ranks) if split == "output" else Range.whole(size) for size in case.outputs]
        self.case = case
        self.module = nn.Module()
        sizes = WeightSizes(self.inputs.size, case.inputs, tuple(span.size for span in self.outputs), experts)
        self.stored = StoredWeight(self.module, layout, sizes, DTYPE)
        self.make: MakeTensor | None = getattr(subject.target, "make_conformance_tensor", None)
        for expert in range(max(1, experts)):
            local = 0
            for part, span in enumerate(self.outputs):
                placed = Range(span.full, span.start, span.size, local)
                self.stored.bind(part, f"{first + expert}.{part}", placed, self.inputs, expert if experts else None)
                local += span.size

    def load(self, seed: int = 0) -> list[CanonicalWeight]:
        """Load random tensors and make their canonical form."""
        for parameter in self.module.parameters():
            if getattr(parameter, "optional", False):
                continue
            for name, part in getattr(parameter, "sources", {}).items():
                parameter.load(name, self._random(f"{name}/{seed}", name, part.shape, parameter.stored_dtype))  # type: ignore[attr-defined]
        return self.stored.to_canonical()

    def _random(self, key: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(ord(letter) * (index + 1) for index, letter in enumerate(key)))
        tensor = self.make(name.rsplit(".", 1)[1], shape, dtype) if self.make is not None else None
        if tensor is not None:
            return tensor
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=torch.int64).to(dtype)
        if "scale" in name:
            scales = torch.rand(shape, generator=generator) * 0.01 + 0.01
            if self.case.has_zero_scales and scales.dim():
                scales[: len(scales) // 2] = 0
            return (scales * (self.case.factor if dtype == torch.float32 else 1.0)).to(dtype)
        return (torch.randn(shape, generator=generator) * 0.05).to(dtype)


def _dense(weights: Sequence[CanonicalWeight]) -> torch.Tensor:
    return torch.cat([weight.dequantize(DTYPE) for weight in weights], weights[0].quantized.dim() - 2)


def _compare(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: the shape is {tuple(got.shape)}, not {tuple(expected.shape)}"
    assert torch.equal(got, expected), f"{what}: the weights differ by up to {float((got - expected).abs().max()):.2e}"


def _check_described(subject: Subject) -> None:
    for kind in ("linear", "experts", "head"):
        layout = _describe(subject, kind)
        assert isinstance(layout, LayerFormat), f"describe_layer returns {type(layout).__name__} for {kind}"
        assert layout == _describe(subject, kind), "two descriptions of one layer differ; compare them by value (a frozen dataclass)"


def _check_heads(subject: Subject) -> None:
    """A head is known by its kind: classifiers and other models have heads of other names."""
    for config in _list_configs(subject):
        made: WeightFormat = subject.target(FormatContext(DTYPE, config), subject.options)
        heads = [name for name in HEADS if name not in str(config)]  # those that the checkpoint does not name
        layouts = [made.describe_layer(name, "head") for name in heads]
        for name, layout in zip(heads, layouts, strict=True):
            assert layout == layouts[0], f"the head {name} is stored otherwise than {heads[0]}, with the configuration {config}"


def _check_ignored(subject: Subject) -> None:
    config = getattr(subject.target, "conformance_config", None)
    for pattern in subject.target(FormatContext(DTYPE, config), subject.options).ignored_weights:
        assert not re.match(pattern, f"{NAME}.weight"), f"{pattern!r} ignores weights"


def _check_names(subject: Subject) -> None:
    """A format is asked for each layer of each model that is loaded."""
    config = getattr(subject.target, "conformance_config", None)
    made: WeightFormat = subject.target(FormatContext(DTYPE, config), subject.options)
    require_bounded(
        made, lambda number: made.describe_layer(f"model.layers.{number}.mlp.up_proj", "linear"), 2000, "layers that were described"
    )


def _list_configs(subject: Subject) -> list[Mapping[str, Any] | None]:
    return [getattr(subject.target, "conformance_config", None), *getattr(subject.target, "conformance_variants", ())]


def _check_orders(subject: Subject) -> None:
    """A layer is stored as it is, whichever layers were described before it."""
    ends = ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.gate_proj", "mlp.down_proj")
    layers: list[tuple[str, Any]] = [(f"model.layers.{number}.{end}", "linear") for number in range(4) for end in ends]
    layers += [(f"model.layers.{number}.mlp.experts", "experts") for number in range(4)] + [("lm_head", "head")]
    for config in _list_configs(subject):

        def make(config: Mapping[str, Any] | None = config) -> WeightFormat:
            made: WeightFormat = subject.target(FormatContext(DTYPE, config), subject.options)
            return made

        alone = {layer: make().describe_layer(*layer) for layer in layers}
        for order in (layers, layers[::-1]):
            one = make()
            for layer in order:
                same = one.describe_layer(*layer) == alone[layer]
                assert same, f"{layer[0]} is described otherwise after other layers than alone, with the configuration {config}"


def _check_variants(subject: Subject) -> None:
    for config in getattr(subject.target, "conformance_variants", ()):
        made: WeightFormat = subject.target(FormatContext(DTYPE, config), subject.options)
        for number in range(4):
            layout = made.describe_layer(f"model.layers.{number}.mlp.up_proj", "linear")
            for weight in Weight(subject, layout).load():
                check_form(weight, weight.outputs, INPUTS)
                assert torch.isfinite(weight.dequantize(DTYPE)).all(), f"a weight is not finite, with the configuration {config}"


def _check_known(subject: Subject) -> None:
    """Layers whose weights the class knows are read as these, whole and by each of two ranks. Those
    of one configuration that follow one another are described by one object."""
    known = getattr(subject.target, "list_conformance_layers", None)
    if known is None:
        raise SkipCheck("the class has no list_conformance_layers(): whether stored weights are read correctly is not checked")
    made: WeightFormat | None = None
    for config, name, kind, tensors, weight in known():
        if made is None or made.context.checkpoint_config != config:
            made = subject.target(FormatContext(DTYPE, config), subject.options)
        layout, what = made.describe_layer(name, kind), f"{name} with the configuration {config}"
        outputs, inputs = weight.shape
        for split, rank in (("", 0), ("input", 0), ("input", 1), ("output", 0), ("output", 1)):
            rows = Range.split(outputs, rank, 2) if split == "output" else Range.whole(outputs)
            columns = Range.split(inputs, rank, 2) if split == "input" else Range.whole(inputs)
            module = nn.Module()
            stored = StoredWeight(module, layout, WeightSizes(columns.size, inputs, (rows.size,)), DTYPE)
            stored.bind(0, name, rows, columns)
            for parameter in module.parameters():
                for source, part in getattr(parameter, "sources", {}).items():
                    value = tensors.get(source.removeprefix(f"{name}."))
                    optional = getattr(parameter, "optional", False)
                    assert value is not None or optional, f"{what} is read from {source}, which such a checkpoint does not have"
                    if value is not None:
                        assert tuple(part.shape) == tuple(value.shape), f"{what}: {source} has the shape {tuple(part.shape)}"
                        parameter.load(source, value)  # type: ignore[attr-defined]
            dense = _dense(stored.to_canonical())
            expected = weight[rows.start : rows.start + rows.size, columns.start : columns.start + columns.size]
            error = float((dense - expected).abs().max()) if dense.shape == expected.shape else float("inf")
            where = f" of rank {rank}, by {split}s," if split else ""
            assert error <= 1e-5 * float(weight.abs().max()), f"{what}: the weights{where} are wrong by {error:.2e}"


def _check_wrong_settings(subject: Subject) -> None:
    """A setting of another type is read, or refused with CheckpointError at the start or where a
    layer is described. A pattern that is none is refused."""
    for config in (config for config in _list_configs(subject) if config):
        for key, value in config.items():
            wrong = [*WRONG, *([{"(": {}}, {"+:(": {"bits": 4}}] if isinstance(value, Mapping) else [])]
            for each in wrong:
                try:
                    made: WeightFormat = subject.target(FormatContext(DTYPE, {**config, key: each}), subject.options)
                    for number in range(3):
                        made.describe_layer(f"model.layers.{number}.mlp.up_proj", "linear")
                except CheckpointError as error:
                    assert "\n" not in str(error), f"{key}: {each!r:.40} raises an error of several lines"
                except Exception as error:
                    raise AssertionError(f"{key}: {each!r:.40} raises {type(error).__name__}, not CheckpointError: {error}") from error


def check_tensors_have_axes(subject: Subject, layout: LayerFormat) -> None:
    tensors = layout.list_tensors(INPUTS, OUTPUTS)
    assert tensors, "list_tensors names no tensor"
    for name, stored in tensors.items():
        for axis in stored.axes:
            assert isinstance(axis, int) or axis.block >= 1, f"{name}: an axis has blocks of {axis}"
        of = [axis.of for axis in stored.axes if isinstance(axis, Axis)]
        assert len(of) == len(set(of)), f"{name} has two axes of one kind"
        assert not stored.scalar or of == ["output"], f"{name} is scalar, but its axes are {of}"


def check_canonical_form(subject: Subject, layout: LayerFormat) -> None:
    for experts in (0, EXPERTS):
        for weight in Weight(subject, layout, experts=experts).load():
            check_form(weight, weight.outputs, INPUTS, (experts,) if experts else ())
            dense = weight.dequantize(DTYPE)
            assert torch.isfinite(dense).all(), "a weight is not finite"
            assert float(dense.abs().max()) > 0, "all weights are zero"
        assert len(_dense(Weight(subject, layout).load())) == sum(OUTPUTS), "outputs are missing"


def check_decode_changes_nothing(subject: Subject, layout: LayerFormat) -> None:
    weight = Weight(subject, layout)
    first = _dense(weight.load()).clone()
    _compare(_dense(weight.stored.to_canonical()), first, "made a second time")


def check_merged_parts_follow_one_another(subject: Subject, layout: LayerFormat) -> None:
    whole = _dense(Weight(subject, layout).load())
    assert int(torch.linalg.matrix_rank(whole.double())) > INPUTS // 2, "the merged parts repeat each other"
    for part, rows in enumerate(whole.split(OUTPUTS)):
        sizes, module = WeightSizes(INPUTS, INPUTS, (OUTPUTS[part],)), nn.Module()
        alone, merged = StoredWeight(module, layout, sizes, DTYPE), Weight(subject, layout)
        alone.bind(0, f"0.{part}", Range.whole(OUTPUTS[part]), Range.whole(INPUTS))
        for parameter in module.parameters():
            if getattr(parameter, "optional", False):
                continue
            for name, source in getattr(parameter, "sources", {}).items():
                parameter.load(name, merged._random(f"{name}/0", name, source.shape, parameter.stored_dtype))  # type: ignore[attr-defined]  # noqa: SLF001
        _compare(rows, _dense(alone.to_canonical()), f"part {part} of a merged layer")


def _check_split(subject: Subject, layout: LayerFormat, split: str) -> None:
    whole = _dense(Weight(subject, layout).load())
    for rank in range(2):
        shard = _dense(Weight(subject, layout, (rank, split, 2)).load())
        expected = whole.chunk(2, 1)[rank] if split == "input" else torch.cat([rows.chunk(2)[rank] for rows in whole.split(OUTPUTS)])
        if layout.quantizes:
            assert shard.shape == expected.shape, f"a rank has other {split}s"
        else:
            _compare(shard, expected, f"{split}s of rank {rank}")


def check_experts_are_apart(subject: Subject, layout: LayerFormat) -> None:
    first = _dense(Weight(subject, layout).load())
    experts = _dense(Weight(subject, layout, experts=EXPERTS).load())
    assert tuple(experts.shape) == (EXPERTS, sum(OUTPUTS), INPUTS), f"experts have the shape {tuple(experts.shape)}"
    _compare(experts[0], first, "expert 0")
    _compare(experts[1], _dense(Weight(subject, layout, first=1).load()), "expert 1, whose tensors are its own")
    assert not torch.equal(experts[0], experts[1]), "two experts are equal"


def check_real_sizes(subject: Subject, layout: LayerFormat) -> None:
    """2,048 inputs and 9,216 outputs: each output has weights, and ranks get their parts of
    them."""
    whole = _dense(Weight(subject, layout, case=LARGE).load())
    for rank in range(2):
        shard = _dense(Weight(subject, layout, (rank, "input", 2), LARGE).load())
        if not layout.quantizes:
            _compare(shard, whole.chunk(2, 1)[rank], f"inputs of rank {rank} of {LARGE_INPUTS}")
    many = _dense(Weight(subject, layout, case=WeightCase(outputs=LARGE_OUTPUTS)).load())
    assert bool((many.abs().amax(1) > 0).all()), f"of {sum(LARGE_OUTPUTS)} outputs, some have no weights"


def check_scales_of_zero(subject: Subject, layout: LayerFormat) -> None:
    """Groups whose weights are all 0 have scales of 0, and the weights of all others are as they
    were."""
    if layout.quantizes or getattr(subject.target, "make_conformance_tensor", None) is not None:
        raise SkipCheck("the suite does not make its scales")
    dense = _dense(Weight(subject, layout, case=WeightCase(has_zero_scales=True)).load())
    assert torch.isfinite(dense).all(), "weights with scales of 0 are not finite"


def check_float32_is_kept(subject: Subject, layout: LayerFormat) -> None:
    """Scales that are stored in float32 count to their eleventh bit at least."""
    stored = layout.list_tensors(INPUTS, OUTPUTS)
    if layout.quantizes or not any("scale" in name and each.dtype == torch.float32 for name, each in stored.items()):
        raise SkipCheck("the checkpoint stores no scales in float32, or its weights are quantized while loading")
    first, second = (_dense(Weight(subject, layout, case=WeightCase(factor=factor)).load()).double() for factor in (1.0, 1 + 2.0**-9))
    moved = ((first - second).abs() > 2.0**-11 * first.abs()) & (first != 0)
    assert float(moved.sum()) > 0.5 * float((first != 0).sum()), "float32 scales that differ by 1 / 512 give the same weights"


def check_decoding_is_fast(subject: Subject, layout: LayerFormat) -> None:
    weight = Weight(subject, layout)
    weights = weight.load()
    require_near_reference(
        weight.stored.to_canonical, lambda: [each.dequantize(DTYPE) for each in weights], "the canonical form of a small layer", 8, 8e-3
    )


def check_a_second_load_replaces_the_first(subject: Subject, layout: LayerFormat) -> None:
    weight, other = Weight(subject, layout), Weight(subject, layout)
    weight.load()
    weight.stored.release()
    _compare(_dense(weight.load(seed=1)), _dense(other.load(seed=1)), "after a second load")


def check_decoding_takes_little_memory(subject: Subject, layout: LayerFormat) -> None:
    """The weights of a model fit in memory because they stay quantized."""
    weight = Weight(subject, layout)
    weights = weight.load()
    stored = sum(parameter.numel() * parameter.element_size() for parameter in weight.module.parameters())
    kept = sum(tensor.numel() * tensor.element_size() for each in weights for tensor in each.tensors.values())
    assert kept <= MAX_GROWTH * stored, f"{stored} stored bytes become {kept}: return packed values, which kernels read"


def _needs_rounding(layout: LayerFormat) -> None:
    if not layout.quantizes:
        raise SkipCheck("the checkpoint's weights are not quantized while loading")


def _draw_weight(outputs: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, INPUTS, generator=torch.Generator().manual_seed(seed)) * 0.05


def _round(layout: LayerFormat, weight: torch.Tensor) -> torch.Tensor:
    return layout.to_canonical(layout.quantize_weight(weight, (len(weight),)), INPUTS).dequantize(DTYPE)


def check_rounding_is_close(subject: Subject, layout: LayerFormat) -> None:
    _needs_rounding(layout)
    weight = _draw_weight(256)
    tensors = layout.quantize_weight(weight, (256,))
    assert tensors.keys() == layout.list_tensors(INPUTS, (256,)).keys(), "quantize_weight and list_tensors name other tensors"
    dense = layout.to_canonical(tensors, INPUTS).dequantize(DTYPE)
    error = float((dense - weight).norm() / weight.norm())
    assert error < 0.2, f"the weights differ by {error:.2f} of their norm"
    half = layout.to_canonical(layout.quantize_weight(weight[:128], (256,)), INPUTS).dequantize(DTYPE)
    _compare(half, dense[:128], "half of the outputs, quantized alone")


def _check_nearest(subject: Subject, kind: str) -> None:
    """Of evenly spaced values, a weight gets the nearest one, whatever dtype the scales have: the
    values are those of the scales that are stored. A few weights of an output may be clipped."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layout = _describe(subject, kind, dtype)
        _needs_rounding(layout)
        steps = torch.arange(128).unsqueeze(1) / 128 + 1  # so that scales have mantissas of all sizes
        weight = (torch.rand(128, INPUTS, generator=torch.Generator().manual_seed(3)) * 2 - 1) * 0.05 * steps
        canonical = layout.to_canonical(layout.quantize_weight(weight, (128,)), INPUTS)
        if canonical.scheme.quant_type not in ("int4", "int8") or canonical.order is not None:
            raise SkipCheck("its values are not evenly spaced, or their order is not that of the inputs")
        error = (canonical.dequantize(DTYPE) - weight).abs() / canonical.spread_scales()
        share = float((error > HALF).float().mean(1).max())
        assert share <= CLIPPED, f"of an output, {share:.0%} of the weights differ by over half a step; quantize by the stored scales"


def check_rounding_of_odd_weights(subject: Subject, layout: LayerFormat) -> None:
    """Outputs that are pruned, a weight of zeros, weights 2**-14 times as large, and an output that
    is far larger than the others."""
    _needs_rounding(layout)
    weight = _draw_weight()
    usual = _round(layout, weight)
    small = _round(layout, weight * 2.0**-14) * 2.0**14
    assert float((small - usual).abs().max()) < 1e-2 * float(usual.abs().max()), "small weights are quantized otherwise than large ones"
    pruned = weight.clone()
    pruned[::3] = 0
    for what, each in (("weights with outputs of zeros", pruned), ("a weight of zeros", torch.zeros_like(weight))):
        dense = _round(layout, each)
        assert torch.isfinite(dense).all(), f"{what} are not finite"
        assert not dense[::3].any(), f"{what}: they do not stay 0"
    one = weight.clone()
    one[5] *= 200
    error = float((_round(layout, one)[:5] - weight[:5]).norm() / weight[:5].norm())
    assert error < 0.2, f"beside one large output, the others differ by {error:.2f} of their norm"


def check_rounding_repeats(subject: Subject, layout: LayerFormat) -> None:
    """All ranks and starts have the same weights, and one does not change with the next one of its
    size."""
    _needs_rounding(layout)
    first, second = _draw_weight(seed=1), _draw_weight(seed=2) * 3
    tensors = layout.quantize_weight(first, (128,))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    again = layout.quantize_weight(second, (128,))
    for name, tensor in tensors.items():
        assert torch.equal(tensor, kept[name]), f"{name} of one weight changes when the next one is quantized; return memory of its own"
    fresh = _describe(subject, "linear")
    if fresh == layout:
        _compare(_round(fresh, second), layout.to_canonical(again, INPUTS).dequantize(DTYPE), "quantized after another one of its size")
    _compare(_round(layout, first), layout.to_canonical(kept, INPUTS).dequantize(DTYPE), "quantized a second time")

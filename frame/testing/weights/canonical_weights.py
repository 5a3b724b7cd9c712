"""Canonical weights with random values, and the check that a weight has canonical form.

Used by the suites of weight formats and GEMM kernels and by tests. Depends on no plugin.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from frame.core.interfaces.weight_format import NIBBLES, CanonicalWeight, QuantType, WeightScheme

DTYPES: dict[QuantType, torch.dtype] = {
    "int4": torch.uint8, "e2m1": torch.uint8, "nf4": torch.uint8, "int8": torch.int8, "e4m3": torch.float8_e4m3fn
}  # fmt: skip


def make_weight(
    scheme: WeightScheme, outputs: int, inputs: int, *, experts: int = 0, outer: bool = False, dtype: torch.dtype, seed: int = 0
) -> CanonicalWeight:
    """A random weight of a scheme. `dtype`: of plain values, and of scales."""
    generator = torch.Generator().manual_seed(seed)
    lead = (experts,) if experts else ()
    if scheme.quant_type == "plain":
        return CanonicalWeight(scheme, inputs, (torch.randn(*lead, outputs, inputs, generator=generator) * inputs**-0.5).to(dtype))
    quantized = _make_values(scheme.quant_type, (*lead, outputs, inputs), generator)
    rows, columns = scheme.group[0] or outputs, scheme.group[1] or inputs
    shape = (*lead, -(-outputs // rows), -(-inputs // columns))
    largest = {"int4": 8.0, "int8": 128.0, "e2m1": 6.0, "nf4": 1.0, "e4m3": 2.0}[scheme.quant_type]
    scales = ((torch.rand(shape, generator=generator) + 0.5) * inputs**-0.5 / largest).to(dtype)
    if scheme.quant_type == "e2m1" and scheme.group == (1, 32):  # MXFP4, whose scales are powers of two
        scales = scales.float().log2().round().exp2().to(dtype)
    low, high = (0, 16) if scheme.quant_type == "int4" else (-128, 128)
    zeros = torch.randint(low, high, shape, generator=generator).to(torch.int8) if scheme.zeros else None
    order = None
    if scheme.ordered:
        orders = [torch.randperm(inputs, generator=generator) for _ in range(max(1, experts))]
        order = (torch.stack(orders) if experts else orders[0]).to(torch.int32)
    factor = torch.rand(*lead, outputs, generator=generator) + 0.5 if outer else None
    minima = scales * torch.rand(shape, generator=generator).mul_(16).to(dtype) if scheme.minima else None
    return CanonicalWeight(scheme, inputs, quantized, scales, zeros, factor, order, divides=bool(seed % 2), minima=minima)


def _make_values(quant_type: QuantType, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if quant_type in NIBBLES:
        packed = (*shape[:-1], -(-shape[-1] // 32) * 16)
        return torch.randint(0, 256, packed, generator=generator, dtype=torch.int64).to(torch.uint8)
    if quant_type == "int8":
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int64).to(torch.int8)
    return torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)


def repeat_inputs(weight: CanonicalWeight) -> CanonicalWeight:
    """The same int4 or int8 weight in act-order with one more group of columns before the others
    and one after them. Their weights are zero, and both have the inputs of the first group."""
    assert weight.order is not None and weight.scales is not None and weight.scheme.quant_type in ("int4", "int8")
    width, is_packed = weight.scheme.group[1], weight.scheme.quant_type in NIBBLES
    zeros, repeated = weight.zeros, weight.order[..., :width]
    numbers = zeros if zeros is not None else torch.full(weight.scales.shape, 8 if is_packed else 0, dtype=torch.int8)
    ends = [each.to(weight.quantized) * (17 if is_packed else 1) for each in (numbers[..., :1], numbers[..., -1:])]  # 17: both nibbles
    before, after = (each.expand(*each.shape[:-1], width // 2 if is_packed else width) for each in ends)

    def widen(groups: torch.Tensor) -> torch.Tensor:
        return torch.cat((groups[..., :1], groups, groups[..., -1:]), -1)

    return replace(
        weight,
        quantized=torch.cat((before, weight.quantized, after), -1),
        scales=widen(weight.scales),
        zeros=None if zeros is None else widen(zeros),
        order=torch.cat((repeated, weight.order, repeated), -1),
    )


def check_form(weight: CanonicalWeight, outputs: int, inputs: int, lead: tuple[int, ...] = ()) -> None:
    """Assert that a weight [*lead, outputs, inputs] has canonical form."""
    scheme, quantized = weight.scheme, weight.quantized
    assert weight.inputs == inputs, f"the weight has {weight.inputs} inputs, not {inputs}"
    width = -(-weight.columns // 32) * 16 if scheme.quant_type in NIBBLES else weight.columns
    shape = tuple(quantized.shape)
    assert shape == (*lead, outputs, width), f"quantized values have the shape {shape}, not {(*lead, outputs, width)}"
    if scheme.quant_type == "plain":
        assert weight.tensors.keys() == {"quantized"}, "a plain weight has other tensors than its values"
        return
    assert quantized.dtype == DTYPES[scheme.quant_type], f"{scheme.quant_type} values are {quantized.dtype}"
    assert weight.scales is not None, "the weight has no scales"
    rows, columns = scheme.group[0] or outputs, scheme.group[1] or weight.columns
    shape = (*lead, -(-outputs // rows), -(-weight.columns // columns))
    assert tuple(weight.scales.shape) == shape, f"scales have the shape {tuple(weight.scales.shape)}, not {shape}"
    assert weight.scales.is_floating_point(), "scales are no floats"
    assert (weight.zeros is not None) == scheme.zeros, "zero points and the scheme differ"
    assert (weight.order is not None) == scheme.ordered, "the order and the scheme differ"
    assert (weight.minima is not None) == scheme.minima, "minima and the scheme differ"
    if weight.minima is not None:
        assert weight.minima.is_floating_point(), "minima are no floats"
        assert weight.minima.shape == weight.scales.shape, "there is not one minimum for each scale"
    if weight.zeros is not None:
        assert weight.zeros.dtype == torch.int8, f"zero points are {weight.zeros.dtype}, not int8"
        assert weight.zeros.shape == weight.scales.shape, "there is not one zero point for each scale"
    if weight.order is not None:
        assert weight.order.dtype == torch.int32, f"the order is {weight.order.dtype}, not int32"
        assert bool(((weight.order >= 0) & (weight.order < inputs)).all()), "the order names inputs that there are not"

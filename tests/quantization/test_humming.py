"""The GEMM kernel `humming` without its library and without a GPU: which weights it takes, and the
layout that the library reads. `tests/gpu/test_humming.py` runs the products."""

from __future__ import annotations

import pytest
import torch

from frame.core.interfaces.weight_format import WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.quantization.gemm.humming import HummingKernel, _name_tensors
from frame.testing.weights.canonical_weights import make_weight

GROUPED = WeightScheme("int4", (1, 64), zeros=True)


@pytest.mark.parametrize(
    ("scheme", "outputs", "inputs", "sentence"),
    [
        (GROUPED, 128, 256, None),
        (WeightScheme("e2m1", (1, 32)), 128, 256, None),
        (GROUPED, 96, 256, "not multiples of 64 outputs"),
        (WeightScheme("e2m1", (1, 32)), 64, 96, None),
        (WeightScheme("int4", (1, 0)), 128, 208, "of 32 inputs"),
        (WeightScheme("int4", (1, 48)), 128, 384, "no kernel for scales"),
        (WeightScheme("int8", (1, 0)), 128, 256, "no kernel for int8"),
        (WeightScheme("int4", (1, 64), ordered=True), 128, 256, "act-order"),
    ],
)
def test_the_weights_that_it_takes(scheme: WeightScheme, outputs: int, inputs: int, sentence: str | None) -> None:
    kernel = HummingKernel(build_context("cpu", torch.bfloat16, 16))
    obstacle = kernel.find_obstacle(make_weight(scheme, outputs, inputs, dtype=torch.bfloat16))
    assert obstacle == sentence if sentence is None else sentence in str(obstacle)


def test_scales_of_another_type_or_with_factors_are_left_to_others() -> None:
    kernel = HummingKernel(build_context("cpu", torch.bfloat16, 16))
    assert "dtype" in str(kernel.find_obstacle(make_weight(GROUPED, 64, 128, dtype=torch.float16)))
    assert "scales of their own" in str(kernel.find_obstacle(make_weight(GROUPED, 64, 128, outer=True, dtype=torch.bfloat16)))


@pytest.mark.parametrize("experts", [0, 3])
def test_words_hold_the_values_in_order(experts: int) -> None:
    weight = make_weight(GROUPED, 64, 128, experts=experts, dtype=torch.bfloat16)
    tensors = _name_tensors(weight)
    shifts = torch.arange(0, 32, 4)
    quantized = (tensors["weight"].unsqueeze(-1) >> shifts & 15).flatten(-2)
    assert torch.equal(quantized.float(), weight.numbers())
    words = tensors["zero_point"].transpose(-1, -2)
    zeros = (words.unsqueeze(-1) >> shifts & 15).flatten(-2).transpose(-1, -2)
    assert weight.zeros is not None
    assert torch.equal(zeros.to(torch.int8), weight.zeros)

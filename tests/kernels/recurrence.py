"""The kernels of recurrent layers against their definition in float64.

Run by `test_interpreted.py` in a process with TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from frame.kernels.elementwise.gated_norm import gated_norm
from frame.kernels.linear_attention import MixLayout
from tests.models.layers.recurrences import compute_by_definition, draw
from tests.models.layers.recurrent_rows import *  # noqa: F403
from tests.models.layers.recurrent_rows import DEVICE, check


def test_values_wider_than_a_program() -> None:
    drawn = draw("gated delta", [1, 3], device=DEVICE, layout=MixLayout(1, 1, 16, 200, (0, 16, 32)))
    want = compute_by_definition(drawn)
    check(drawn, drawn.mixer.mix(*drawn.inputs, drawn.batch), want)


@pytest.mark.parametrize("by_key", [False, True])
def test_heads_of_128(by_key: bool) -> None:
    """The sizes of published models, in float32."""
    drawn = draw("", [70], device=DEVICE, layout=MixLayout(1, 1, 128, 128, (0, 128, 256), by_key=by_key))
    want = compute_by_definition(drawn)
    check(drawn, drawn.mixer.mix(*drawn.inputs, drawn.batch), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_gated_norm(gates_first: bool, silu: bool) -> None:
    x, wide, weight = torch.randn(3, 96), torch.randn(3, 100), torch.randn(96 if gates_first else 24)
    factor = (F.silu if silu else torch.sigmoid)(wide[:, 4:])
    values = (x * factor if gates_first else x).unflatten(-1, (4, 24))
    want = (F.rms_norm(values, (24,), None, 1e-5) * weight.view(-1, 24)).flatten(1)
    want = want if gates_first else want * factor
    on_device = (part.to(DEVICE) for part in (x, wide[:, 4:], weight))
    torch.testing.assert_close(gated_norm(*on_device, 1e-5, 24, gates_first=gates_first, silu=silu).cpu(), want, atol=1e-5, rtol=1e-5)


def test_inputs_of_16_bits() -> None:
    """Sums and states are float32: the error of 128 tokens is a few steps of the type. The
    interpreter multiplies no bfloat16."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    drawn = draw("kimi delta", [1, 128], dtype, DEVICE)
    want = compute_by_definition(drawn)
    tolerance = 8 * torch.finfo(dtype).eps
    check(drawn, drawn.mixer.mix(*drawn.inputs, drawn.batch), want, atol=tolerance, rtol=tolerance)

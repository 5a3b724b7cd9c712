"""The kernel of the recurrences of linear attention against their definition in float64.

Run by `test_interpreted.py` in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os

import pytest
import torch

from frame.kernels.recurrence import scan_rows
from tests.models.layers.recurrences import CASES, compute_by_definition, draw

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("case", CASES)
def test_ragged_rows(case: str) -> None:
    inputs, states, pages, starts = draw(case, lens=[1, 1, 9, 4])
    want, after = compute_by_definition(inputs, states, pages, starts)
    states = states.to(DEVICE)
    got = scan_rows([part.to(DEVICE) for part in inputs[:5]], states, pages.to(DEVICE), starts.to(DEVICE), delta=inputs.delta)
    torch.testing.assert_close(got.double().cpu(), want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(states.double().cpu(), after, atol=1e-5, rtol=1e-4)


def test_values_wider_than_a_program() -> None:
    inputs, states, pages, starts = draw("gated delta", lens=[2])
    wide = inputs._replace(v=inputs.v.repeat(1, 1, 20))
    states = states.repeat(1, 1, 1, 20)
    want, _ = compute_by_definition(wide, states, pages, starts)
    got = scan_rows([part.to(DEVICE) for part in wide[:5]], states.to(DEVICE), pages.to(DEVICE), starts.to(DEVICE), delta=True)
    torch.testing.assert_close(got.double().cpu(), want, atol=1e-5, rtol=1e-4)

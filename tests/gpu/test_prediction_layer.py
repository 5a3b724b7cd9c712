"""frame-tiny's prediction layer on a GPU, in bfloat16, where near ties tip more often than in
float32: as many accepted drafts in CUDA graphs and in steps that overlap as without both."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_draft_graphs import MAXIMUM, ROWS, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_prediction_layer() -> None:
    expected, plain = run("mtp", 0, "bfloat16", overlap=False)
    outputs, rates = run("mtp", MAXIMUM, "bfloat16")
    print(f"mtp: {sum(a == b for a, b in zip(expected, outputs, strict=True))} of {ROWS} outputs the same", flush=True)
    assert all(abs(a - b) < 0.1 for a, b in zip(plain, rates, strict=True))
    assert rates[0] > 0.4

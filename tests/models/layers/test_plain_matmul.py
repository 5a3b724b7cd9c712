"""Which kernels the batch-invariant mode keeps: those whose results have the bits of the library's
product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from frame.kernels.linear.linear_plan import MAX_ROWS, Plan
from frame.models.layers.plain_matmul import PlainMatmul
from frame.models.layers.weights.plain_gemm import InvariantGemm

WEIGHT = torch.randn(32, 24, generator=torch.Generator().manual_seed(0))
STREAM, VECTOR = Plan("stream", 4, 4), Plan("vector", 4, 1)


class Kernels(PlainMatmul):
    """Multiplies few rows as PyTorch does, but for the row counts in `wrong`, whose last row has
    one other bit."""

    def __init__(self, wrong: set[int]) -> None:
        super().__init__(WEIGHT)
        self.wrong = wrong
        self.called: list[int] = []
        self._plans = (None, VECTOR, *[STREAM] * (MAX_ROWS - 1))
        self._gated_plans = self._plans

    def _multiply_few(
        self, plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool = False
    ) -> torch.Tensor:
        self.called.append(len(x))
        out = multiply(x)
        out[-1, 0] += out[-1, 0] * 1e-6 * (len(x) in self.wrong)
        return out


def multiply(x: torch.Tensor) -> torch.Tensor:
    return (x[:, None] * WEIGHT).sum(-1)  # each row alone


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("wrong", "kept"), [(set(), range(1, 65)), ({16}, [*range(1, 9), *range(17, 65)]), ({33}, range(1, 33))])
def test_kernels_with_other_bits_are_dropped(gated: bool, wrong: set[int], kept: list[int]) -> None:
    kernels = Kernels(wrong)
    kernels.keep_equal(WEIGHT, multiply, gated=gated)
    plans = kernels._gated_plans if gated else kernels._plans
    assert [rows for rows, plan in enumerate(plans) if plan is not None] == list(kept)
    assert not any(kernels._plans if gated else kernels._gated_plans)  # which have not been tested
    assert len(kernels.called) <= 8, "each variant is tested once"


def test_the_library_multiplies_where_no_kernel_runs() -> None:
    gemm, x, bias = InvariantGemm(WEIGHT), torch.randn(5, 24), torch.randn(32)
    torch.testing.assert_close(gemm(x, bias), F.linear(x, WEIGHT, bias))
    assert torch.equal(gemm(x[2:3], bias), gemm(x, bias)[2:3])
    assert gemm.multiply_gated(x) is None

"""The factors of rows whose norms an adapter gives."""

from typing import Any

import torch

from frame.adapters.adapter_pool import AdapterSizes
from frame.adapters.output_scales import compute_scales
from frame.core.interfaces.collective import LocalGroup
from frame.interfaces.adapter import PAGE_RANKS
from frame.models.layers.parameter import Range
from tests.adapters.harness import make_adapters

INPUTS = 700  # more than are computed at a time


class Sums(LocalGroup):
    """A group in which another rank has the same part of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 2

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2


def _draw() -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]:
    (layer,) = make_adapters(AdapterSizes(1, 2, 2), {"q+k": (INPUTS, [3, 2])}).pool.layers
    base = torch.randn(5, INPUTS)
    layer.gemm = lambda x: x @ base.t()
    a, b = torch.randn(2, 2, PAGE_RANKS, INPUTS), torch.randn(2, 1, 5, PAGE_RANKS) * 0.1
    merged = base.clone()
    for page in range(2):
        merged[:3] += b[page, 0, :3] @ a[page, 0]
        merged[3:] += b[page, 0, 3:] @ a[page, 1]
    return layer, a, b, merged


def test_rows_get_their_norms_and_others_keep_theirs() -> None:
    layer, a, b, merged = _draw()
    norms = torch.tensor([1.0, 2.0, float("nan"), 3.0, float("nan")])
    scales = compute_scales(layer, norms, (a, b), LocalGroup())
    expected = norms / merged.norm(dim=1)
    torch.testing.assert_close(scales, torch.where(norms.isnan(), 1.0, expected), rtol=1e-4, atol=1e-5)


def test_the_norm_of_divided_inputs_is_that_of_all_ranks() -> None:
    layer, a, b, merged = _draw()
    norms = torch.ones(5)
    torch.testing.assert_close(compute_scales(layer, norms, (a, b), Sums()), norms / merged.norm(dim=1), rtol=1e-4, atol=1e-5)
    layer.inputs = Range(2 * INPUTS, 0, INPUTS)
    divided = norms / (merged.norm(dim=1) * 2**0.5)
    torch.testing.assert_close(compute_scales(layer, norms, (a, b), Sums()), divided, rtol=1e-4, atol=1e-5)

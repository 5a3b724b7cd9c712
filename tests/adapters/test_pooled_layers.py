"""`PooledLayer`: which layers have the gated form, and what it waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frame.adapters.deltas import LayerPages, RowPlan, TorchDeltas
from frame.adapters.pooled_layers import PooledLayer, StepRows
from frame.models.layers.parameter import Range


class GatedDeltas(TorchDeltas):
    def expand_gated(self, product: torch.Tensor, *arguments: Any) -> torch.Tensor:
        self.expand(out := product.clone(), *arguments)
        gate, up = out.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up


def make_layer(operations: TorchDeltas, *outputs: int, num_experts: int = 0) -> PooledLayer:
    names = [str(number) for number in range(len(outputs))]
    return PooledLayer(names, Range.whole(8), [Range.whole(size) for size in outputs], num_experts, False, StepRows(operations))


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (make_layer(GatedDeltas(), 6, 6), True),
        (make_layer(TorchDeltas(), 6, 6), False),
        (make_layer(GatedDeltas(), 6, 4), False),
        (make_layer(GatedDeltas(), 6, 6, 6), False),
        (make_layer(GatedDeltas(), 6, 6, num_experts=2), False),
    ],
    ids=["gated", "operations without it", "unequal parts", "three parts", "experts"],
)
def test_layers_that_have_the_gated_form(layer: PooledLayer, expected: bool) -> None:
    assert layer.can_gate is expected


def test_the_gated_form_is_the_activation_of_what_expand_computes() -> None:
    layer = make_layer(GatedDeltas(), 6, 6)
    layer.pages = LayerPages(
        torch.randn(2, 2, 16, 8), torch.randn(2, 1, 12, 16), (6, 6), torch.tensor([1]).int(), torch.rand(1, 12), torch.tensor([1]).int()
    )
    layer.rows.plan = RowPlan(torch.tensor([0, -1, 0]).int(), torch.tensor([[1]]).int())
    x, product, bias = torch.randn(3, 8), torch.randn(3, 12), torch.randn(12)
    before, shrunk = product.clone(), layer.shrink(x)
    got = layer.expand_gated(product, shrunk, bias)
    assert torch.equal(product, before)
    gate, up = layer.expand(product, shrunk, bias).chunk(2, -1)
    assert torch.equal(got, torch.nn.functional.silu(gate) * up)

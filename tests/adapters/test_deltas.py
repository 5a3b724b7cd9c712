"""`TorchDeltas` and `InvariantDeltas` against a direct computation; bits of the latter."""

from dataclasses import replace

import pytest
import torch

from frame.adapters.deltas import LayerPages, RowPlan, TorchDeltas
from frame.adapters.invariant_deltas import InvariantDeltas
from frame.interfaces.adapter import PAGE_RANKS


def _layer(pages: int, stacks: int, inputs: int, splits: tuple[int, ...], places: int, experts: int = 0) -> LayerPages:
    outputs = sum(splits)
    return LayerPages(
        torch.randn(pages, stacks, PAGE_RANKS, inputs), torch.randn(pages, max(1, experts), outputs, PAGE_RANKS), splits,
        torch.zeros(places, dtype=torch.int32), torch.rand(places, outputs) + 0.5, torch.zeros(places, dtype=torch.int32), experts,
    )  # fmt: skip


BOTH = pytest.mark.parametrize("operations", [TorchDeltas(), InvariantDeltas()], ids=lambda each: type(each).__name__)


@BOTH
def test_rows_get_the_deltas_of_their_adapter(operations: TorchDeltas) -> None:
    layer = _layer(pages=5, stacks=2, inputs=24, splits=(8, 4), places=3)
    layer.counts[:] = torch.tensor([2, 0, 1])
    layer.has_scale[2] = 1
    place_pages = torch.tensor([[4, 1], [0, 0], [2, 0]], dtype=torch.int32)
    plan = RowPlan(torch.tensor([0, -1, 2, 1, 0], dtype=torch.int32), place_pages)
    x, out, bias = torch.randn(5, 24), torch.randn(5, 12), torch.randn(12)
    before = out.clone()
    plan = operations.plan_rows(plan)
    operations.expand(out, operations.shrink(x, layer, plan), layer, plan, bias)

    for row, place in enumerate(plan.places.tolist()):
        expected = before[row].clone()
        pages = place_pages[place, : layer.counts[place]].tolist() if place >= 0 else []
        for page in pages:
            expected[:8] += layer.b[page, 0, :8] @ (layer.a[page, 0] @ x[row])
            expected[8:] += layer.b[page, 0, 8:] @ (layer.a[page, 1] @ x[row])
        if place == 2:
            expected = (expected - bias) * layer.scales[2] + bias
        if not pages:
            assert torch.equal(out[row], before[row])
        torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-3)


@BOTH
def test_pairs_get_the_deltas_of_their_expert(operations: TorchDeltas) -> None:
    layer = _layer(pages=3, stacks=3, inputs=16, splits=(6,), places=2, experts=3)
    layer.counts[:] = 1
    place_pages = torch.tensor([[2], [0]], dtype=torch.int32)
    plan = RowPlan(torch.tensor([1, 0, 0, -1], dtype=torch.int32), place_pages, torch.tensor([2, 0, 1, 1]))
    x, out = torch.randn(4, 16), torch.zeros(4, 6)
    plan = operations.plan_rows(plan, 3)
    operations.expand(out, operations.shrink(x, layer, plan), layer, plan)
    torch.testing.assert_close(out[0], layer.b[0, 2] @ (layer.a[0, 2] @ x[0]))
    torch.testing.assert_close(out[2], layer.b[2, 1] @ (layer.a[2, 1] @ x[2]))
    assert not out[3].any()


def _add_deltas(operations: TorchDeltas, layer: LayerPages, x: torch.Tensor, places: list[int], pages: torch.Tensor) -> torch.Tensor:
    plan, out = operations.plan_rows(RowPlan(torch.tensor(places, dtype=torch.int32), pages)), torch.ones(len(x), 72, dtype=x.dtype)
    operations.expand(out, operations.shrink(x, layer, plan), layer, plan)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_row_depend_on_that_row_alone(dtype: torch.dtype) -> None:
    layer = _layer(pages=4, stacks=2, inputs=200, splits=(50, 22), places=2)
    layer = replace(layer, a=layer.a.to(dtype), b=layer.b.to(dtype))
    layer.counts[:] = torch.tensor([2, 1])
    pages, x = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.randn(40, 200).to(dtype)
    operations = InvariantDeltas()
    operations.prove(layer)
    places = [row % 3 - 1 for row in range(40)]
    together = _add_deltas(operations, layer, x, places, pages)
    alone = torch.cat([_add_deltas(operations, layer, x[row : row + 1], places[row : row + 1], pages) for row in range(40)])
    assert torch.equal(together, alone)
    if dtype != torch.float32:
        return
    reference = TorchDeltas()
    rows = [_add_deltas(reference, layer, x[row : row + 1], places[row : row + 1], pages) for row in range(40)]
    assert not torch.equal(_add_deltas(reference, layer, x, places, pages), torch.cat(rows)), "the check can fail"

"""The products of low-rank deltas, compiled, and replayed from a CUDA graph with other adapters."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame.adapters.triton_deltas import TritonDeltas
    from frame.kernels.elementwise.activation import silu_mul
    from tests.adapters.test_latent_layers import test_products_of_kernels  # noqa: F401
    from tests.kernels.expert_deltas import *  # noqa: F403
    from tests.kernels.lora import *  # noqa: F403
    from tests.kernels.lora import Case, draw_places, list_thresholds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("experts", [0, 8])
@pytest.mark.parametrize("rows", [1, 8, 64, 300, 700])
def test_a_graph_reads_the_places_of_its_replay(rows: int, experts: int, dtype: torch.dtype) -> None:
    """The shrink is captured on a side stream, as layers run it."""
    splits = (4096, 1024, 1024) if not experts else (1536,)
    case = Case(2048, splits, experts=experts, places=[-1] * rows, scaled=(1,), dtype=dtype)
    operations, side = TritonDeltas(), torch.cuda.Stream()
    x, _ = case.make_rows()
    plan = case.make_plan()
    weight = (torch.randn(sum(splits), 2048, device="cuda") * 2048**-0.5).to(dtype)
    bias = torch.randn(sum(splits), device="cuda").to(dtype)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        base = x @ weight.t()
        tiled = operations.plan_rows(plan, experts)
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            shrunk = operations.shrink(x, case.layer, tiled)
        result = base * 1.0
        main.wait_stream(side)
        operations.expand(result, shrunk, case.layer, tiled, bias)
        return base, result

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        base, got = step()
    for _ in range(4):
        plan.places.copy_(torch.tensor(draw_places(rows, 4), dtype=torch.int32))
        x.normal_()
        if plan.experts is not None:
            plan.experts.random_(experts)
        graph.replay()
        expected = case.compute_reference(x, base, plan, bias)
        kept = [row for row, place in enumerate(plan.places.tolist()) if place < 0 or not case.counts[place]]
        assert torch.equal(got[kept], base[kept])
        unit = {torch.float32: 2**-16, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        assert (got.double() - expected).abs().max() <= unit * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 64, 300, 700])
def test_a_graph_of_the_gated_form_reads_the_places_of_its_replay(rows: int, dtype: torch.dtype) -> None:
    """Every row is written once, with or without an adapter."""
    inner, inputs = 1536, 2048
    case = Case(inputs, (inner, inner), places=[-1] * rows, scaled=(1,), dtype=dtype)
    operations, (x, _), plan = TritonDeltas(), case.make_rows(), case.make_plan()
    weight = (torch.randn(2 * inner, inputs, device="cuda") * inputs**-0.5).to(dtype)
    bias = torch.randn(2 * inner, device="cuda").to(dtype)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        product = x @ weight.t()
        tiled = operations.plan_rows(plan)
        shrunk = operations.shrink(x, case.layer, tiled)
        return product, operations.expand_gated(product, shrunk, case.layer, tiled, bias)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product, got = step()
    for _ in range(4):
        plan.places.copy_(torch.tensor(draw_places(rows, 4), dtype=torch.int32))
        x.normal_()
        got.fill_(torch.nan)
        graph.replay()
        gate, up = case.compute_reference(x, product, plan, bias).chunk(2, 1)
        kept = [row for row, place in enumerate(plan.places.tolist()) if place < 0 or not case.counts[place]]
        assert torch.equal(got[kept], silu_mul(product)[kept])
        expected = torch.nn.functional.silu(gate) * up
        unit = {torch.float32: 2**-16, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        assert (got.double() - expected).abs().max() <= unit * expected.abs().max()


@pytest.mark.parametrize("experts", [0, 8])
def test_the_row_counts_of_a_warm_up_compile_every_variant(experts: int) -> None:
    """Later rows of any number launch nothing that is not compiled."""
    from triton import knobs

    cases = [Case(2048, splits, experts=experts, dtype=torch.bfloat16) for splits in ((4096, 1024, 1024), (1536, 1536))]
    operations = TritonDeltas()

    def run(rows: int) -> None:
        for case in cases:
            case.places = draw_places(rows, 4)
            x, out = case.make_rows()
            if len(case.layer.splits) == 2 and not experts:
                case.compute_gated(operations, x, out, case.make_plan(), None)
            case.compute(operations, x, out, case.make_plan(), None)

    for rows in list_thresholds(experts):
        run(rows)
    compiled: list[object] = []
    previous, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, lambda **named: compiled.append(named)
    try:
        for rows in (2, 3, 7, 16, 31, 32, 100, 500, 600, 1024, 5000):
            run(rows)
    finally:
        knobs.runtime.jit_post_compile_hook = previous
    assert not compiled

"""Both GEMMs of experts of many rows, rows and weights fetched by warps of their own, against
float32: loads, sizes, strides, types."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from frame.testing.moe.experts import reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame import kernels
    from frame.kernels.moe import expert_prefill, grouped_gemm
    from frame.kernels.moe.align import align_tokens
    from frame.kernels.moe.expert_prefill import ROWS, can_tile, compute_down, compute_gate_up
    from frame.kernels.moe.expert_tiles import choose_tiles

    pytestmark.append(pytest.mark.skipif(not kernels.supports_tma_streaming(torch.device("cuda")), reason="needs compute capability 9.0"))

DEVICE = torch.device("cuda")
UNIT = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half of the last place
LOADS = {
    "edges": [0, 1, 63, 64, 65, 127, 128, 129, 0, 300],
    "one": [0, 0, 700, 0],
    "one row": [0, 1, 0],
    "many tiles": [257] * 40,
}


def shared_out(counts: list[int], top: int) -> torch.Tensor:
    """Experts [tokens, top] such that each has so many pairs; a token may have one twice."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = ids[torch.randperm(len(ids))][: len(ids) // top * top]
    return ids.view(-1, top).to(DEVICE)


def drawn(sizes: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    experts, hidden, inner = sizes
    return tuple(
        (torch.randn(experts, outputs, inputs, device=DEVICE) * inputs**-0.5).to(dtype)
        for outputs, inputs in ((2 * inner, hidden), (hidden, inner))
    )  # type: ignore[return-value]


def check(x: torch.Tensor, ids: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    tokens, top = ids.shape
    pair_weights = torch.rand(tokens, top, device=DEVICE)
    order = align_tokens(ids, len(first), ROWS)
    act = compute_gate_up(x, first, ids.numel(), top, order)
    rows = order.pairs[: int(order.used) * ROWS]
    places = (rows < ids.numel()).nonzero().flatten()
    found = torch.empty(ids.numel(), act.shape[1], dtype=act.dtype, device=DEVICE)
    found[rows[places].long()] = act[places]
    out = compute_down(act, second, pair_weights, order)
    assert out.shape == (ids.numel(), x.shape[1])
    for expert in range(len(first)):
        mine = (ids.flatten() == expert).nonzero().flatten()
        gate, up = F.linear(x[mine // top].float(), first[expert].float()).chunk(2, -1)
        close(found[mine], F.silu(gate) * up)
        close(out[mine], F.linear(found[mine].float(), second[expert].float()) * pair_weights.view(-1)[mine, None])
    again = compute_down(compute_gate_up(x, first, ids.numel(), top, order), second, pair_weights, order)
    assert torch.equal(again.nan_to_num(), out.nan_to_num())
    return out


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    if len(got):  # beside the one rounding, the sums' order and the fast exponential
        maximum = float(want.nan_to_num().abs().max())
        torch.testing.assert_close(got.float(), want, rtol=1.5 * UNIT[got.dtype], atol=1e-3 * maximum, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(256, 128), (512, 384)], ids=str)
@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("load", LOADS)
def test_loads(load: str, top: int, sizes: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if load == "many tiles":
        monkeypatch.setattr(expert_prefill, "count_tma_processors", lambda _: 5)
    ids = shared_out(LOADS[load], 1 if load == "one row" else top)
    x = torch.randn(len(ids), sizes[0] + 16, device=DEVICE).to(dtype)[:, : sizes[0]]
    check(x, ids, *drawn((len(LOADS[load]), *sizes), dtype))


@pytest.mark.parametrize("tokens", [1024, 8191])
def test_qwen3_30b_a3b(tokens: int) -> None:
    torch.manual_seed(0)
    ids = torch.rand(tokens, 128, device=DEVICE).topk(8).indices
    check(torch.randn(tokens, 2048, device=DEVICE).bfloat16(), ids, *drawn((128, 2048, 768), torch.bfloat16))


@pytest.mark.parametrize("token", [0, 17])
def test_what_is_no_number_stays_in_its_token(token: int) -> None:
    torch.manual_seed(0)
    ids = torch.rand(90, 6, device=DEVICE).topk(2).indices
    x = torch.randn(90, 256, device=DEVICE).bfloat16()
    x[token, 5] = float("nan")
    out = check(x, ids, *drawn((6, 256, 128), torch.bfloat16)).view(90, 2, 256)
    assert out[token].isnan().all()
    assert out.isnan().any(2).any(1).sum() == 1


def test_what_tiles_cover() -> None:
    assert can_tile(2 * 768, 2048)
    assert can_tile(2048, 768)
    assert not can_tile(2 * 704, 2048)
    assert not can_tile(2048, 768 + 32)


@pytest.mark.parametrize("inner", [256, 192])
def test_products_take_it_where_they_can(inner: int) -> None:
    torch.manual_seed(0)
    ids = torch.rand(900, 8, device=DEVICE).topk(2).indices
    x, pair_weights = torch.randn(900, 512, device=DEVICE).bfloat16(), torch.rand(900, 2, device=DEVICE)
    first, second = (grouped_gemm.Weights(weight) for weight in drawn((8, 512, inner), torch.bfloat16))
    pairs, order, tiles = grouped_gemm.Pairs(ids, pair_weights), align_tokens(ids, 8, ROWS), choose_tiles(1800, 8)
    assert tiles.first.bm == ROWS
    for tile in (tiles.second, replace(tiles.second, use_gluon=False)):
        first_tile = replace(tiles.first, use_gluon=tile.use_gluon)
        act = grouped_gemm.compute_gate_up(grouped_gemm.Rows(x), first, pairs, order, first_tile, x.dtype)
        out = grouped_gemm.compute_down(act, second, pairs, order, tile, x.dtype)
        want = reference(x, ids, pair_weights, first.values, second.values)
        got = grouped_gemm.combine_pairs(out, 2).double()
        assert float((got - want).abs().max() / want.abs().max()) < 2e-2
        if tile.use_gluon and can_tile(2 * inner, 512):
            assert torch.equal(compute_down(compute_gate_up(x, first.values, 1800, 2, order), second.values, pair_weights, order), out)


def test_replays_are_the_same() -> None:
    torch.manual_seed(0)
    ids = torch.rand(2048, 32, device=DEVICE).topk(4).indices
    x, pair_weights = torch.randn(2048, 512, device=DEVICE).bfloat16(), torch.rand(2048, 4, device=DEVICE)
    layers = [drawn((32, 512, 256), torch.bfloat16) for _ in range(3)]

    def run() -> list[torch.Tensor]:
        order = align_tokens(ids, 32, ROWS)
        return [compute_down(compute_gate_up(x, first, ids.numel(), 4, order), second, pair_weights, order) for first, second in layers]

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(20):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

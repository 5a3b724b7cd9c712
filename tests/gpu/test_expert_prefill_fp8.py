"""Both GEMMs of float8 experts of many rows against float32 GEMMs of the same rounded
numbers: loads, sizes, types."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.gpu.test_expert_prefill import LOADS, UNIT, shared_out

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

if torch.cuda.is_available():
    from frame import kernels
    from frame.kernels.linear.fp8_quantize import quantize_groups
    from frame.kernels.moe import expert_prefill, grouped_gemm
    from frame.kernels.moe.align import align_tokens
    from frame.kernels.moe.expert_prefill_fp8 import ROWS, compute_down, compute_gate_up
    from frame.kernels.moe.expert_tiles import choose_tiles
    from frame.quantization.fp8_weights import quantize_blocks

    pytestmark.append(pytest.mark.skipif(not kernels.supports_tma_streaming(torch.device("cuda")), reason="needs compute capability 9.0"))

DEVICE = torch.device("cuda")


def draw(experts: int, hidden: int, inner: int) -> list[grouped_gemm.Weights]:
    found = []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        made = [quantize_blocks(torch.randn(outputs, inputs, device=DEVICE) * inputs**-0.5) for _ in range(experts)]
        found.append(grouped_gemm.Weights(*(torch.stack(part) for part in zip(*made, strict=True))))
    return found


def widen(quantized: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    return quantized.float() * scales.repeat_interleave(rows, 0).repeat_interleave(128, 1)


def check(x: torch.Tensor, ids: torch.Tensor, first: grouped_gemm.Weights, second: grouped_gemm.Weights) -> torch.Tensor:
    tokens, top = ids.shape
    pair_weights = torch.rand(tokens, top, device=DEVICE)
    order = align_tokens(ids, len(first.values), ROWS)
    rounded, scale = quantize_groups(x)

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        act = compute_gate_up(rounded, scale, first.values, first.scale, ids.numel(), top, order)
        return *act, compute_down(*act, second.values, second.scale, pair_weights, order, x.dtype)

    act, act_scale, out = run()
    rows = order.pairs[: int(order.used) * ROWS]
    places = (rows < ids.numel()).nonzero().flatten()
    found = torch.empty(ids.numel(), act.shape[1], device=DEVICE)
    found[rows[places].long()] = widen(act[places], act_scale[places], 1)
    wide = widen(rounded, scale, 1)
    for expert in range(len(first.values)):
        mine = (ids.flatten() == expert).nonzero().flatten()
        gate, up = F.linear(wide[mine // top], widen(first.values[expert], first.scale[expert], 128)).chunk(2, -1)
        close(found[mine], F.silu(gate) * up, 2**-4)
        want = F.linear(found[mine], widen(second.values[expert], second.scale[expert], 128)) * pair_weights.view(-1)[mine, None]
        close(out[mine], want, 1.5 * UNIT[out.dtype])
    assert torch.equal(run()[2].nan_to_num(), out.nan_to_num())
    return out


def close(got: torch.Tensor, want: torch.Tensor, relative: float) -> None:
    if len(got):  # the tensor cores keep fewer bits of a sum of 128 float8 products than float32
        maximum = float(want.nan_to_num().abs().max())
        torch.testing.assert_close(got.float(), want, rtol=relative, atol=4e-3 * maximum, equal_nan=True)


@pytest.mark.parametrize("sizes", [(256, 128), (512, 384)], ids=str)
@pytest.mark.parametrize("top", [1, 3])
@pytest.mark.parametrize("load", LOADS)
def test_loads(load: str, top: int, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if load == "many tiles":
        monkeypatch.setattr(expert_prefill, "count_tma_processors", lambda _: 5)
    ids = shared_out(LOADS[load], 1 if load == "one row" else top)
    check(torch.randn(len(ids), sizes[0], device=DEVICE).bfloat16(), ids, *draw(len(LOADS[load]), *sizes))


def test_float16_and_tokens_without_numbers() -> None:
    torch.manual_seed(0)
    ids = torch.rand(90, 6, device=DEVICE).topk(2).indices
    x = torch.randn(90, 256, device=DEVICE).half()
    x[17, 5] = float("nan")
    out = check(x, ids, *draw(6, 256, 128)).view(90, 2, 256)
    assert out.isnan().any(2).any(1).nonzero().flatten().tolist() == [17]


def test_products_take_it_where_they_can() -> None:
    torch.manual_seed(0)
    ids = torch.rand(1000, 8, device=DEVICE).topk(2).indices
    pairs, order = grouped_gemm.Pairs(ids, torch.rand(1000, 2, device=DEVICE)), align_tokens(ids, 8, ROWS)
    first, second = draw(8, 512, 256)
    assert not grouped_gemm.can_prefill_fp8(grouped_gemm.Weights(first.values[:, :384], first.scale[:, :3]))
    assert all(grouped_gemm.can_prefill_fp8(weights) for weights in (first, second))
    tiles = choose_tiles(pairs.count, 8, float8=True, prefill_fp8=True)
    assert tiles.first.use_gluon
    assert tiles.second.use_gluon
    x = grouped_gemm.Rows(*quantize_groups(torch.randn(1000, 512, device=DEVICE).bfloat16()))
    act = grouped_gemm.compute_gate_up(x, first, pairs, order, tiles.first, torch.bfloat16)
    assert act.scale is not None
    out = grouped_gemm.compute_down(act, second, pairs, order, tiles.second, torch.bfloat16)
    again = compute_down(act.values, act.scale, second.values, second.scale, pairs.weights, order, torch.bfloat16)
    assert torch.equal(out, again)

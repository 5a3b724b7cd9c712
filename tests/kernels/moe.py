"""Expert selection, token alignment and expert products against float64 and PyTorch, over routings,
shapes and dtypes.

Collected by `tests/gpu/test_moe.py`, and run by `test_interpreted.py` in a process with
TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from frame.core.interfaces.build import BuildContext, Limits
from frame.core.interfaces.collective import LocalGroup
from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement, SupportsPairMatmul, select_local
from frame.core.interfaces.weight_format import FormatContext
from frame.kernels.elementwise.norm import add_rms_norm
from frame.kernels.linear.fp8_quantize import quantize_groups
from frame.kernels.moe import align as align_module
from frame.kernels.moe.align import align_tokens, copy_rows
from frame.kernels.moe.expert_routes import route_replicas
from frame.kernels.moe.expert_tiles import FLOAT8_TILES, TILES, Tile, Vector, choose_tiles, choose_vectors, list_token_thresholds
from frame.kernels.moe.grouped_gemm import (
    Pairs,
    Rows,
    Weights,
    combine_pairs,
    compute_down,
    compute_down_vector,
    compute_gate_up,
    compute_gate_up_vector,
)
from frame.kernels.moe.local_pairs import select_local_pairs
from frame.kernels.moe.router import compute_few_logits, compute_normed_logits, select_experts
from frame.kernels.moe.shared_expert import add_shared_expert
from frame.models.layers.moe import ExpertRoutes, ExpertSizes, GatedSharedExpert, MoE
from frame.models.layers.norm import RMSNorm
from frame.models.layers.router import Router, RoutingRule
from frame.models.layers.weights.expert_activation import ClampedSwiGLU, gelu_mul, squared_relu
from frame.plugins.devices import open_platform
from frame.plugins.moe_dispatchers.all_reduce import AllReduce
from frame.plugins.moe_runners.torch_native import run_biased
from frame.plugins.moe_runners.triton import Triton
from frame.quantization.plain import Plain
from frame.testing.gemm_kernels import make_gemm_kernels
from frame.testing.moe.experts import reference
from frame.testing.moe.runner import PlainExperts
from tests.models.layers.random_adapters import RandomAdapters

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# relative to the largest value; the interpreter truncates instead of rounding
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
CONTEXT = BuildContext(platform=open_platform(DEVICE), device=DEVICE, dtype=torch.float32, tp=LocalGroup(), limits=Limits(8, 512, 256, 4))
# tensor cores accumulate float8 products with few bits
SUMS = {"rtol": 1e-4, "atol": 1e-5} if DEVICE.type == "cpu" else {"rtol": 1e-2, "atol": 5e-3}
RULES = [
    (RoutingRule(8, renormalize=True), 128),
    (RoutingRule(4), 60),
    (RoutingRule(2, renormalize=True), 8),
    (RoutingRule(1), 8),
    (RoutingRule(8, "sigmoid", True, 2.5, groups=8, top_groups=4, group_score="top2", correction=True), 256),
    (RoutingRule(6, "softmax", False, 16.0, groups=8, top_groups=3), 160),
    (RoutingRule(10, "softmax", True, groups=4, top_groups=2), 512),
]


@pytest.mark.parametrize(("rule", "experts"), RULES, ids=[f"{experts}-{rule.scoring}-{rule.groups}" for rule, experts in RULES])
@pytest.mark.parametrize("tokens", [3, 21])
def test_the_kernel_selects_the_experts_of_the_reference(rule: RoutingRule, experts: int, tokens: int) -> None:
    router = Router(CONTEXT, "gate", experts, 64, rule).to(DEVICE)
    router.weight.data.normal_()
    if rule.correction:
        router.correction.data.normal_(std=0.1)
    x = torch.randn(tokens, 64, device=DEVICE)
    ids, weights = router(x)
    want_ids, want = router.choose_experts((x.double() @ router.weight.double().T).float())
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("tokens", "top"), [(1, 8), (37, 3), (0, 4)])
def test_pairs_of_other_ranks_go_to_an_expert_of_the_token(tokens: int, top: int) -> None:
    ids = torch.rand(tokens, 32, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :top].to(DEVICE)
    weights = torch.rand(tokens, top, device=DEVICE)
    for rank in range(4):
        local, kept = select_local_pairs(ids, weights, 8 * rank, 8)
        right, right_weights = select_local(ids, weights, 8 * rank, 8)
        own = ids // 8 == rank
        assert torch.equal(kept, right_weights) and torch.equal(local[own], right[own]) and local.dtype == ids.dtype
        assert local.numel() == 0 or (local.min() >= 0 and local.max() < 8)
        for row in range(tokens):
            assert not own[row].any() or set(local[row].tolist()) == set(right[row][own[row]].tolist())


def test_ties_select_the_first_experts() -> None:
    router = Router(CONTEXT, "gate", 12, 16, RoutingRule(3, renormalize=True)).to(DEVICE)
    router.weight.data.zero_()
    ids, weights = router(torch.randn(5, 16, device=DEVICE))
    assert ids.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


@pytest.mark.parametrize("exact", [True, False])
def test_float32_logits_of_many_tokens(exact: bool) -> None:
    """A float32 weight that bfloat16 holds exactly is multiplied in bfloat16 on a GPU, with sums in
    float32."""
    context = replace(CONTEXT, dtype=torch.bfloat16)
    router = Router(context, "gate", 32, 512, RoutingRule(2, precise=True)).to(DEVICE)
    router.weight.data.normal_(std=512**-0.5)
    if exact:
        router.weight.data.copy_(router.weight.data.bfloat16())
    router.process_weights_after_loading()
    assert (router.weight.dtype == torch.bfloat16) == (exact and DEVICE.type == "cuda")
    for tokens in (3, 200):
        x = torch.randn(tokens, 512, device=DEVICE).bfloat16()
        logits = router._logits(x)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), x.double() @ router.weight.double().T, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("hidden", "experts"), [(64, 12), (72, 8)])
def test_logits_of_few_tokens(hidden: int, experts: int) -> None:
    x = torch.randn(5, 2 * hidden, device=DEVICE)[:, :hidden]
    weight = torch.randn(experts, hidden, device=DEVICE)
    for bias in (None, torch.randn(experts, device=DEVICE)):
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        torch.testing.assert_close(compute_few_logits(x, weight, bias=bias).double(), want, rtol=1e-5, atol=1e-5)


def test_float32_logits_of_a_weight_in_the_models_dtype() -> None:
    """They are those of the weight in float32."""
    x, residual = torch.randn(2, 5, 64, device=DEVICE).bfloat16()
    scale, weight = torch.randn(64, device=DEVICE), torch.randn(12, 64, device=DEVICE).bfloat16()
    assert torch.equal(compute_few_logits(x, weight, torch.float32), compute_few_logits(x, weight.float()))
    got = compute_normed_logits(x, residual, scale, 1e-6, weight, torch.float32)
    assert all(map(torch.equal, got, compute_normed_logits(x, residual, scale, 1e-6, weight.float())))


@pytest.mark.parametrize(("hidden", "experts"), [(64, 12), (72, 8)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_logits_fused_with_the_norm(tokens: int, hidden: int, experts: int) -> None:
    x, residual = torch.randn(2, tokens, 2 * hidden, device=DEVICE)[..., :hidden]
    scale, weight = torch.randn(hidden, device=DEVICE), torch.randn(experts, hidden, device=DEVICE)
    want, total = add_rms_norm(x, residual.clone(), scale, 1e-6)
    for bias in (None, torch.randn(experts, device=DEVICE)):
        logits, normed, stream = compute_normed_logits(x, residual, scale, 1e-6, weight, bias=bias)
        assert torch.equal(stream, total)
        torch.testing.assert_close(normed, want)
        torch.testing.assert_close(logits, compute_few_logits(want, weight, bias=bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("renormalize", [False, True])
def test_selection_by_16_bit_logits(renormalize: bool, dtype: torch.dtype) -> None:
    logits = (torch.randn(9, 60, device=DEVICE) * 3).to(dtype)
    logits[3, ::3] = 0.0
    logits[4] = -logits[4].abs()
    ids, weights = select_experts(logits, None, 8, renormalize=renormalize)
    values, order = logits.float().sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, order[:, :8])
    want = values.softmax(1)[:, :8]
    torch.testing.assert_close(weights, want / want.sum(1, keepdim=True) if renormalize else want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("counted", [False, True], ids=["at once", "counted before"])
@pytest.mark.parametrize(("tokens", "experts", "top", "block"), [(1, 8, 1, 16), (40, 6, 3, 16), (500, 12, 4, 32), (70, 5, 2, 48)])
def test_every_pair_is_in_a_block_of_its_expert(
    tokens: int, experts: int, top: int, block: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(align_module, "CHUNKS", (0,) if counted else (128, 512, 2048))
    spread = torch.rand(tokens, experts, device=DEVICE).topk(top).indices
    for ids in (spread, torch.full_like(spread, experts - 1)):
        found = align_tokens(ids, experts, block)
        used = int(found.used)
        assert int(found.rows) == used * block
        assert found.counts.tolist() == [0, 0]
        rows = found.pairs[: used * block].view(used, block)
        pads = rows == ids.numel()
        assert sorted(rows[~pads].tolist()) == list(range(ids.numel()))
        assert (~pads[:, 0]).all(), "a block in use has a row"
        owners = ids.flatten()[rows.clamp_max(ids.numel() - 1).long()]
        assert (pads | (owners == found.experts[:used, None])).all()


def drawn(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, ids, weights, gate_up, down for (experts, top, hidden, inner)."""
    experts, top, hidden, inner = sizes
    x = torch.randn(tokens, hidden).to(DEVICE, dtype)
    ids = torch.rand(tokens, experts).topk(top).indices.to(DEVICE)
    gate_up_ = (torch.randn(experts, 2 * inner, hidden) * hidden**-0.5).to(DEVICE, dtype)
    down_ = (torch.randn(experts, hidden, inner) * inner**-0.5).to(DEVICE, dtype)
    return x, ids, torch.rand(tokens, top).to(DEVICE), gate_up_, down_


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    error = float((got.double() - want).abs().max() / want.abs().max())
    assert error < TOLERANCE[got.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["tile", "vector"])
@pytest.mark.parametrize("sizes", [(8, 2, 64, 32), (5, 3, 48, 40), (4, 1, 32, 24)], ids=str)
def test_products(sizes: tuple[int, int, int, int], way: str, dtype: torch.dtype) -> None:
    x, ids, weights, first, second = drawn(2 if way == "vector" else 9, sizes, dtype)
    want = reference(x, ids, weights, first, second)
    if way == "vector":
        pairs = Pairs(ids, weights)
        act = compute_gate_up_vector(x, Weights(first), pairs, Vector(16, 32, 4))
        check(compute_down_vector(act, Weights(second), pairs, Vector(16, 32, 4, 2)), want)
        return
    pairs, order = Pairs(ids, weights), align_tokens(ids, sizes[0], 32)
    tiles = Tile(32, 16, 16, 4, 2), Tile(32, 32, 16, 4, 2, half_blocks=True), Tile(32, 64, 32, 4, 2, swap=True)
    for tile in (*tiles, replace(tiles[2], tma=True)):
        rows = compute_gate_up(Rows(x), Weights(first), pairs, order, tile, dtype)
        for way in (replace(tile, swap=False), replace(tile, persistent=True))[: 1 + tile.tma]:
            check(combine_pairs(compute_down(rows, Weights(second), pairs, order, way, dtype), sizes[1]), want)


FORMS = {
    "clamped": (ClampedSwiGLU(1.702, 0.5), True),
    "gelu": (gelu_mul, False),
    "ungated": (squared_relu, False),
    "ungated-biased": (squared_relu, True),
    "unfused": (torch.mul, True),
}


def with_form(name: str, first: torch.Tensor, second: torch.Tensor) -> PlainExperts:
    """Experts with an activation of their own; without gates, the first weights' first half."""
    activation, is_biased = FORMS[name]
    is_gated = not name.startswith("ungated")
    experts = PlainExperts(first if is_gated else first[:, : first.shape[1] // 2].contiguous(), second, hidden_first=False)
    experts.activation, experts.gated = activation, is_gated  # type: ignore[assignment]
    if is_biased:
        for gemm in ("gate_up", "down"):
            bias = torch.randn(getattr(experts, gemm).shape[:2]).to(first)
            setattr(experts, f"{gemm}_bias", torch.nn.Parameter(bias, requires_grad=False))
    return experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_biases_and_activations(form: str, dtype: torch.dtype) -> None:
    """One token and few (vectors), and 2 to 100 rows of an expert."""
    x, ids, weights, first, second = drawn(200, (4, 2, 48, 40), dtype)
    experts = with_form(form, first, second)
    exact = with_form(form, first.double(), second.double())
    for name, bias in list(experts.named_parameters()):
        setattr(exact, name, torch.nn.Parameter(bias.double(), requires_grad=False))
    runner = Triton(CONTEXT)
    for count in (1, 4, 30, 200):
        tokens = DispatchOutput(x[:count], ids[:count], weights[:count])
        want = run_biased(replace(tokens, x=tokens.x.double()), exact)
        check(runner.run(tokens, experts), want)
    x[0, 0] = torch.nan
    assert runner.run(tokens, experts)[0].isnan().all(), "an activation that clamps keeps NaN"


def rounded(weight: torch.Tensor) -> tuple[Weights, torch.Tensor]:
    """Weights [experts, outputs, inputs] in float8 with a scale per block of 128 x 128, and their
    dequantized values."""
    experts, outputs, inputs = weight.shape
    blocks = weight.view(experts, outputs // 128, 128, inputs // 128, 128)
    scale = blocks.abs().amax((2, 4)) / 448
    values = (blocks / scale[:, :, None, :, None]).to(torch.float8_e4m3fn)
    numbers = (values.float() * scale[:, :, None, :, None]).view(weight.shape)
    return Weights(values.view(weight.shape), scale), numbers


def stands_for(rows: Rows) -> torch.Tensor:
    assert rows.scale is not None
    return (rows.values.float().unflatten(-1, (-1, 128)) * rows.scale[..., None]).flatten(1)


@pytest.mark.parametrize("swap", [False, True])
def test_products_of_float8_blocks(swap: bool) -> None:
    x, ids, weights, *plain = drawn(5, (4, 2, 256, 128), torch.float32)
    (first, gate_up_), (second, down_) = (rounded(each) for each in plain)
    pairs, order = Pairs(ids, weights), align_tokens(ids, 4, 16)
    used = int(order.used) * 16
    tile = Tile(16, 128, 128, 4, 2, swap=swap, tma=swap)
    rows = Rows(*quantize_groups(x))
    act = compute_gate_up(rows, first, pairs, order, tile, torch.float8_e4m3fn)
    plainly = compute_gate_up(Rows(stands_for(rows)[:5].contiguous()), Weights(gate_up_), pairs, order, tile, torch.float32)
    want = plainly.values[:used]
    torch.testing.assert_close(compute_gate_up(rows, first, pairs, order, tile, torch.float32).values[:used], want, **SUMS)
    error = (stands_for(act)[:used] - want).abs()
    assert (error <= want.abs().amax(1, keepdim=True) * 2**-4).all()
    act = Rows(act.values[:used], act.scale[:used])  # type: ignore[index]
    got = compute_down(act, second, pairs, order, tile, torch.float32)
    torch.testing.assert_close(got, compute_down(Rows(stands_for(act)), Weights(down_), pairs, order, tile, torch.float32), **SUMS)


def round_experts(experts: PlainExperts) -> None:
    """Store experts in float8. Their tensors before become the dequantized ones."""
    for name in ("gate_up", "down"):
        plain = getattr(experts, name).data
        made, numbers = rounded(plain)
        plain.copy_(numbers)
        setattr(experts, name, torch.nn.Parameter(made.values, requires_grad=False))
        setattr(experts, f"{name}_fp8_scale", made.scale)


@pytest.mark.parametrize("form", ["plain", "clamped", "ungated", "unfused"])
def test_float8_experts_are_close_to_plain_ones(form: str) -> None:
    x, ids, weights, *plain = drawn(9, (4, 2, 256, 128), torch.float32)
    experts = PlainExperts(*plain, hidden_first=False) if form == "plain" else with_form(form, *plain)
    tokens = DispatchOutput(x, ids, weights)
    want = reference(x, ids, weights, *plain) if form == "plain" else run_biased(tokens, experts)
    round_experts(experts)
    got = Triton(CONTEXT).run(tokens, experts).double()
    assert (got - want).norm() < 0.08 * want.norm()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("width", [8, 72])
def test_rows_are_copied_into_their_order(monkeypatch: pytest.MonkeyPatch, width: int, together: bool) -> None:
    monkeypatch.setattr(align_module, "_MANY_ROWS", 1 if together else 1000)
    ids = torch.randint(0, 4, (11, 2), device=DEVICE)
    x = torch.randn(11, width + 8, device=DEVICE)[:, :width]
    order = align_tokens(ids, 4, 16)
    found = copy_rows(x, order, ids)
    pairs = order.pairs[: int(order.rows)].long()
    is_pair = pairs < ids.numel()
    assert int(is_pair.sum()) == ids.numel()
    assert torch.equal(found[: len(pairs)][is_pair], x[pairs[is_pair] // 2])


@pytest.mark.parametrize("counts_tokens", [False, True])
@pytest.mark.parametrize(("experts", "redundant", "top"), [(5, 3, 2), (12, 0, 3)])
def test_replicas_take_turns_and_their_tokens_are_counted(experts: int, redundant: int, top: int, counts_tokens: bool) -> None:
    placement = ExpertPlacement.divide(experts, 2, redundant) if redundant else ExpertPlacement.divide(experts, 2)
    routes, expected = (ExpertRoutes(placement, experts, DEVICE, counts_tokens) for _ in range(2))
    assert routes._route is route_replicas
    expected._route = None
    for tokens in (1, 7, 400):
        ids = torch.randint(0, experts, (tokens, top), device=DEVICE)
        assert torch.equal(routes(ids), expected(ids))
        assert torch.equal(routes(ids.t().contiguous().t()), expected(ids))
    assert torch.equal(routes.counts, expected.counts) and bool(routes.counts.any()) == counts_tokens


@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_results_do_not_depend_on_token_order(tokens: int) -> None:
    x, ids, weights, first, second = drawn(tokens, (16, 4, 32, 16), torch.float32)
    runner, experts = Triton(CONTEXT), PlainExperts(first, second, hidden_first=False)
    out = runner.run(DispatchOutput(x, ids, weights), experts)
    order = torch.randperm(tokens, device=DEVICE)
    torch.testing.assert_close(runner.run(DispatchOutput(x[order], ids[order], weights[order]), experts), out[order], rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 9])
def test_parts_sum_to_the_result(tokens: int) -> None:
    x, ids, weights, first, second = drawn(tokens, (8, 2, 64, 32), torch.float32)
    runner, experts = Triton(CONTEXT), PlainExperts(first, second, hidden_first=False)
    parts = runner.run_parts(DispatchOutput(x, ids, weights), experts)
    assert parts.shape == ((9, 2, 64) if tokens > 1 else (1, 64))
    check(parts.sum(1) if tokens > 1 else parts, reference(x, ids, weights, first, second))


class FakeDeepGemm(ModuleType):
    """The library's functions with the parameters of sgl-deep-gemm 0.1.4, in PyTorch. Rows without
    an expert are left unchanged."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")

    @staticmethod
    def get_mk_alignment_for_contiguous_layout() -> int:
        return 128

    @staticmethod
    def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, compiled_dims="nk", use_psum_layout=False) -> None:  # type: ignore[no-untyped-def]
        assert a.is_contiguous()
        assert a.shape[0] % 128 == 0
        assert grouped_layout.dtype == torch.int32
        assert all(len(block.unique()) == 1 for block in grouped_layout.split(128))
        for expert in grouped_layout.unique().tolist():
            if expert >= 0:
                d[grouped_layout == expert] = (a[grouped_layout == expert].float() @ b[expert].float().T).to(d.dtype)

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout, recipe=None) -> None:  # type: ignore[no-untyped-def]
        assert a[0].dtype == b[0].dtype == torch.float8_e4m3fn
        rows = a[0].float() * a[1].repeat_interleave(128, 1)
        weights = b[0].float() * b[1].repeat_interleave(128, 1).repeat_interleave(128, 2)
        self.m_grouped_bf16_gemm_nt_contiguous(rows, weights, d, grouped_layout)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="stands in for a library, where there is no GPU for it")
@pytest.mark.parametrize("is_float8", [False, True], ids=["plain", "float8"])
def test_deep_gemm(is_float8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_gemm", FakeDeepGemm())
    monkeypatch.delitem(sys.modules, "frame.plugins.moe_runners.deep_gemm", raising=False)
    runner = importlib.import_module("frame.plugins.moe_runners.deep_gemm").DeepGemm(CONTEXT)
    x, ids, weights, first, second = drawn(7, (5, 2, 256, 128), torch.float32)
    experts = PlainExperts(first, second, hidden_first=False)
    if is_float8:
        round_experts(experts)
    want = reference(x, ids, weights, first, second)
    error = runner.run(DispatchOutput(x, ids, weights), experts).double() - want
    assert error.norm() < (0.08 if is_float8 else 1e-5) * want.norm()
    check_pairs(runner, experts, x, ids, first, second)


def check_pairs(runner: SupportsPairMatmul, experts: PlainExperts, x: torch.Tensor, ids: torch.Tensor, *plain: torch.Tensor) -> None:
    """The products of single pairs, close to those of the dequantized weights."""
    gates = runner.multiply_pairs(x, ids, experts, "gate_up")
    out = runner.multiply_pairs(gates[:, : plain[1].shape[2]].contiguous(), ids.flatten()[:, None], experts, "down")
    want = torch.einsum("ti,tkoi->tko", x.double(), plain[0].double()[ids]).flatten(0, 1)
    assert (gates.double() - want).norm() < 0.08 * want.norm()
    want = torch.einsum("ti,toi->to", gates[:, : plain[1].shape[2]].double(), plain[1].double()[ids.flatten()])
    assert (out.double() - want).norm() < 0.08 * want.norm()


@pytest.mark.parametrize("tokens", [1, 9, 400])
@pytest.mark.parametrize("is_float8", [False, True], ids=["plain", "float8"])
def test_products_of_pairs(tokens: int, is_float8: bool) -> None:
    x, ids, _, first, second = drawn(tokens, (5, 2, 256, 128), torch.float32)
    experts = with_form("clamped", first, second)  # whose biases are not added
    if is_float8:
        round_experts(experts)
    check_pairs(Triton(CONTEXT), experts, x, ids, first, second)


def test_a_deep_gemm_error_names_the_library_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeDeepGemm):
        @staticmethod
        def m_grouped_bf16_gemm_nt_contiguous(*_: object, **__: object) -> None:
            raise RuntimeError("Assertion error: dim == 2 or dim == 3")

    monkeypatch.setitem(sys.modules, "deep_gemm", Broken())
    monkeypatch.delitem(sys.modules, "frame.plugins.moe_runners.deep_gemm", raising=False)
    runner = importlib.import_module("frame.plugins.moe_runners.deep_gemm").DeepGemm(CONTEXT)
    x, ids, weights, first, second = drawn(7, (5, 2, 256, 128), torch.float32)
    with pytest.raises(RuntimeError, match=r"dim == 3\); is its wheel built for PyTorch .* moe\.runner: triton"):
        runner.run(DispatchOutput(x, ids, weights), PlainExperts(first, second, hidden_first=False))


def test_no_tokens() -> None:
    x, ids, weights, first, second = drawn(0, (4, 2, 32, 16), torch.float32)
    assert Triton(CONTEXT).run(DispatchOutput(x, ids, weights), PlainExperts(first, second, hidden_first=False)).shape == (0, 32)


def test_every_kernel_variant_is_compiled_at_start_up() -> None:
    counts = list_token_thresholds(8, 128, (512, 2048, 4096), 5000)
    assert max(counts) <= 5000

    def forms(tokens: int) -> tuple[object, ...]:
        return choose_vectors(tokens, 8, 128), choose_tiles(8 * tokens, 128), choose_tiles(8 * tokens, 128, float8=True)

    assert {forms(tokens) for tokens in range(1, 5001)} == {forms(tokens) for tokens in counts}
    assert list_token_thresholds(8, 128, (512,), 4) == [1, 2, 4]


def test_tiles_fit_the_device_and_the_sizes() -> None:
    for _, tiles in (*TILES, *FLOAT8_TILES):
        for tile, width in ((tiles.first, 2), (tiles.second, 1)):
            for itemsize in (1, 2, 4):
                for memory in (227 << 10, 99 << 10):
                    fitted = tile.fit_shared_memory(768, 2048, itemsize, width, memory, tma=False)
                    assert fitted.stages * (fitted.bm + width * fitted.bn) * fitted.bk * itemsize <= memory
                    assert fitted.bk >= 16
            assert tile.fit_shared_memory(24, 40, 4, width, 227 << 10, tma=False).bn <= 32
            assert tiles.first.bm == tiles.second.bm
    assert choose_vectors(1, 8, 128) != choose_vectors(2, 8, 128)
    assert choose_vectors(7, 8, 128) is None
    assert choose_vectors(1, 2, 4) is not None
    assert choose_vectors(3, 2, 8) is None, "of six pairs two or more meet at one of eight experts"
    assert choose_tiles(1 << 20, 128).first.bm > choose_tiles(256, 128).first.bm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "hidden", "parts", "gap"), [(1, 64, 0, 0), (3, 96, 4, 8), (2, 2048, 8, 0)])
@pytest.mark.parametrize("gated", [False, True])
def test_sum_with_the_shared_expert(dtype: torch.dtype, tokens: int, hidden: int, parts: int, gap: int, gated: bool) -> None:
    torch.manual_seed(0)
    shape = (tokens, parts, hidden) if parts else (tokens, hidden)
    routed, shared, x = (
        torch.randn(*size[:-1], hidden + gap, device=DEVICE).to(dtype) for size in (shape, (tokens, hidden), (tokens, hidden))
    )
    gate = (torch.randn(1, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    routed, shared, x = routed[..., :hidden], shared[:, :hidden], x[:, :hidden]
    factor = torch.sigmoid(x.double() @ gate.double().t()) if gated else 1.0
    want = (routed.double().sum(1) if parts else routed.double()) + factor * shared.double()
    check(add_shared_expert(routed, shared, *((x, gate) if gated else ())), want)


def make_layer(is_shared: bool, adapters: RandomAdapters | None = None) -> MoE:
    plain = replace(CONTEXT, weight_format=Plain(FormatContext(torch.float32)), gemm_kernels=make_gemm_kernels(CONTEXT))
    context = replace(plain, moe_runner=Triton(plain), moe_dispatcher=AllReduce(plain), adapters=adapters)
    with DEVICE:
        shared = GatedSharedExpert(context, "s", "g", 64, 32) if is_shared else None
        layer = MoE(context, "m", ExpertSizes(4, 64, 32), RoutingRule(2), shared)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    for module in layer.modules():
        if module is not layer and hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading()
    return layer


def test_layer_with_a_gated_shared_expert() -> None:
    """A layer's fused sum against its operations in PyTorch."""
    layer, x = make_layer(True), torch.randn(5, 64, device=DEVICE)
    got = layer(x)
    layer._add_shared = None
    check(got, layer(x).double())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the random adapters are on the CPU")
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("is_shared", [False, True])
def test_layer_with_adapters(tokens: int, is_shared: bool) -> None:
    """By the kernels, as by PyTorch, also where the parts of a token's experts are summed later."""
    adapters = RandomAdapters()
    layer = make_layer(is_shared, adapters)
    x, norm = torch.randn(tokens, 64), RMSNorm(CONTEXT, "n", 64, 1e-6)
    torch.nn.init.ones_(norm.weight)
    norm.process_weights_after_loading()
    adapters.places = torch.randint(-1, 2, (tokens,), dtype=torch.int32)
    got, (parts, _) = layer(x), layer.forward_normed(norm, x, torch.zeros_like(x))
    assert layer.experts.deltas is not None
    layer.experts.deltas, layer._add_shared = replace(layer.experts.deltas, runner=None), None
    check(got, layer(x).double())
    check(parts.sum(1) if parts.dim() == 3 else parts, layer(norm(x)).double())

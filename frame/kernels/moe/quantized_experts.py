# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Expert GEMMs with 4-bit and 8-bit weights, which are dequantized in registers: gate and up
with their activation, then down times the weights of the pairs.

Rows come in the blocks of `align`, one expert each, so no token is moved. Depends on no routing and
no checkpoint format.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.core.interfaces.weight_format import CanonicalWeight
from frame.kernels import INTERPRETED
from frame.kernels.launch import PreparedLaunch, ceil_div, launch_dependents, wait_for_previous
from frame.kernels.linear.weight_only import TYPES, load_quantized, multiply_quantized
from frame.kernels.moe.align import Alignment
from frame.kernels.moe.expert_kernels import activate
from frame.kernels.moe.grouped_gemm import Activation, Pairs


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """Tile sizes of one launch: `rows` of one expert, `outputs`, `inputs`, pipelined loads
    `stages`, and warps per program."""

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


@triton.jit(do_not_specialize=["num_pairs"])
def quantized_experts_kernel(
    x, quantized, scales, zeros, outer, bias, out, pair_weights, pairs_of, experts_of, used,
    num_pairs, x_stride,
    N: tl.constexpr, K: tl.constexpr, CODE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
    TOP: tl.constexpr,  # pairs that share a row of x
    FIRST: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, QUANT_TYPE: tl.constexpr,
    GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZEROS: tl.constexpr, OUTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, dtype: tl.constexpr, PORTABLE: tl.constexpr, num_stages: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[pair, n] of the GEMMs of x[pair // TOP] and the pair's expert. FIRST: with the
    activation, of N gates and N ups if GATED; otherwise times the pair's weight. Grid: blocks of
    rows times blocks of N, the latter fastest."""
    PACKED: tl.constexpr = QUANT_TYPE == "int4" or QUANT_TYPE == "e2m1"
    WIDTH: tl.constexpr = BK // 2 if PACKED else BK
    EVEN_K: tl.constexpr = K % BK == 0
    ROWS: tl.constexpr = 2 * N if GATED else N  # of a weight
    TILES: tl.constexpr = (N + BN - 1) // BN
    launch_dependents(PDL)
    block = tl.program_id(0) // TILES
    rows = tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    row_of = tl.minimum(rows, N - 1)
    lanes = tl.arange(0, WIDTH)
    columns = lanes // 16 * 32 + lanes % 16 if PACKED else lanes  # inputs of the low nibbles
    wait_for_previous(PDL)
    if block >= tl.load(used):
        return
    expert = tl.load(experts_of + block).to(tl.int64)
    pairs = tl.load(pairs_of + block * BM + tl.arange(0, BM))
    valid = pairs < num_pairs
    source = tl.where(valid, pairs, 0) // TOP
    is_row = valid[None, :]  # padding rows are masked: all programs would request the same bytes at once
    x_pointers = x + source.to(tl.int64)[None, :] * x_stride + columns[:, None]
    first_row = expert * ROWS
    code_pointers = quantized + (first_row + row_of)[:, None] * CODE_STRIDE + lanes[None, :]
    scale_offset = (expert * tl.cdiv(ROWS, GROUP_N) + row_of // GROUP_N) * SCALE_STRIDE
    up_offset = (expert * tl.cdiv(ROWS, GROUP_N) + (N + row_of) // GROUP_N) * SCALE_STRIDE
    total = tl.zeros([BN, BM], tl.float32)
    up_total = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, K, BK, num_stages=num_stages):
        packed = load_quantized(code_pointers, k, K, QUANT_TYPE, BK, EVEN_K)
        if GATED:
            up_packed = load_quantized(code_pointers + N * CODE_STRIDE, k, K, QUANT_TYPE, BK, EVEN_K)
        if EVEN_K:
            low_x = tl.load(x_pointers + k, mask=is_row, other=0.0)
        else:
            low_x = tl.load(x_pointers + k, mask=(k + columns < K)[:, None] & is_row, other=0.0)
        high_x = low_x
        if PACKED:
            if EVEN_K:
                high_x = tl.load(x_pointers + k + 16, mask=is_row, other=0.0)
            else:
                high_x = tl.load(x_pointers + k + 16, mask=(k + 16 + columns < K)[:, None] & is_row, other=0.0)
        total += multiply_quantized(
            packed, scales, zeros, scale_offset, low_x, high_x, k, K, QUANT_TYPE, BN, BK, GROUP_K, HAS_ZEROS, dtype, PORTABLE
        )
        if GATED:
            up_total += multiply_quantized(
                up_packed, scales, zeros, up_offset, low_x, high_x, k, K, QUANT_TYPE, BN, BK, GROUP_K, HAS_ZEROS, dtype, PORTABLE
            )
    total = _finish_outputs(total, scales, scale_offset, outer, bias, first_row + row_of, GROUP_K, OUTER, HAS_BIAS)
    if GATED:
        up_total = _finish_outputs(up_total, scales, up_offset, outer, bias, first_row + N + row_of, GROUP_K, OUTER, HAS_BIAS)
    if FIRST:
        total = activate(total, up_total, ACTIVATION, ALPHA, LIMIT)
    else:
        total *= tl.load(pair_weights + pairs, mask=valid, other=0.0)[None, :]
    places = pairs.to(tl.int64)[None, :] * N + rows[:, None]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=valid[None, :] & (rows < N)[:, None])


@triton.jit
def _finish_outputs(total, scales, scale_offset, outer, bias, row, GROUP_K: tl.constexpr, OUTER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Sums [BN, BM] with the scales and the bias of their outputs."""
    if GROUP_K == 0:
        total *= tl.load(scales + scale_offset).to(tl.float32)[:, None]
    if OUTER > 0:
        factor = tl.load(outer + row)[:, None]
        total = total * factor if OUTER == 1 else total / factor
    if HAS_BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    return total


FEW_PAIRS = 16  # up to which wider tiles leave multiprocessors idle
PLAN_ROWS = 8, 32, 64  # pairs per expert on average up to which each plan goes


def choose_expert_plan(pairs: int, weight: CanonicalWeight, gated: bool) -> ExpertPlan:
    """The plan for so many pairs over the experts of the weight."""
    group, rows = weight.scheme.group[1], pairs / len(weight.quantized)
    step = 128 if not group or group % 128 == 0 else 64 if group % 64 == 0 else 128
    if weight.columns % step:
        step = 64
    if INTERPRETED:
        return ExpertPlan(16, 32, min(step, 64), 1, 4)
    if rows <= PLAN_ROWS[0]:
        return ExpertPlan(16, 32 if gated and pairs <= FEW_PAIRS else 64, step, 4, 4)
    if rows <= PLAN_ROWS[1]:
        return ExpertPlan(32, 64, step, 3, 4)
    if rows <= PLAN_ROWS[2]:
        return ExpertPlan(64, 128, 64, 4, 8) if gated else ExpertPlan(64, 64, step, 3, 4)
    return ExpertPlan(128, 128, 64, 3 if gated else 4, 8)


def multiply_pairs(
    x: torch.Tensor,
    weight: CanonicalWeight,
    bias: torch.Tensor | None,
    pairs: Pairs,
    order: Alignment,
    plan: ExpertPlan,
    activation: Activation | None = None,
) -> torch.Tensor:
    """x [tokens, inputs], or [pairs, inputs], inputs contiguous, times the weights of the pairs'
    experts -> [pairs, outputs]: with the activation, which halves gated outputs; without one times
    the pairs' weights.

    `bias` [experts, outputs]. `order` has blocks of `plan.rows`.
    """
    outputs = weight.outputs // 2 if activation is not None and activation.is_gated else weight.outputs
    out = torch.empty(pairs.count, outputs, dtype=x.dtype, device=x.device)
    scales = weight.scales
    assert scales is not None
    others = [scales if each is None else each for each in (weight.zeros, weight.outer, bias)]
    tensors = (x, weight.quantized, scales, *others, out, pairs.weights, order.pairs, order.experts, order.used)
    traits = weight.scheme.group, weight.zeros is not None, 0 if weight.outer is None else 2 if weight.divides else 1, bias is not None
    launch = _prepared(
        tuple(each.dtype for each in tensors), x.stride(0), (outputs, weight.columns), (weight.quantized.shape[-1], scales.shape[-1]),
        pairs.count // len(x), activation, weight.scheme.quant_type, traits, plan, x.device,
    )  # fmt: skip
    launch((len(order.experts) * ceil_div(outputs, plan.outputs), 1, 1), tensors, (pairs.count, x.stride(0)))
    return out


@lru_cache(maxsize=256)
def _prepared(
    types: tuple[torch.dtype, ...],
    x_stride: int,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    top: int,
    activation: Activation | None,
    quantized: str,
    traits: tuple[tuple[int, int], bool, int, bool],
    plan: ExpertPlan,
    device: torch.device,
) -> PreparedLaunch:
    group, has_zeros, outer, has_bias = traits
    constants = {"N": sizes[0], "K": sizes[1], "CODE_STRIDE": strides[0], "SCALE_STRIDE": strides[1], "TOP": top, "QUANT_TYPE": quantized}
    constants |= {"FIRST": activation is not None, **(activation or Activation("none")).constants}
    constants |= {"GROUP_N": group[0], "GROUP_K": group[1], "HAS_ZEROS": has_zeros, "OUTER": outer, "HAS_BIAS": has_bias}
    constants |= {"BM": plan.rows, "BN": plan.outputs, "BK": plan.inputs, "dtype": TYPES[types[0]], "PORTABLE": INTERPRETED}
    return PreparedLaunch(quantized_experts_kernel, (*types, 0, x_stride), constants | {"num_stages": plan.stages}, device, plan.warps)

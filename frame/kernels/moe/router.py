# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Expert selection from router logits in one kernel, and router logits for few tokens.

Reference: `frame.models.layers.router.Router`. Among experts with equal scores the lowest id is
selected. Depends on no expert.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels.launch import PreparedLaunch, ceil_div, launch_dependents, next_power_of_2, wait_for_previous

# the low bits of a float32 that are zero after conversion from bfloat16 or float16; they hold the
# expert id
NUMBERS = tl.constexpr(0x1FFF)
NORMED_TOKENS = 16  # up to this, `compute_normed_logits` is faster than a norm and `compute_few_logits`
# up to this, `compute_few_logits` is faster than a GEMM (H200: 1.3 µs for one token, 4.8 µs for 64,
# against 5 µs)
FEW_TOKENS = 64


def select_experts(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    top_k: int,
    *,
    sigmoid: bool = False,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    top2: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [tokens, experts], contiguous rows -> (ids int64, weights float32), both [tokens,
    top_k], best first.

    The arguments are those of `RoutingRule`. `top2`: a group's score is the sum of its two best
    experts, not the best one.
    """
    tokens, experts = logits.shape
    ids = torch.empty((tokens, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    rows = next_power_of_2(tokens) if kernels.INTERPRETED else 1
    rule = top_k, sigmoid, renormalize, correction is not None, top2
    launch = _prepared_route(experts, groups, top_groups, rule, rows, logits.dtype, logits.stride(0), logits.device)
    tensors = logits, logits if correction is None else correction, ids, weights
    launch((ceil_div(tokens, rows), 1, 1), tensors, (tokens, logits.stride(0), scale))
    return ids, weights


@lru_cache(maxsize=64)
def _prepared_route(
    experts: int,
    groups: int,
    top_groups: int,
    rule: tuple[int, bool, bool, bool, bool],
    rows: int,
    dtype: torch.dtype,
    stride: int,
    device: torch.device,
) -> PreparedLaunch:
    top_k, sigmoid, renormalize, is_corrected, top2 = rule
    size = experts // groups
    constants = {"SIZE": size, "GROUPS": groups, "BLOCK_SIZE": next_power_of_2(size), "BLOCK_GROUPS": next_power_of_2(groups)}
    constants |= {"TOP_GROUPS": top_groups, "TOP2": top2, "TOP_K": top_k, "BLOCK_K": next_power_of_2(top_k), "SIGMOID": sigmoid}
    is_packed = dtype.itemsize == 2 and groups == 1 and not sigmoid and not is_corrected
    constants |= {"RENORMALIZE": renormalize, "CORRECTED": is_corrected, "PACKED": is_packed, "ROWS": rows}
    types = dtype, torch.float32 if is_corrected else dtype, torch.int64, torch.float32, 0, stride, 1.0
    return PreparedLaunch(_route_kernel, types, constants, device, 1)


def compute_few_logits(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [tokens, hidden] times weight [experts, hidden], plus bias [experts] -> [tokens, experts]
    in `dtype`, or the weight's, for at most `FEW_TOKENS` tokens. The weight, which no step writes,
    is loaded before the PDL wait."""
    (tokens, hidden), experts = x.shape, weight.shape[0]
    logits = torch.empty((tokens, experts), dtype=dtype or weight.dtype, device=x.device)
    together = next_power_of_2(experts) if kernels.INTERPRETED else 1 if tokens == 1 else 4
    strides = x.stride(0), weight.stride(0)
    launch = _prepared_logits(experts, hidden, together, (x.dtype, weight.dtype, logits.dtype, _dtype_of(bias)), strides, x.device)
    launch((ceil_div(experts, together), tokens, 1), (x, weight, logits, weight if bias is None else bias), strides)
    return logits


def _dtype_of(bias: torch.Tensor | None) -> torch.dtype | None:
    return None if bias is None else bias.dtype


@lru_cache(maxsize=64)
def _prepared_logits(
    experts: int, hidden: int, together: int, types: tuple[torch.dtype | None, ...], strides: tuple[int, int], device: torch.device
) -> PreparedLaunch:
    *others, bias = types
    constants = {"EXPERTS": experts, "HIDDEN": hidden, "BLOCK": next_power_of_2(hidden), "TOGETHER": together, "HAS_BIAS": bias is not None}
    return PreparedLaunch(_few_logits_kernel, (*others, bias or others[1], *strides), constants, device, 4)


@triton.jit
def _few_logits_kernel(
    x, weight, logits, bias, x_stride, weight_stride,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of TOGETHER experts, tokens)."""
    launch_dependents(PDL)
    experts = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    columns = tl.arange(0, BLOCK)
    inside = (experts < EXPERTS)[:, None] & (columns < HIDDEN)[None, :]
    rows = tl.load(weight + experts[:, None] * weight_stride + columns[None, :], mask=inside, other=0.0)
    wait_for_previous(PDL)
    token = tl.program_id(1)
    row = tl.load(x + token * x_stride + columns, mask=columns < HIDDEN, other=0.0).to(rows.dtype)
    total = tl.sum(rows.to(tl.float32) * row.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        total += tl.load(bias + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)
    tl.store(logits + token * EXPERTS + experts, total.to(logits.dtype.element_ty), mask=experts < EXPERTS)


def compute_normed_logits(
    x: torch.Tensor,
    residual: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits of norm(x + residual), norm(x + residual), x + residual) for [tokens, hidden]; both
    sums are rounded to the tensors' dtype.

    `scale` [hidden] is the norm's weight, `dtype` that of the logits (None: the weight's), `bias`
    [experts] is added to them. Every program norms its token again, which for at most
    `NORMED_TOKENS` tokens is faster than a separate launch.
    """
    (tokens, hidden), experts = x.shape, weight.shape[0]
    logits = torch.empty((tokens, experts), dtype=dtype or weight.dtype, device=x.device)
    normed, stream = (torch.empty((tokens, hidden), dtype=x.dtype, device=x.device) for _ in range(2))
    together = next_power_of_2(experts) if kernels.INTERPRETED else 1 if tokens == 1 else 4
    strides = x.stride(0), residual.stride(0), weight.stride(0)
    types = x.dtype, scale.dtype, weight.dtype, logits.dtype, _dtype_of(bias)
    launch = _prepared_normed(experts, hidden, together, types, strides, x.device)
    tensors = x, residual, scale, weight, logits, weight if bias is None else bias, normed, stream
    launch((ceil_div(experts, together), tokens, 1), tensors, (*strides, eps))
    return logits, normed, stream


@lru_cache(maxsize=64)
def _prepared_normed(
    experts: int, hidden: int, together: int, types: tuple[torch.dtype | None, ...], strides: tuple[int, ...], device: torch.device
) -> PreparedLaunch:
    x, scale, weight, logits, bias = types
    constants = {"EXPERTS": experts, "HIDDEN": hidden, "BLOCK": next_power_of_2(hidden), "TOGETHER": together, "HAS_BIAS": bias is not None}
    return PreparedLaunch(_normed_logits_kernel, (x, x, scale, weight, logits, bias or weight, x, x, *strides, 1.0), constants, device, 4)


@triton.jit
def _normed_logits_kernel(
    x, residual, scale, weight, logits, bias, normed_out, stream_out, x_stride, residual_stride, weight_stride, eps,
    EXPERTS: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of experts, tokens). A token's first program stores the normed row and the
    sum."""
    launch_dependents(PDL)
    experts = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    mask = (experts < EXPERTS)[:, None] & inside[None, :]
    rows = tl.load(weight + experts[:, None] * weight_stride + columns[None, :], mask=mask, other=0.0)
    scales = tl.load(scale + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    token = tl.program_id(1)
    total = tl.load(x + token * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(residual + token * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    stream = total.to(stream_out.dtype.element_ty)
    total = stream.to(tl.float32)
    normed = (total * tl.rsqrt(tl.sum(total * total, 0) / HIDDEN + eps) * scales).to(normed_out.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(stream_out + token * HIDDEN + columns, stream, mask=inside)
        tl.store(normed_out + token * HIDDEN + columns, normed, mask=inside)
    dots = tl.sum(rows.to(tl.float32) * normed.to(tl.float32)[None, :], 1)
    if HAS_BIAS:
        dots += tl.load(bias + experts, mask=experts < EXPERTS, other=0.0).to(tl.float32)
    tl.store(logits + token * EXPERTS + experts, dots.to(logits.dtype.element_ty), mask=experts < EXPERTS)


@triton.jit
def _to_sortable(values):
    """float32 -> int32 with the same order: a warp compares integers in one instruction."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_sortable(key):
    """The float32 of a `_to_sortable` key whose id bits were zero."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key) & ~NUMBERS
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _select_groups(choice, ids, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """[rows, groups, experts per group] -> whether each group is selected: fewer than TOP_GROUPS
    others score higher."""
    best = tl.max(choice, 2)
    if TOP2:
        first = tl.min(tl.where(choice == best[:, :, None], ids, 0x7FFFFFFF), 2)
        best += tl.max(tl.where(ids == first[:, :, None], float("-inf"), choice), 2)
    groups = tl.arange(0, best.shape[1])[None, :]
    best = tl.where(groups < GROUPS, best, float("-inf"))
    better = tl.sum((best[:, None, :] > best[:, :, None]).to(tl.int32), 2)
    return better < TOP_GROUPS


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits, correction, ids_out, weights_out, tokens, stride, scale,
    SIZE: tl.constexpr,  # experts per group
    GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, CORRECTED: tl.constexpr,
    PACKED: tl.constexpr,  # 16-bit logits whose largest values are selected directly: a key also holds the expert id
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of ROWS tokens. Selects the top k by repeated maximum."""
    launch_dependents(PDL)
    number = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(number, tokens - 1).to(tl.int64)
    groups = tl.arange(0, BLOCK_GROUPS)
    places = tl.arange(0, BLOCK_SIZE)
    ids = (groups[:, None] * SIZE + places[None, :])[None, :, :]
    inside = ((groups < GROUPS)[:, None] & (places < SIZE)[None, :])[None, :, :]
    if CORRECTED:
        bias = tl.load(correction + ids, mask=inside, other=0.0)
    wait_for_previous(PDL)
    values = tl.load(logits + row[:, None, None] * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(tl.max(values, 2), 1)
    if SIGMOID:
        choice = tl.sigmoid(values)
    elif PACKED or (RENORMALIZE and GROUPS == 1 and not CORRECTED):
        choice = values  # a softmax over the selected logits equals the renormalised softmax over all
    else:
        powers = tl.exp(values - top[:, None, None])
        choice = powers / tl.sum(tl.sum(powers, 2), 1)[:, None, None]
    if CORRECTED:
        choice += bias
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        is_open = _select_groups(choice, ids, GROUPS, TOP_GROUPS, TOP2)
        choice = tl.where(is_open[:, :, None], choice, float("-inf"))
    LOWEST: tl.constexpr = -0x80000000
    keys = _to_sortable(choice)
    if PACKED:
        keys = (keys & ~NUMBERS) | (NUMBERS - ids)
    keys = tl.reshape(tl.where(inside, keys, LOWEST), [ROWS, BLOCK_GROUPS * BLOCK_SIZE])
    flat = tl.reshape(tl.broadcast_to(ids, [1, BLOCK_GROUPS, BLOCK_SIZE]), [1, BLOCK_GROUPS * BLOCK_SIZE])
    slots = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([ROWS, BLOCK_K], tl.int32)
    for slot in tl.static_range(TOP_K):
        best = tl.max(keys, 1)
        if PACKED:
            keys = tl.where(keys == best[:, None], LOWEST, keys)
            chosen = tl.where(slots[None, :] == slot, best[:, None], chosen)
        else:
            expert = tl.min(tl.where(keys == best[:, None], flat, 0x7FFFFFFF), 1)
            keys = tl.where(flat == expert[:, None], LOWEST, keys)
            chosen = tl.where(slots[None, :] == slot, expert[:, None], chosen)
    taken = (slots < TOP_K)[None, :]
    if PACKED:
        scores = _from_sortable(chosen)
        chosen = NUMBERS - (chosen & NUMBERS)
    else:
        scores = tl.load(logits + row[:, None] * stride + chosen, mask=taken, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.where(taken, tl.sigmoid(scores), 0.0)
    else:
        scores = tl.where(taken, tl.exp(scores - top[:, None]), 0.0)
        if not RENORMALIZE:
            powers = tl.exp(values - top[:, None, None])
            scores /= tl.sum(tl.sum(powers, 2), 1)[:, None]
    if RENORMALIZE:
        scores /= tl.sum(scores, 1)[:, None] + 1e-20
    taken = taken & (number < tokens)[:, None]
    places_out = row[:, None] * TOP_K + slots[None, :]
    tl.store(ids_out + places_out, chosen.to(tl.int64), mask=taken)
    tl.store(weights_out + places_out, scores * scale, mask=taken)

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Fused kernels between the projections and the attention: head norm, rotary embedding, KV-cache
store.

Cosines and sines come from the table of `frame.models.layers.rotary.Rotary`, indexed by a token's
position. Everything is computed in float32 and rounded once. References:
`frame.models.layers.attention` and `mla`. Depends on no layer and no batch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.core.interfaces.row_operations import KVCacheTarget, QKVLayout
from frame.kernels import INTERPRETED
from frame.kernels.launch import (
    PreparedLaunch,
    ceil_div,
    choose_rows_per_program,
    choose_warps,
    launch_dependents,
    next_power_of_2,
    wait_for_previous,
)

_ELEMENTS = 2048  # elements per program of `rotate_`
_HEADS = 8  # heads per program
_FEW_TOKENS = 64
_TOKENS = 16  # tokens of one program of `rotate_`, at most
FP8_MAX = tl.constexpr(448.0)
INT8_MAX = tl.constexpr(127.0)
SMALLEST, LARGEST = tl.constexpr(2.0**-24), tl.constexpr(65504.0)  # positive numbers of float16
ROUND = tl.constexpr(1.5 * 2**23)  # x + ROUND - ROUND rounds a small float32 to the nearest integer


def norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    heads: QKVLayout,
    norm: tuple[torch.Tensor, float] | None,
    cache: KVCacheTarget | None,
) -> torch.Tensor:
    """qkv [tokens, (num_heads + 2 * num_kv_heads) * dim], or 2 * num_heads with gates -> rotated
    queries, contiguous [tokens, num_heads, dim].

    The keys are normed and rotated in place. `positions` int64 [tokens]; `table` [positions, 2, 1,
    rotated]; `norm`: RMSNorm weights [2, dim] (queries, keys) and epsilon; `cache`: where to store
    keys and values.
    """
    tokens, stride = qkv.shape[0], qkv.stride(0)
    q = qkv.new_empty((tokens, heads.num_heads, heads.dim))
    weights, eps = norm if norm is not None else (table, 0.0)
    slots, k_cache, v_cache, k_scale, v_scale, *scales = cache if cache is not None else KVCacheTarget(positions, q, q)
    k_scales, v_scales = (slots if tensor is None else tensor for tensor in scales)
    types = qkv.dtype, table.dtype, weights.dtype, k_cache.dtype, k_scales.dtype
    tile = _tile(tokens)
    launch, across = _prepared_heads(heads, tile, norm is not None, cache is not None, types, stride, qkv.device)
    tensors = qkv, positions, table, weights, slots, k_cache, v_cache, k_scales, v_scales, q
    launch((ceil_div(tokens, tile[0]), across, 1), tensors, (tokens, stride, eps, 1.0 / k_scale, 1.0 / v_scale))
    return q


def _tile(tokens: int) -> tuple[int, int]:
    """(tokens, heads) per program. A small batch uses more programs, for latency."""
    if INTERPRETED:
        return choose_rows_per_program(tokens, 1), _HEADS
    if tokens <= _FEW_TOKENS:
        return 1, _HEADS // 2
    return (1, _HEADS) if tokens <= 4 * _FEW_TOKENS else (2, _HEADS)


@lru_cache(maxsize=256)
def _prepared_heads(
    heads: QKVLayout, tile: tuple[int, int], norm: bool, store: bool, types: tuple[torch.dtype, ...], stride: int, device: torch.device
) -> tuple[PreparedLaunch, int]:
    """The launch, and the number of programs per token."""
    together = min(tile[1], next_power_of_2(max(heads.num_heads, heads.num_kv_heads)))
    constants = {
        "NUM_HEADS": heads.num_heads, "NUM_KV_HEADS": heads.num_kv_heads, "DIM": heads.dim, "ROTATED": heads.rotated,
        "INTERLEAVED": heads.interleaved, "BLOCK_HALF": next_power_of_2(heads.rotated // 2),
        "BLOCK_TAIL": next_power_of_2(max(heads.dim - heads.rotated, 1)), "HEADS": together, "TOKENS": tile[0],
        "NORM": norm, "STORE": store, "QUERY_STEP": 2 if heads.gated else 1,
    }  # fmt: skip
    dtype, table, weights, cache, scales = types
    example = dtype, torch.int64, table, weights, torch.int64, cache, cache, scales, scales, dtype, 0, stride, 0.0, 1.0, 1.0
    q_blocks, kv_blocks = ceil_div(heads.num_heads, together), ceil_div(heads.num_kv_heads, together)
    launch = PreparedLaunch(
        _norm_rope_store, example, constants, device, choose_warps(together * next_power_of_2(heads.dim) * tile[0], loads=2)
    )
    return launch, q_blocks + kv_blocks * (2 if store else 1)


def rotate_(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool) -> None:
    """Rotate x [tokens, heads, rotated] in place. The last dimension is contiguous, the others may
    be strided."""
    shape, strides = x.shape, (x.stride(0), x.stride(1))
    tokens, heads = shape[0], shape[1]
    few = choose_rows_per_program(tokens, _TOKENS)
    launch, block, across = _prepared_rotation(heads, shape[2], interleaved, few, (x.dtype, table.dtype), strides, x.device)
    launch((ceil_div(tokens, block), across, 1), (x, positions, table), (tokens, *strides))


@lru_cache(maxsize=256)
def _prepared_rotation(
    heads: int, rotated: int, interleaved: bool, maximum: int, types: tuple[torch.dtype, torch.dtype], strides: tuple[int, int],
    device: torch.device,
) -> tuple[PreparedLaunch, int, int]:  # fmt: skip
    """The launch, the tokens per program, and the programs that share a token's heads."""
    half, together = next_power_of_2(rotated // 2), min(2 * _HEADS, next_power_of_2(heads))
    elements = together * half * 2
    block = maximum if INTERPRETED else max(1, min(maximum, _ELEMENTS // elements))
    constants = {
        "HEADS": heads, "ROTATED": rotated, "INTERLEAVED": interleaved, "BLOCK_HALF": half, "BLOCK_HEADS": together, "TOKENS": block
    }  # fmt: skip
    dtype, table = types
    launch = PreparedLaunch(_rotate, (dtype, torch.int64, table, 0, *strides), constants, device, choose_warps(elements * block))
    return launch, block, ceil_div(heads, together)


def latent_norm_rope_store(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    norms: tuple[torch.Tensor | None, torch.Tensor, float],
    cache: tuple[torch.Tensor, torch.Tensor, float] | None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """x [tokens, q_rank + rank + rope]: norm the latent and rotate the shared key in place, which
    gives the token's row of the latent cache.

    `norms`: RMSNorm weights of the query input [q_rank] (None without a query projection) and of
    the latent [rank], and epsilon. `cache`: also store the row there: (slots int64 [tokens],
    contiguous [pages, page_size, rank + rope], scale; see `KVCacheTarget`). `scales`: those of
    an int8 cache, float16 [pages, page_size]. Returns the normed query input, contiguous [tokens,
    q_rank].
    """
    q_weight, weight, eps = norms
    tokens, rank, rope = x.shape[0], weight.shape[0], table.shape[-1]
    q_rank = 0 if q_weight is None else q_weight.shape[0]
    q = None if q_weight is None else x.new_empty((tokens, q_rank))
    slots, rows, scale = cache if cache is not None else (positions, x, 1.0)
    scales = slots if scales is None else scales
    types = x.dtype, table.dtype, weight.dtype, rows.dtype, scales.dtype
    launch = _prepared_latent((q_rank, rank, rope), interleaved, cache is not None, types, x.stride(0), x.device)
    tensors = x, positions, table, weight, weight if q_weight is None else q_weight, slots, rows, scales, x if q is None else q
    launch((tokens, 1 if q is None else 2, 1), tensors, (x.stride(0), eps, 1.0 / scale))
    return q


@lru_cache(maxsize=256)
def _prepared_latent(
    sizes: tuple[int, int, int], interleaved: bool, store: bool, types: tuple[torch.dtype, ...], stride: int, device: torch.device
) -> PreparedLaunch:
    q_rank, rank, rope = sizes
    constants = {
        "Q_RANK": q_rank, "RANK": rank, "ROPE": rope, "INTERLEAVED": interleaved, "STORE": store,
        "BLOCK_Q": next_power_of_2(max(q_rank, 1)), "BLOCK": next_power_of_2(rank), "BLOCK_HALF": next_power_of_2(rope // 2),
    }  # fmt: skip
    dtype, table, weight, cache, scales = types
    example = dtype, torch.int64, table, weight, weight, torch.int64, cache, scales, dtype, stride, 0.0, 1.0
    return PreparedLaunch(_latent_norm_rope_store, example, constants, device, choose_warps(max(next_power_of_2(rank), q_rank), loads=2))


@triton.jit
def load_pairs(rows, valid, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and second entry of each rotation pair, float32 [n, BLOCK] each, of the heads that
    start at `rows` [n, 1]."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(rows + columns, mask=valid & (columns < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        inside = valid & (columns < HALF)
        first = tl.load(rows + columns, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(rows + HALF + columns, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_pairs(rows, first, second, inverse, valid, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store the pairs in the layout of `load_pairs`."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * BLOCK))
        tl.store(rows + columns, cast_scaled(both, inverse, rows.dtype.element_ty), mask=valid & (columns < 2 * HALF))
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        inside = valid & (columns < HALF)
        tl.store(rows + columns, cast_scaled(first, inverse, rows.dtype.element_ty), mask=inside)
        tl.store(rows + HALF + columns, cast_scaled(second, inverse, rows.dtype.element_ty), mask=inside)


@triton.jit
def rotate_pairs(first, second, table, position, valid, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(a * cos - b * sin, b * cos + a * sin) with the angles of the positions [n, 1].

    A table row holds every cosine twice, then every sine with both signs, as `Rotary` lays it out.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    inside = valid & (columns < HALF)
    angles = table + position * (4 * HALF)
    if INTERLEAVED:
        cos = tl.load(angles + 2 * columns, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(angles + 2 * HALF + 2 * columns + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        cos = tl.load(angles + columns, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(angles + 3 * HALF + columns, mask=inside, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def cast_scaled(x, inverse, dtype: tl.constexpr):
    """float32 -> `dtype`. Only float8_e4m3 and int8 are scaled; values out of their range
    saturate."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x * inverse, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    elif dtype == tl.int8:
        x = tl.clamp(x * inverse, -INT8_MAX, INT8_MAX) + ROUND - ROUND
    return x.to(dtype)


@triton.jit
def store_scales(pointers, largest, valid):
    """Store the int8 scales of rows, by their largest magnitudes. Returns the inverse scales."""
    scales = tl.clamp(largest / INT8_MAX, SMALLEST, LARGEST).to(tl.float16)
    tl.store(pointers, scales, mask=valid)
    return 1.0 / scales.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _norm_rope_store(
    qkv, positions, table, weights, slots, k_cache, v_cache,
    k_scales,  # of an int8 cache
    v_scales, q_out, tokens, stride, eps,
    k_inverse,  # 1 / k_scale
    v_inverse,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_TAIL: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr,
    STORE: tl.constexpr,
    QUERY_STEP: tl.constexpr,  # heads from one query to the next
    PDL: tl.constexpr,
):  # fmt: skip
    """One program takes TOKENS tokens by HEADS heads, all of them queries, keys or values. Grid:
    (blocks of tokens, blocks of query heads, then of key heads, then of value heads)."""
    launch_dependents(PDL)
    HALF: tl.constexpr = ROTATED // 2
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    block = tl.program_id(1)
    is_query = block < Q_BLOCKS
    is_value = block >= Q_BLOCKS + KV_BLOCKS
    block -= tl.where(is_query, 0, tl.where(is_value, Q_BLOCKS + KV_BLOCKS, Q_BLOCKS))
    begins = tl.where(is_query, 0, QUERY_STEP * NUM_HEADS + tl.where(is_value, NUM_KV_HEADS, 0))
    places = tl.arange(0, TOKENS * HEADS)[:, None]
    token = tl.program_id(0) * TOKENS + places // HEADS
    head = block * HEADS + places % HEADS
    valid = (token < tokens) & (head < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS))
    rows = qkv + token.to(tl.int64) * stride + (begins + head * tl.where(is_query, QUERY_STEP, 1)) * DIM
    tails = tl.arange(0, BLOCK_TAIL)[None, :]
    in_tail = valid & (tails < DIM - ROTATED)
    if NORM:
        one = tl.zeros((1, 1), tl.int32)
        scales = weights + tl.where(is_query, 0, DIM) + one
        first_scale, second_scale = load_pairs(scales, one == 0, HALF, BLOCK_HALF, INTERLEAVED)
    wait_for_previous(PDL)
    if STORE:
        slot = tl.load(slots + token, mask=valid, other=0)
        cached = slot * (NUM_KV_HEADS * DIM) + head * DIM
        scaled = slot * NUM_KV_HEADS + head
    if is_value:
        if STORE:
            columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
            value = tl.load(rows + columns, mask=valid & (columns < ROTATED), other=0.0).to(tl.float32)
            if DIM > ROTATED:
                tail = tl.load(rows + ROTATED + tails, mask=in_tail, other=0.0).to(tl.float32)
            v_factor = v_inverse
            if v_cache.dtype.element_ty == tl.int8:
                largest = tl.max(tl.abs(value), 1, keep_dims=True)
                if DIM > ROTATED:
                    largest = tl.maximum(largest, tl.max(tl.abs(tail), 1, keep_dims=True))
                v_factor = store_scales(v_scales + scaled, largest, valid)
            tl.store(v_cache + cached + columns, cast_scaled(value, v_factor, v_cache.dtype.element_ty), mask=valid & (columns < ROTATED))
            if DIM > ROTATED:
                tl.store(v_cache + cached + ROTATED + tails, cast_scaled(tail, v_factor, v_cache.dtype.element_ty), mask=in_tail)
    else:
        position = tl.load(positions + token, mask=valid, other=0)
        first, second = load_pairs(rows, valid, HALF, BLOCK_HALF, INTERLEAVED)
        if DIM > ROTATED:
            tail = tl.load(rows + ROTATED + tails, mask=in_tail, other=0.0).to(tl.float32)
        if NORM:
            total = tl.sum(first * first + second * second, 1, keep_dims=True)
            if DIM > ROTATED:
                total += tl.sum(tail * tail, 1, keep_dims=True)
            inverse = tl.rsqrt(total / DIM + eps)
            first *= inverse * first_scale
            second *= inverse * second_scale
            if DIM > ROTATED:
                tail *= inverse * tl.load(scales + ROTATED + tails, mask=tails < DIM - ROTATED, other=0.0).to(tl.float32)
        first, second = rotate_pairs(first, second, table, position, valid, HALF, BLOCK_HALF, INTERLEAVED)
        if is_query:
            out = q_out + (token.to(tl.int64) * NUM_HEADS + head) * DIM
            store_pairs(out, first, second, 1.0, valid, HALF, BLOCK_HALF, INTERLEAVED)
            if DIM > ROTATED:
                tl.store(out + ROTATED + tails, tail.to(q_out.dtype.element_ty), mask=in_tail)
        else:
            store_pairs(rows, first, second, 1.0, valid, HALF, BLOCK_HALF, INTERLEAVED)
            if DIM > ROTATED:
                tl.store(rows + ROTATED + tails, tail.to(qkv.dtype.element_ty), mask=in_tail)
            if STORE:
                k_factor = k_inverse
                if k_cache.dtype.element_ty == tl.int8:
                    largest = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 1, keep_dims=True)
                    if DIM > ROTATED:
                        largest = tl.maximum(largest, tl.max(tl.abs(tail), 1, keep_dims=True))
                    k_factor = store_scales(k_scales + scaled, largest, valid)
                store_pairs(k_cache + cached, first, second, k_factor, valid, HALF, BLOCK_HALF, INTERLEAVED)
                if DIM > ROTATED:
                    tl.store(k_cache + cached + ROTATED + tails, cast_scaled(tail, k_factor, k_cache.dtype.element_ty), mask=in_tail)


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    x, positions, table, tokens, token_stride, head_stride,
    HEADS: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of TOKENS tokens, blocks of BLOCK_HEADS heads)."""
    launch_dependents(PDL)
    places = tl.arange(0, TOKENS * BLOCK_HEADS)[:, None]
    token = tl.program_id(0) * TOKENS + places // BLOCK_HEADS
    head = tl.program_id(1) * BLOCK_HEADS + places % BLOCK_HEADS
    valid = (token < tokens) & (head < HEADS)
    rows = x + token.to(tl.int64) * token_stride + head * head_stride
    wait_for_previous(PDL)
    position = tl.load(positions + token, mask=valid, other=0)
    first, second = load_pairs(rows, valid, ROTATED // 2, BLOCK_HALF, INTERLEAVED)
    first, second = rotate_pairs(first, second, table, position, valid, ROTATED // 2, BLOCK_HALF, INTERLEAVED)
    store_pairs(rows, first, second, 1.0, valid, ROTATED // 2, BLOCK_HALF, INTERLEAVED)


@triton.jit
def _latent_norm_rope_store(
    x, positions, table, weight, q_weight, slots, cache,
    scales,  # of an int8 cache
    q_out, stride, eps,
    inverse,  # 1 / scale of the cache
    Q_RANK: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, STORE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, 2). The first program of a token makes the latent row, the second the query
    input."""
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = x + token * stride
    if tl.program_id(1) == 0:
        columns = tl.arange(0, BLOCK)
        scale = tl.load(weight + columns, mask=columns < RANK, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        latent_row = row + Q_RANK
        latent = tl.load(latent_row + columns, mask=columns < RANK, other=0.0).to(tl.float32)
        position = tl.load(positions + token) + tl.zeros((1, 1), tl.int64)
        valid = position >= 0
        key = latent_row + RANK + tl.zeros((1, 1), tl.int32)
        first, second = load_pairs(key, valid, ROPE // 2, BLOCK_HALF, INTERLEAVED)
        first, second = rotate_pairs(first, second, table, position, valid, ROPE // 2, BLOCK_HALF, INTERLEAVED)
        latent *= tl.rsqrt(tl.sum(latent * latent) / RANK + eps) * scale
        tl.store(latent_row + columns, latent.to(x.dtype.element_ty), mask=columns < RANK)
        store_pairs(key, first, second, 1.0, valid, ROPE // 2, BLOCK_HALF, INTERLEAVED)
        if STORE:
            slot = tl.load(slots + token)
            cached = cache + slot * (RANK + ROPE)
            factor = inverse
            if cache.dtype.element_ty == tl.int8:
                largest = tl.maximum(tl.max(tl.abs(latent)), tl.maximum(tl.max(tl.abs(first)), tl.max(tl.abs(second))))
                factor = store_scales(scales + slot, largest, True)
            tl.store(cached + columns, cast_scaled(latent, factor, cache.dtype.element_ty), mask=columns < RANK)
            store_pairs(cached + RANK + tl.zeros((1, 1), tl.int32), first, second, factor, valid, ROPE // 2, BLOCK_HALF, INTERLEAVED)
    else:
        inputs = tl.arange(0, BLOCK_Q)
        q_scale = tl.load(q_weight + inputs, mask=inputs < Q_RANK, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        values = tl.load(row + inputs, mask=inputs < Q_RANK, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values) / Q_RANK + eps) * q_scale
        tl.store(q_out + token * Q_RANK + inputs, values.to(q_out.dtype.element_ty), mask=inputs < Q_RANK)

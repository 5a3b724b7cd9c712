# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""What attention does between its products, in one kernel each: norm of heads, rotation, and the store in the paged cache.

Cosines and sines come from the table of `frame.models.layers.rotary.Rotary`, at a token's position. Everything is float32 inside and
rounded once. References: `frame.models.layers.attention` and `mla`. Knows no layer and no batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from frame.kernels.launch import begin, blocks_of, options, power_of_2, rows_per_program, wait_for_previous, warps_for

_ELEMENTS = 2048  # of a program over heads
_HEADS = 8  # of a program, of one token
FP8_MAX = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True)
class Heads:
    """How rows of [queries | keys | values] are made of heads. `rotated` of `dim` entries turn, neighbours together if `interleaved`."""

    num_heads: int
    num_kv_heads: int
    dim: int
    rotated: int
    interleaved: bool = False


class HeadsCache(NamedTuple):
    """Where keys and values of a batch go: slots int64 [tokens]; k and v contiguous [pages, page_size, num_kv_heads, dim] of any float
    type. What a float8_e4m3 cache takes is divided by the scale, and saturates."""

    slots: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0


def norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    heads: Heads,
    norm: tuple[torch.Tensor, float] | None,
    cache: HeadsCache | None,
) -> torch.Tensor:
    """qkv [tokens, (num_heads + 2 * num_kv_heads) * dim] -> rotated queries, contiguous [tokens, num_heads, dim].

    The keys are normed and rotated in place. `positions` int64 [tokens]; `table` [positions, 2, 1, rotated]; `norm`: weights
    [2, dim] (of queries, of keys) and epsilon; `cache`: where keys and values go as well.
    """
    tokens = qkv.shape[0]
    q = torch.empty((tokens, heads.num_heads, heads.dim), dtype=qkv.dtype, device=qkv.device)
    half = power_of_2(heads.rotated // 2)
    tail = heads.dim - heads.rotated
    together = min(_HEADS, power_of_2(max(heads.num_heads, heads.num_kv_heads)))
    elements = together * power_of_2(heads.dim)
    block = rows_per_program(tokens, _ELEMENTS // elements)
    q_blocks, kv_blocks = blocks_of(heads.num_heads, together), blocks_of(heads.num_kv_heads, together)
    weights, eps = norm if norm is not None else (table, 0.0)
    slots, k_cache, v_cache, k_scale, v_scale = cache if cache is not None else HeadsCache(positions, q, q)
    _norm_rope_store[(blocks_of(tokens, block), q_blocks + kv_blocks * (1 if cache is None else 2))](
        qkv, positions, table, weights, slots, k_cache, v_cache, q, tokens, qkv.stride(0), eps, 1.0 / k_scale, 1.0 / v_scale,
        NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads, DIM=heads.dim, ROTATED=heads.rotated,
        INTERLEAVED=heads.interleaved, BLOCK_HALF=half, BLOCK_TAIL=power_of_2(max(tail, 1)),
        HEADS=together, TOKENS=block, NORM=norm is not None, STORE=cache is not None,
        **options(qkv.device, warps_for(elements * block, loads=2)),
    )  # fmt: skip
    return q


def rotate_(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, interleaved: bool) -> None:
    """Rotate x [tokens, heads, rotated] in place; its last dimension is contiguous, the others may have gaps."""
    tokens, heads, rotated = x.shape
    half = power_of_2(rotated // 2)
    together = min(2 * _HEADS, power_of_2(heads))
    elements = together * half * 2
    block = rows_per_program(tokens, _ELEMENTS // elements)
    _rotate[(blocks_of(tokens, block), blocks_of(heads, together))](
        x, positions, table, tokens, x.stride(0), x.stride(1), HEADS=heads, ROTATED=rotated, INTERLEAVED=interleaved,
        BLOCK_HALF=half, BLOCK_HEADS=together, TOKENS=block, **options(x.device, warps_for(elements * block)),
    )  # fmt: skip


def latent_norm_rope_store(
    x: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    interleaved: bool,
    norms: tuple[torch.Tensor | None, torch.Tensor, float],
    cache: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> torch.Tensor | None:
    """x [tokens, q_rank + rank + rope]: norm and rotate its last two parts in place, which makes them a row of a latent cache.

    `norms`: weights of the queries' input [q_rank] (None where there is none) and of the latent [rank], and epsilon. `cache`: where
    the row goes as well, (slots int64 [tokens], contiguous [pages, page_size, rank + rope], its scale; see `HeadsCache`). Returns the
    normed input of the queries, contiguous [tokens, q_rank].
    """
    q_weight, weight, eps = norms
    tokens, rank, rope = x.shape[0], weight.shape[0], table.shape[-1]
    q_rank = 0 if q_weight is None else q_weight.shape[0]
    q = None if q_weight is None else torch.empty((tokens, q_rank), dtype=x.dtype, device=x.device)
    slots, rows, scale = cache if cache is not None else (positions, x, 1.0)
    block = power_of_2(rank)
    _latent_norm_rope_store[(tokens, 1 if q is None else 2)](
        x, positions, table, weight, weight if q_weight is None else q_weight, slots, rows, x if q is None else q,
        x.stride(0), eps, 1.0 / scale,
        Q_RANK=q_rank, RANK=rank, ROPE=rope, INTERLEAVED=interleaved, STORE=cache is not None,
        BLOCK_Q=power_of_2(max(q_rank, 1)), BLOCK=block, BLOCK_HALF=power_of_2(rope // 2),
        **options(x.device, warps_for(max(block, q_rank), loads=2)),
    )  # fmt: skip
    return q


@triton.jit
def load_pairs(rows, valid, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two entries of every pair, float32 [n, BLOCK] each, of the heads that begin at `rows` [n, 1]."""
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
    """The inverse of `load_pairs`."""
    if INTERLEAVED:
        columns = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * BLOCK))
        tl.store(rows + columns, narrowed(both, inverse, rows.dtype.element_ty), mask=valid & (columns < 2 * HALF))
    else:
        columns = tl.arange(0, BLOCK)[None, :]
        inside = valid & (columns < HALF)
        tl.store(rows + columns, narrowed(first, inverse, rows.dtype.element_ty), mask=inside)
        tl.store(rows + HALF + columns, narrowed(second, inverse, rows.dtype.element_ty), mask=inside)


@triton.jit
def turned(first, second, table, position, valid, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Pairs rotated by the angles of their positions [n, 1]. The table has every cosine twice, and of a sine both signs."""
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
def narrowed(x, inverse, dtype: tl.constexpr):
    """float32 as a tensor's type. Only float8_e4m3 is scaled, and what it cannot hold is the largest that it can."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x * inverse, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def _norm_rope_store(
    qkv,
    positions,
    table,
    weights,
    slots,
    k_cache,
    v_cache,
    q_out,
    tokens,
    stride,
    eps,
    k_inverse,  # of the scales
    v_inverse,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    STORE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is TOKENS tokens by HEADS heads, all of them queries, keys or values. The queries' blocks come first."""
    begin(PDL)
    HALF: tl.constexpr = ROTATED // 2
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    block = tl.program_id(1)
    is_query = block < Q_BLOCKS
    is_value = block >= Q_BLOCKS + KV_BLOCKS
    block -= tl.where(is_query, 0, tl.where(is_value, Q_BLOCKS + KV_BLOCKS, Q_BLOCKS))
    begins = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    places = tl.arange(0, TOKENS * HEADS)[:, None]
    token = tl.program_id(0) * TOKENS + places // HEADS
    head = block * HEADS + places % HEADS
    valid = (token < tokens) & (head < tl.where(is_query, NUM_HEADS, NUM_KV_HEADS))
    rows = qkv + token.to(tl.int64) * stride + (begins + head) * DIM
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
    if is_value:
        if STORE:
            columns = tl.arange(0, 2 * BLOCK_HALF)[None, :]
            value = tl.load(rows + columns, mask=valid & (columns < ROTATED), other=0.0).to(tl.float32)
            tl.store(v_cache + cached + columns, narrowed(value, v_inverse, v_cache.dtype.element_ty), mask=valid & (columns < ROTATED))
            if DIM > ROTATED:
                value = tl.load(rows + ROTATED + tails, mask=in_tail, other=0.0).to(tl.float32)
                tl.store(v_cache + cached + ROTATED + tails, narrowed(value, v_inverse, v_cache.dtype.element_ty), mask=in_tail)
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
        first, second = turned(first, second, table, position, valid, HALF, BLOCK_HALF, INTERLEAVED)
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
                store_pairs(k_cache + cached, first, second, k_inverse, valid, HALF, BLOCK_HALF, INTERLEAVED)
                if DIM > ROTATED:
                    tl.store(k_cache + cached + ROTATED + tails, narrowed(tail, k_inverse, k_cache.dtype.element_ty), mask=in_tail)


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    x,
    positions,
    table,
    tokens,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    places = tl.arange(0, TOKENS * BLOCK_HEADS)[:, None]
    token = tl.program_id(0) * TOKENS + places // BLOCK_HEADS
    head = tl.program_id(1) * BLOCK_HEADS + places % BLOCK_HEADS
    valid = (token < tokens) & (head < HEADS)
    rows = x + token.to(tl.int64) * token_stride + head * head_stride
    wait_for_previous(PDL)
    position = tl.load(positions + token, mask=valid, other=0)
    first, second = load_pairs(rows, valid, ROTATED // 2, BLOCK_HALF, INTERLEAVED)
    first, second = turned(first, second, table, position, valid, ROTATED // 2, BLOCK_HALF, INTERLEAVED)
    store_pairs(rows, first, second, 1.0, valid, ROTATED // 2, BLOCK_HALF, INTERLEAVED)


@triton.jit
def _latent_norm_rope_store(
    x,
    positions,
    table,
    weight,
    q_weight,
    slots,
    cache,
    q_out,
    stride,
    eps,
    inverse,  # of the cache's scale
    Q_RANK: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token has two programs: the first makes the latent's row, the second the input of the queries."""
    begin(PDL)
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
        first, second = turned(first, second, table, position, valid, ROPE // 2, BLOCK_HALF, INTERLEAVED)
        latent *= tl.rsqrt(tl.sum(latent * latent) / RANK + eps) * scale
        tl.store(latent_row + columns, latent.to(x.dtype.element_ty), mask=columns < RANK)
        store_pairs(key, first, second, 1.0, valid, ROPE // 2, BLOCK_HALF, INTERLEAVED)
        if STORE:
            cached = cache + tl.load(slots + token) * (RANK + ROPE)
            tl.store(cached + columns, narrowed(latent, inverse, cache.dtype.element_ty), mask=columns < RANK)
            store_pairs(cached + RANK + tl.zeros((1, 1), tl.int32), first, second, inverse, valid, ROPE // 2, BLOCK_HALF, INTERLEAVED)
    else:
        inputs = tl.arange(0, BLOCK_Q)
        q_scale = tl.load(q_weight + inputs, mask=inputs < Q_RANK, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        values = tl.load(row + inputs, mask=inputs < Q_RANK, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values) / Q_RANK + eps) * q_scale
        tl.store(q_out + token * Q_RANK + inputs, values.to(q_out.dtype.element_ty), mask=inputs < Q_RANK)

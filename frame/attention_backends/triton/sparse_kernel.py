# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Sparse latent attention (DeepSeek-V3.2): each token attends to the latents of its own list of KV
slots, absorbed. One program computes some heads of one token; where there are few tokens, programs
divide a token's keys (split-KV), and a second kernel merges their results.

Used by the `triton` backend. Must not know how keys are selected.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.attention_backends.triton.merge_kernel import merge_partials
from frame.attention_backends.triton.online_softmax import LOG2E, VALUE_UNIT, cast_queries, widen
from frame.kernels import INTERPRETED
from frame.kernels.launch import ceil_div, next_power_of_2

_HEADS, _WARPS = 16, 4  # of one program
_WIDE_HEADS, _WIDE_WARPS = 64, 8  # where tokens are many: fewer programs read the same keys
_WIDE_MEMORY = 160 << 10  # shared memory that such programs need
_WIDE_PROGRAMS = 128  # programs at least
_KEY_BYTES = 64  # of one column of a step's keys
_SPLIT_KEYS = 128  # that a program reads at least; the merge of shorter pieces costs more than they gain
_FIXED_SPLITS = 4  # of the batch-invariant mode
PROGRAMS = 256  # keys are divided among about so many
STAGES = 3  # slots are loaded two steps ahead, keys one


def attend_sparse(
    q: torch.Tensor, q_rope: torch.Tensor, cached: torch.Tensor, slots: torch.Tensor, scale: float, k_scale: float,
    shared_memory: int = 0, scales: torch.Tensor | None = None, *, is_fixed: bool = False,
) -> torch.Tensor:  # fmt: skip
    """q [tokens, heads, rank] (absorbed), q_rope [tokens, heads, rope], cached [slots of the cache,
    rank + rope], slots int64 [tokens, keys], -1 for no key, but not the first -> [tokens, heads,
    rank]. `k_scale`: factor of the cached numbers. shared_memory: bytes per program that the
    device has. scales: of an int8 cache, float16 [slots of the cache]. is_fixed: the pieces of the
    keys do not depend on the number of tokens."""
    (tokens, heads, rank), rope, keys = q.shape, q_rope.shape[2], slots.shape[1]
    fits = q.element_size() == cached.element_size() == 2 and shared_memory >= _WIDE_MEMORY
    is_wide = fits and tokens * (heads // _WIDE_HEADS) >= _WIDE_PROGRAMS and not is_fixed
    taken, warps = (_WIDE_HEADS, _WIDE_WARPS) if is_wide else (_HEADS, _WARPS)
    blocks, step = ceil_div(heads, taken), _KEY_BYTES // q.element_size()
    splits = max(1, min(_FIXED_SPLITS if is_fixed else PROGRAMS // (tokens * blocks), keys // _SPLIT_KEYS))
    share = ceil_div(keys, splits * step) * step
    out, block_rank = q.new_empty(q.shape), max(16, next_power_of_2(rank))
    partials, weights = out, out
    if splits > 1:
        partials = torch.empty(tokens * splits * heads, rank, device=q.device)
        weights = torch.empty(tokens * splits * heads, device=q.device)
    v_scale = k_scale if scales is None else k_scale / VALUE_UNIT.value
    numbers = (scale * k_scale, v_scale, keys, share, *q.stride()[:2], *q_rope.stride()[:2], *out.stride()[:2], cached.stride(0))
    _sparse_kernel[(tokens, blocks, splits)](
        q, q_rope, cached, slots, slots if scales is None else scales, out, partials, weights, *numbers, slots.stride(0), HEADS=heads,
        RANK=rank, ROPE=rope, BLOCK_HEADS=taken, BLOCK_RANK=block_rank, BLOCK_ROPE=max(16, next_power_of_2(rope)), BLOCK_KEYS=step,
        BLOCK_ALL=next_power_of_2(keys), IS_SPLIT=splits > 1, HAS_SCALES=scales is not None, UPCAST=INTERPRETED, num_warps=warps,
        num_stages=STAGES,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, tokens)](partials, weights, out, splits, HEADS=heads, RANK=rank, BLOCK_RANK=block_rank)
    return out


@triton.jit
def _load_columns(base, rows, first, valid, SIZE: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, BLOCK]: SIZE columns from `first` on, of rows at these offsets."""
    columns = tl.arange(0, BLOCK)
    loaded = tl.load(base + rows[:, None] + first + columns[None, :], mask=valid[:, None] & (columns < SIZE)[None, :], other=0.0)
    return loaded.to(tl.float32) if UPCAST else loaded


@triton.jit(do_not_specialize=["scale", "v_scale", "num_keys", "share"])
def _sparse_kernel(
    q, q_rope, cached, slots,
    scales,  # float16 [slots of the cache] of an int8 cache
    out,
    partials,  # float32 [tokens * splits * HEADS, RANK]: results of the pieces of the keys
    weights,  # float32 [tokens * splits * HEADS]: log2 of their sums of weights, -inf without a key
    scale, v_scale, num_keys,
    share,  # keys of a program
    q_token, q_head, rope_token, rope_head, out_token, out_head, cached_row, slots_row,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_ALL: tl.constexpr, IS_SPLIT: tl.constexpr,
    HAS_SCALES: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of heads, pieces of the keys)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    begin = tl.program_id(2) * share
    inside = heads < HEADS
    queries = _load_columns(q + token * q_token, heads * q_head, 0, inside, RANK, BLOCK_RANK, UPCAST)
    queries = cast_queries(queries, cached, UPCAST)
    turned = _load_columns(q_rope + token * rope_token, heads * rope_head, 0, inside, ROPE, BLOCK_ROPE, UPCAST)
    turned = cast_queries(turned, cached, UPCAST)
    top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_RANK], tl.float32)
    listed_at = begin + tl.arange(0, BLOCK_ALL)
    listed = tl.load(slots + token * slots_row + listed_at, mask=listed_at < tl.minimum(begin + share, num_keys), other=-1)
    for first in range(begin, tl.max(tl.where(listed >= 0, listed_at + 1, 0), 0), BLOCK_KEYS):
        places = first + tl.arange(0, BLOCK_KEYS)
        slot = tl.load(slots + token * slots_row + places, mask=places < num_keys, other=-1)
        valid = slot >= 0
        latents = _load_columns(cached, slot * cached_row, 0, valid, RANK, BLOCK_RANK, UPCAST)
        latents = widen(latents, queries.dtype, UPCAST)
        keys = widen(_load_columns(cached, slot * cached_row, RANK, valid, ROPE, BLOCK_ROPE, UPCAST), queries.dtype, UPCAST)
        scores = tl.dot(queries, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee") * (scale * LOG2E)
        if HAS_SCALES:
            units = tl.load(scales + slot, mask=valid, other=0.0).to(tl.float32)
            scores *= units[None, :]
        scores = tl.where(valid[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)  # no key so far
        factors = tl.exp2(scores - base[:, None])
        shrunk = tl.exp2(top - base)
        total = total * shrunk + tl.sum(factors, 1)
        if HAS_SCALES:
            factors *= units[None, :] * VALUE_UNIT
        acc = tl.dot(factors.to(latents.dtype), latents, acc * shrunk[:, None], input_precision="ieee")
        top = highest
    columns = tl.arange(0, BLOCK_RANK)
    result = acc * (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    mask = inside[:, None] & (columns < RANK)[None, :]
    if IS_SPLIT:
        lines = (token * tl.num_programs(2) + tl.program_id(2)) * HEADS + heads
        tl.store(partials + lines[:, None] * RANK + columns[None, :], result, mask=mask)
        tl.store(weights + lines, top + tl.log2(total), mask=inside)
    else:
        targets = out + token * out_token + (heads * out_head)[:, None] + columns[None, :]
        tl.store(targets, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partials,
    weights,
    out,
    splits,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Grid: (heads, tokens)."""
    none = tl.zeros([1], tl.int32)
    token, head = none + tl.program_id(1), none + tl.program_id(0)
    merge_partials(
        partials, weights, out, token * splits, none + splits, none, none, none, 0, token, head, none == 0,
        HEADS, RANK, BLOCK_RANK, 0, HEADS * RANK, RANK, 1,
    )  # fmt: skip

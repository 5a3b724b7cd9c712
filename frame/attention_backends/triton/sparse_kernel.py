# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Sparse latent attention (DeepSeek-V3.2): each token attends to the latents of its own list of KV
slots, absorbed. One program computes some heads of one token.

Used by the `triton` backend. Must not know how keys are selected.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED
from frame.kernels.launch import ceil_div, next_power_of_2

_HEADS = 16  # of one program
_KEY_BYTES = 64  # of one column of a step's keys
_WARPS = 4


def attend_sparse(
    q: torch.Tensor, q_rope: torch.Tensor, cached: torch.Tensor, slots: torch.Tensor, scale: float, k_scale: float
) -> torch.Tensor:
    """q [tokens, heads, rank] (absorbed), q_rope [tokens, heads, rope], cached [slots of the cache,
    rank + rope], slots int64 [tokens, keys], -1 for no key, but not the first -> [tokens, heads,
    rank]. `k_scale`: factor of the cached numbers."""
    (tokens, heads, rank), rope = q.shape, q_rope.shape[2]
    out = torch.empty_like(q)
    _sparse_kernel[(tokens, ceil_div(heads, _HEADS))](
        q, q_rope, cached, slots, out, scale * k_scale, k_scale, slots.shape[1], *q.stride()[:2], *q_rope.stride()[:2], *out.stride()[:2],
        cached.stride(0), slots.stride(0), HEADS=heads, RANK=rank, ROPE=rope, BLOCK_HEADS=_HEADS, BLOCK_RANK=max(16, next_power_of_2(rank)),
        BLOCK_ROPE=max(16, next_power_of_2(rope)),
        BLOCK_KEYS=_KEY_BYTES // q.element_size(), UPCAST=INTERPRETED, num_warps=_WARPS, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit
def _load_columns(base, rows, first, valid, SIZE: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """[rows, BLOCK]: SIZE columns from `first` on, of rows at these offsets."""
    columns = tl.arange(0, BLOCK)
    found = tl.load(base + rows[:, None] + first + columns[None, :], mask=valid[:, None] & (columns < SIZE)[None, :], other=0.0)
    return found.to(tl.float32) if UPCAST else found


@triton.jit(do_not_specialize=["scale", "k_scale", "num_keys"])
def _sparse_kernel(
    q,
    q_rope,
    cached,
    slots,
    out,
    scale,
    k_scale,
    num_keys,
    q_token,
    q_head,
    rope_token,
    rope_head,
    out_token,
    out_head,
    cached_row,
    slots_row,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: (tokens, blocks of heads)."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    inside = heads < HEADS
    queries = _load_columns(q + token * q_token, heads * q_head, 0, inside, RANK, BLOCK_RANK, UPCAST)
    turned = _load_columns(q_rope + token * rope_token, heads * rope_head, 0, inside, ROPE, BLOCK_ROPE, UPCAST)
    top = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    acc = tl.zeros([BLOCK_HEADS, BLOCK_RANK], tl.float32)
    for first in range(0, num_keys, BLOCK_KEYS):
        places = first + tl.arange(0, BLOCK_KEYS)
        slot = tl.load(slots + token * slots_row + places, mask=places < num_keys, other=-1)
        valid = slot >= 0
        latents = _load_columns(cached, slot * cached_row, 0, valid, RANK, BLOCK_RANK, UPCAST).to(queries.dtype)
        keys = _load_columns(cached, slot * cached_row, RANK, valid, ROPE, BLOCK_ROPE, UPCAST).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - highest[:, None])
        shrunk = tl.exp(top - highest)
        total = total * shrunk + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * shrunk[:, None], input_precision="ieee")
        top = highest
    columns = tl.arange(0, BLOCK_RANK)
    result = (acc * (k_scale / total)[:, None]).to(out.dtype.element_ty)
    targets = out + token * out_token + (heads * out_head)[:, None] + columns[None, :]
    tl.store(targets, result, mask=inside[:, None] & (columns < RANK)[None, :])

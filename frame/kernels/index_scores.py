# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The indexer of sparse attention (DeepSeek-V3.2) as two kernels: scores of all keys of a token,
and the selection of the best. Grids and buffers depend on a bound of the lengths alone, so that a
CUDA graph can capture them; a program reads as many keys as its token sees.

Reference: `frame.models.deepseek_v32.select_keys`. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels.launch import ceil_div, next_power_of_2

_KEYS = 64  # that a scoring program reads at a time
_PROGRAMS = 1024  # scoring programs, about
_WARPS = 4
_SELECT_KEYS, _SELECT_WARPS = 8192, 32  # of the selection, likewise
_BITS = 11  # of a score that the selection counts at a time
BINS = 1 << _BITS


def select_keys(
    q: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, table: torch.Tensor, owners: torch.Tensor,
    positions: torch.Tensor, width: int, top_k: int,
) -> torch.Tensor:  # fmt: skip
    """As the reference; the slots of a token are in the order of their positions."""
    scores, counts = score_keys(q, weights, cached, table, owners, positions, width, top_k)
    return select_best(scores, counts, table, owners, positions, cached.shape[1], top_k)


def score_keys(
    q: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, table: torch.Tensor, owners: torch.Tensor,
    positions: torch.Tensor, width: int, top_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Arguments as of `select_keys` -> (scores, float32 [tokens, width], written up to each token's
    position; the number of keys by the first bits of their score, int32 [tokens, BINS]). Tokens
    that see at most `top_k` keys have neither."""
    (tokens, heads, size), page = q.shape, cached.shape[1]
    scores = torch.empty((tokens, width), dtype=torch.float32, device=q.device)
    counts = torch.zeros((tokens, BINS), dtype=torch.int32, device=q.device)
    _score_kernel[(tokens, max(1, min(ceil_div(width, _KEYS), _PROGRAMS // tokens)))](
        q.contiguous(), weights.contiguous(), cached, table, owners, positions, scores, counts, table.stride(0), width,
        TOP_K=top_k, PAGE=page, HEADS=heads, SIZE=size, BLOCK_HEADS=max(16, next_power_of_2(heads)),
        BLOCK_SIZE=max(16, next_power_of_2(size)), BLOCK_KEYS=_KEYS, BITS=_BITS, UPCAST=kernels.INTERPRETED, num_warps=_WARPS,
    )  # fmt: skip
    return scores, counts


def select_best(
    scores: torch.Tensor, counts: torch.Tensor, table: torch.Tensor, owners: torch.Tensor, positions: torch.Tensor, page: int, top_k: int
) -> torch.Tensor:
    """Results of `score_keys` -> KV slots, int64 [tokens, top_k]. Overwrites `counts`."""
    tokens, width = scores.shape
    slots = torch.empty((tokens, top_k), dtype=torch.int64, device=scores.device)
    _select_kernel[(tokens,)](
        scores, counts, table, owners, positions, slots, table.stride(0), width,
        TOP_K=top_k, PAGE=page, BLOCK=_SELECT_KEYS, BITS=_BITS, num_warps=_SELECT_WARPS,
    )  # fmt: skip
    return slots


@triton.jit
def _order(scores):
    """uint32 in the order of float32 numbers."""
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["table_stride", "width"])
def _score_kernel(
    q,  # [tokens, HEADS, SIZE]
    weights,  # [tokens, HEADS]
    cached,  # [pages, PAGE, SIZE]
    table, owners, positions,
    scores,  # float32 [tokens, width]
    counts,  # int32 [tokens, 1 << BITS]
    table_stride, width,
    TOP_K: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr, BITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, programs that share a token's keys)."""
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(positions + token).to(tl.int32) + 1
    if seen > TOP_K:
        pages = table + tl.load(owners + token) * table_stride
        heads = tl.arange(0, BLOCK_HEADS)
        columns = tl.arange(0, BLOCK_SIZE)
        inside = (heads < HEADS)[:, None] & (columns < SIZE)[None, :]
        queries = tl.load(q + token * (HEADS * SIZE) + heads[:, None] * SIZE + columns[None, :], mask=inside, other=0.0)
        queries = queries.to(tl.float32) if UPCAST else queries
        factors = tl.load(weights + token * HEADS + heads, mask=heads < HEADS, other=0.0).to(tl.float32)
        for first in range(tl.program_id(1) * BLOCK_KEYS, seen, tl.num_programs(1) * BLOCK_KEYS):
            at = first + tl.arange(0, BLOCK_KEYS)
            visible = at < seen
            page = tl.load(pages + at // PAGE, mask=visible, other=0).to(tl.int64)
            rows = cached + (page * PAGE + at % PAGE)[:, None] * SIZE + columns[None, :]
            keys = tl.load(rows, mask=visible[:, None] & (columns < SIZE)[None, :], other=0.0)
            keys = keys.to(tl.float32) if UPCAST else keys
            dots = tl.dot(queries, tl.trans(keys), input_precision="ieee")
            sums = tl.sum(tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * factors[:, None], 0)
            tl.store(scores + token * width + at, sums, mask=visible)
            digits = (_order(sums) >> (32 - BITS)).to(tl.int32)
            tl.atomic_add(counts + token * (1 << BITS) + digits, 1, mask=visible, sem="relaxed")


@triton.jit(do_not_specialize=["table_stride", "width"])
def _select_kernel(
    scores,  # float32 [tokens, width]
    counts,  # int32 [tokens, 1 << BITS]: keys by the first bits of their score
    table, owners, positions,
    slots,  # int64 [tokens, TOP_K]
    table_stride, width,
    TOP_K: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens). Finds the TOP_K-th best score, BITS bits at a time; of keys with this score,
    the first ones are selected."""
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(positions + token).to(tl.int32) + 1
    pages = table + tl.load(owners + token) * table_stride
    target = slots + token * TOP_K
    if seen <= TOP_K:
        for first in range(0, TOP_K, BLOCK):
            at = first + tl.arange(0, BLOCK)
            page = tl.load(pages + at // PAGE, mask=at < seen, other=0).to(tl.int64)
            tl.store(target + at, tl.where(at < seen, page * PAGE + at % PAGE, -1), mask=at < TOP_K)
    else:
        line = scores + token * width
        bins = tl.arange(0, 1 << BITS)
        counted = counts + token * (1 << BITS) + bins
        best = tl.zeros([1], tl.uint32)  # the bits found so far of the TOP_K-th best score
        left = tl.zeros([1], tl.int32) + TOP_K  # keys to select among those that have these bits
        for level in tl.static_range(3):
            above = 32 - BITS * level
            shift = 32 - BITS * (level + 1) if level < 2 else 0
            if level > 0:
                tl.debug_barrier()
                tl.store(counted, tl.zeros([1 << BITS], tl.int32))
                tl.debug_barrier()
                for first in range(0, seen, BLOCK):
                    at = first + tl.arange(0, BLOCK)
                    order = _order(tl.load(line + at, mask=at < seen, other=0.0))
                    digits = ((order >> shift) & ((1 << (above - shift)) - 1)).to(tl.int32)
                    is_counted = (at < seen) & ((order >> above) == best)
                    tl.atomic_add(counts + token * (1 << BITS) + digits, 1, mask=is_counted, sem="relaxed")
                tl.debug_barrier()
            # other threads wrote them, so the first-level cache is bypassed
            sums = tl.load(counted, cache_modifier=".cg")
            from_here = tl.sum(sums, 0) - tl.cumsum(sums, 0) + sums  # keys in this bin and higher ones
            digit = tl.sum((from_here >= left).to(tl.int32), 0) - 1
            left -= tl.sum(tl.where(bins > digit, sums, 0), 0)
            best = (best << (above - shift)) | digit.to(tl.uint32)
        taken = tl.zeros([1], tl.int32)  # keys so far that are better, and those that are equal
        ties = tl.zeros([1], tl.int32)
        for first in range(0, seen, BLOCK):
            at = first + tl.arange(0, BLOCK)
            order = _order(tl.load(line + at, mask=at < seen, other=0.0))
            better, equal = (at < seen) & (order > best), (at < seen) & (order == best)
            both = tl.cumsum((better.to(tl.int32) << 16) | equal.to(tl.int32), 0)  # one scan for two counts of at most BLOCK
            rank = ties + (both & 0xFFFF)
            is_selected = better | (equal & (rank <= left))
            page = tl.load(pages + at // PAGE, mask=is_selected, other=0).to(tl.int64)
            places = taken + (both >> 16) + tl.minimum(rank, left) - 1
            tl.store(target + places, page * PAGE + at % PAGE, mask=is_selected)
            taken += tl.sum(better.to(tl.int32), 0)
            ties += tl.sum(equal.to(tl.int32), 0)

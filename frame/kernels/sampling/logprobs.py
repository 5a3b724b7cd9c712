# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Log-probabilities of tokens and of the most likely ones, without a float32 copy of the logits and
without sorting.

The block statistics give the normaliser and bound where the top columns can be; only those
candidates are ranked. Depends on no request.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from frame.kernels.launch import launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.sampling.filtering import Filters, find_candidates, from_sortable, sum_block_weights, to_sortable
from frame.kernels.sampling.sampling import NO_COLUMN, compute_block_stats, load_inverse_temperature, load_logits

TILE = 4096  # columns per step where a whole row is ranked
MINIMUM = tl.constexpr(-(2**31))
_WARPS = 4


@triton.jit
def find_next(orders, columns, order, column):
    """(order, column) of the greatest value after the given one; among equals, the first column."""
    behind = (orders < order) | ((orders == order) & (columns > column))
    highest = tl.max(tl.where(behind, orders, MINIMUM), 0)
    return highest, tl.min(tl.where(behind & (orders == highest), columns, NO_COLUMN), 0)


@triton.jit(do_not_specialize=["num_top"])
def rank_kernel(
    logits,  # [rows, vocab]
    stride,
    temperature,  # float32 [rows], all ln 2 (temperature 1)
    token_ids,  # int64 [rows]
    best, block_max, block_weight, bounds, counts, values_in, columns_in,
    logprobs,  # float32 [rows]
    top_ids,  # int64 [rows, num_top]
    top_logprobs,  # float32 [rows, num_top]
    vocab, num_blocks, num_top,
    BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr, TILE: tl.constexpr,
    RANKED: tl.constexpr,  # num_top > 0
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    top = tl.load(best + row)
    whole = sum_block_weights(block_max, block_weight, row, num_blocks, top, load_inverse_temperature(temperature, row), BLOCKS)
    normaliser = top + tl.log(whole).to(tl.float32)
    token = tl.load(token_ids + row)
    chosen = tl.load(logits + row.to(tl.int64) * stride + token).to(tl.float32)
    tl.store(logprobs + row, chosen - normaliser)
    if RANKED:
        order, column = 2147483647, -1
        count = tl.load(counts + row)
        is_gathered = (tl.load(bounds + row) < float("inf")) & (count <= CANDIDATES) & (count >= num_top)
        places = tl.arange(0, CANDIDATES)
        there = places < tl.where(is_gathered, count, 0)
        orders = tl.where(there, to_sortable(tl.load(values_in + row * CANDIDATES + places), 0), MINIMUM)
        columns = tl.where(there, tl.load(columns_in + row * CANDIDATES + places), NO_COLUMN)
        for rank in range(num_top):
            if is_gathered:
                order, column = find_next(orders, columns, order, column)
            else:
                highest, first = MINIMUM + 0 * rank, NO_COLUMN + 0 * rank
                for start in range(0, vocab, TILE):
                    inside = start + tl.arange(0, TILE)
                    ranked = to_sortable(load_logits(logits, row, stride, inside, vocab), 0)
                    ranked = tl.where(inside < vocab, ranked, MINIMUM)
                    candidate, place = find_next(ranked, inside, order, column)
                    first = tl.where(candidate > highest, place, first)
                    highest = tl.maximum(candidate, highest)
                order, column = highest, first
            tl.store(top_ids + row * num_top + rank, tl.minimum(column, vocab - 1).to(tl.int64))
            tl.store(top_logprobs + row * num_top + rank, from_sortable(order, 0) - normaliser)


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under logits [n, vocab] of any float dtype -> (those of `token_ids` [n];
    ids [n, k] and log-probabilities [n, k] of the `num_top` most likely tokens).

    At most all tokens; among equals, the first. float32 and int64.
    """
    rows, vocab = logits.shape
    device = logits.device
    num_top = min(num_top, vocab)
    temperature = torch.full((rows,), math.log(2.0), device=device)
    stats = compute_block_stats(logits, temperature, with_groups=num_top > 0, with_weights=True)
    best = stats.block_max.amax(dim=1)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    top_ids = torch.empty(rows, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(rows, num_top, dtype=torch.float32, device=device)
    outputs = (best, token_ids, best, token_ids)  # placeholders that the kernel does not read
    if num_top:
        top_k = torch.full_like(token_ids, num_top, dtype=torch.int32)
        filters = Filters(temperature, best, top_k, torch.ones_like(best), torch.full_like(best, -math.inf))
        among = find_candidates(logits, filters, best, stats)
        outputs = (among.bounds, among.counts, among.values, among.columns)
    room = outputs[2].shape[1] if num_top else 1
    rank_kernel[(rows,)](
        logits, logits.stride(0), temperature, token_ids, best, stats.block_max, stats.block_weight, *outputs,
        logprobs, top_ids, top_logprobs,
        vocab, stats.num_blocks, num_top,
        next_power_of_2(stats.num_blocks), room, TILE, num_top > 0, **launch_options(device, _WARPS),
    )  # fmt: skip
    return logprobs, top_ids, top_logprobs

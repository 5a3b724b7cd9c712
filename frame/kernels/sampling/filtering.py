# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Top-k, top-p and min-p sampling without sorting: every filter keeps the columns from a threshold
on.

The top-k threshold is the k-th greatest logit; the top-p threshold is the smallest value above
which lies less than p of the weight (of exactly k columns). Both are found by bisection, over few
candidate columns where possible. FlashInfer's sorting-free kernels use rejection sampling instead.
Depends on no request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.sampling.gumbel_noise import RACE_GROUP
from frame.kernels.sampling.sampling import (
    BLOCK,
    INTERPRETED,
    MINUS_INFINITY,
    NO_COLUMN,
    BlockStats,
    compute_block_stats,
    draw_tokens,
    list_columns,
    load_inverse_temperature,
    load_logits,
    race_groups,
    race_tokens,
    store_token,
)

CANDIDATES = 2048  # candidates per row at most
_FEW = 256  # candidates up to which a smaller kernel variant is used
TILE = 8192  # columns per step where a whole row is searched
LOWEST = tl.constexpr(-115.0)  # exponents of 2 below which a weight counts as 0
UNIT = tl.constexpr(float(2**40))  # fixed-point weight of the maximum logit
_MAX_BLOCKS, _ROWS_PER_SPAN = 8, 16  # blocks per gathering program: more when the rows keep the device busy
_STEPS = 10  # bisection steps for the candidate bound
# low bits of a float32 that are 0 in values of the dtype
_LOW_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
_WARPS, _SEARCH_WARPS = 4, 32


@triton.jit
def to_sortable(values, LOW_BITS: tl.constexpr):
    """float32 -> int32 with the same order; equal for equal values."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS


@triton.jit
def from_sortable(order, LOW_BITS: tl.constexpr):
    """The smallest float32 with this order."""
    order = order << LOW_BITS
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_filters(top_k, top_p, temperature, top, row, vocab):
    """(k, 0: off; p, 1.0: off; whether a drawn row has one of them; whether the row is drawn)."""
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    k = tl.where(k < vocab, k, 0)
    is_drawn = (tl.load(temperature + row) > 0) & (tl.abs(top) < float("inf"))
    return k, p, is_drawn & ((k > 0) | (p < 1.0)), is_drawn


@triton.jit
def sum_block_weights(block_max, block_weight, row, num_blocks, top, scale, BLOCKS: tl.constexpr):
    """float64 sum of a row's weights, relative to that of the maximum logit."""
    blocks = tl.arange(0, BLOCKS)
    heights = tl.load(block_max + row * num_blocks + blocks, mask=blocks < num_blocks, other=MINUS_INFINITY)
    weights = tl.load(block_weight + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    return tl.sum((weights * tl.exp2((heights - top) * scale)).to(tl.float64), 0)


@triton.jit
def bound_kernel(
    temperature,
    top_k,  # int32 [rows]
    top_p,  # float32 [rows]
    log_min_p,  # float32 [rows]: log2(min_p); -inf: off
    best,  # float32 [rows]
    block_max, block_weight, group_max,
    bounds,  # float32 [rows]: candidates are the columns from this value on; infinity: none
    counts,  # int32 [rows], reset to 0
    vocab, num_blocks,
    num_groups,  # pairs of groups
    BLOCKS: tl.constexpr, GROUPS: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. A logit from which on the row has what its filters keep: certain for top-k and
    min-p, and for top-p if it keeps few columns."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    top = tl.load(best + row)
    k, p, is_filtered, is_drawn = load_filters(top_k, top_p, temperature, top, row, vocab)
    min_p = tl.load(log_min_p + row)
    bound = float("inf")
    scale = load_inverse_temperature(temperature, row)
    if is_filtered:
        groups = tl.arange(0, GROUPS)
        places, there = group_max + row * 2 * num_groups + 2 * groups, groups < num_groups
        heights = tl.maximum(tl.load(places, mask=there, other=MINUS_INFINITY), tl.load(places + 1, mask=there, other=MINUS_INFINITY))
        # at most this many groups have their maximum at the bound or above, which means about twice
        # as many columns if they are spread evenly
        maximum = 0.75 * num_groups
        weights, goal = tl.full([GROUPS], 1.0, tl.float32), k.to(tl.float32)
        if k == 0:
            weights = tl.exp2((heights - top) * scale)
            goal = p * sum_block_weights(block_max, block_weight, row, num_blocks, top, scale, BLOCKS).to(tl.float32)
        low, high = top + LOWEST / scale, top
        for _step in range(STEPS):
            middle = 0.5 * (low + high)
            is_from = heights >= middle
            is_enough = tl.sum(tl.where(is_from, weights, 0.0), 0) >= goal
            is_enough |= (k == 0) & (tl.sum(is_from.to(tl.float32), 0) >= maximum)
            low = tl.where(is_enough, middle, low)
            high = tl.where(is_enough, high, middle)
        bound = low
    elif is_drawn & (min_p > MINUS_INFINITY):
        bound = top + (min_p - 0.001) / scale  # a little less: the exact comparison happens later
    tl.store(bounds + row, bound)
    tl.store(counts + row, 0)


@triton.jit(do_not_specialize=["span"])
def gather_kernel(
    logits, stride, block_max, bounds,
    counts,  # int32 [rows]: candidates found, including those that do not fit
    values_out,  # float32 [rows, CANDIDATES]
    columns_out,  # int32 [rows, CANDIDATES]
    vocab, num_blocks, span,
    BLOCK: tl.constexpr, CANDIDATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (spans of `span` blocks, rows). Collects the candidates, in any order."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    first, row = tl.program_id(0) * span, tl.program_id(1)
    bound = tl.load(bounds + row)
    for block in range(first, tl.minimum(first + span, num_blocks)):
        if tl.load(block_max + row * num_blocks + block) >= bound:
            columns = block * BLOCK + tl.arange(0, BLOCK)
            values = load_logits(logits, row, stride, columns, vocab)
            taken = values >= bound
            ranks = tl.cumsum(taken.to(tl.int32), 0)
            places = tl.atomic_add(counts + row, tl.max(ranks, 0)) + ranks - 1
            taken &= places < CANDIDATES
            tl.store(values_out + row * CANDIDATES + places, values, mask=taken)
            tl.store(columns_out + row * CANDIDATES + places, columns, mask=taken)


@triton.jit
def _add(a1, a2, a3, b1, b2, b3):
    return a1 + b1, a2 + b2, a3 + b3


@triton.jit
def sum_three(values1, values2, values3):
    """Three sums for little more than the time of one."""
    if INTERPRETED:
        return tl.sum(values1, 0), tl.sum(values2, 0), tl.sum(values3, 0)
    else:
        return tl.reduce((values1, values2, values3), 0, _add)


@triton.jit
def midpoint(low, high):
    """Rounded down; does not overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def search_threshold(orders, weights, low, high, goal):
    """The greatest order from which on the weights sum up to `goal`: bisection, three thresholds a
    pass. It holds for `low` and not for `high`. Integer sums keep it independent of the order."""
    while low + 1 < high:
        second = midpoint(low, high)
        first, third = midpoint(low, second), midpoint(second, high)
        sum1, sum2, sum3 = sum_three(
            tl.where(orders >= first, weights, 0), tl.where(orders >= second, weights, 0), tl.where(orders >= third, weights, 0)
        )
        if sum2 >= goal:
            low, high = tl.where(sum3 >= goal, third, second), tl.where(sum3 >= goal, high, third)
        else:
            low, high = tl.where(sum1 >= goal, first, low), tl.where(sum1 >= goal, second, first)
    return low


@triton.jit
def choose_token(
    values_in, columns_in, count, bound, top, scale, k, p, min_p, whole, key,
    ROOM: tl.constexpr, LOW_BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The token of a row whose `count` candidates fit into ROOM; -1 where its filters keep more
    than these."""
    places = tl.arange(0, ROOM)
    there = places < count
    values = tl.where(there, tl.load(values_in + places), MINUS_INFINITY)  # unmasked, for wide loads
    columns = tl.where(there, tl.load(columns_in + places), NO_COLUMN)
    distances = (values - top) * scale
    weights = (tl.exp2(distances) * UNIT).to(tl.int64)
    orders = to_sortable(values, LOW_BITS)
    low, high = to_sortable(bound, LOW_BITS), to_sortable(top, LOW_BITS) + 1
    if k > 0:
        low = search_threshold(orders, there.to(tl.int32), low, high, k)
        above = orders > low
        minimum = tl.max(tl.where(orders == low, weights, 0), 0)
        rest = k - tl.sum(above.to(tl.int32), 0)
        whole = (tl.sum(tl.where(above, weights, 0), 0) + rest * minimum).to(tl.float64)
    goal = tl.where(p < 1.0, p.to(tl.float64) * whole, 0.0)
    token = -1
    if (count >= k) & (tl.sum(weights, 0).to(tl.float64) >= goal):
        if p < 1.0:
            low = search_threshold(orders, weights, low, high, goal)
        _score, token = race_tokens(values, columns, there & (orders >= low) & (distances >= min_p), top, scale, key, GROUP)
    return token


@triton.jit
def pick_kernel(
    temperature,
    keys,  # int64 [rows]
    top_k, top_p, log_min_p, best, block_max, block_weight, bounds, counts, values_in, columns_in,
    pending,  # int32 [rows]: 1 where the whole row must be searched
    token_ids,  # int64 [rows]
    table, slots, vocab, num_blocks,
    BLOCKS: tl.constexpr, CANDIDATES: tl.constexpr,
    FEW: tl.constexpr,  # a candidate count that most rows do not exceed
    LOW_BITS: tl.constexpr, GROUP: tl.constexpr, STORE_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Draws a row's token from its candidates."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    top = tl.load(best + row)
    k, p, is_filtered, is_drawn = load_filters(top_k, top_p, temperature, top, row, vocab)
    min_p = tl.load(log_min_p + row)
    left = (is_filtered | (is_drawn & (min_p > MINUS_INFINITY))).to(tl.int32)
    bound, count = tl.load(bounds + row), tl.load(counts + row)
    if (left > 0) & (count <= CANDIDATES):
        scale = load_inverse_temperature(temperature, row)
        whole = sum_block_weights(block_max, block_weight, row, num_blocks, top, scale, BLOCKS) * UNIT
        key = tl.load(keys + row)
        values, columns = values_in + row * CANDIDATES, columns_in + row * CANDIDATES
        if count <= FEW:
            token = choose_token(values, columns, count, bound, top, scale, k, p, min_p, whole, key, FEW, LOW_BITS, GROUP)
        else:
            token = choose_token(values, columns, count, bound, top, scale, k, p, min_p, whole, key, CANDIDATES, LOW_BITS, GROUP)
        if token >= 0:
            store_token(token, row, token_ids, table, slots, STORE_LAST)
            left = 0
    tl.store(pending + row, left)


@triton.jit
def sum_from_thresholds(logits, row, stride, vocab, top, scale, COUNT: tl.constexpr, first, second, third, TILE: tl.constexpr):
    """Number of columns, or their weight, at each of three values and above."""
    sum1, sum2, sum3 = tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        values = load_logits(logits, row, stride, start + tl.arange(0, TILE), vocab)
        weights = tl.full([TILE], 1.0, tl.float32)
        if not COUNT:
            weights = tl.exp2((values - top) * scale)
        sum1 += tl.where(values >= first, weights, 0.0)
        sum2 += tl.where(values >= second, weights, 0.0)
        sum3 += tl.where(values >= third, weights, 0.0)
    return sum_three(sum1, sum2, sum3)


@triton.jit
def clamp_order(value, low, high, LOW_BITS: tl.constexpr):
    """The order of `value`, clamped to low … high."""
    return tl.minimum(tl.maximum(to_sortable(value, LOW_BITS).to(tl.int64), low), high)


@triton.jit
def search_row_threshold(
    logits, row, stride, vocab, top, scale, COUNT: tl.constexpr, low, high, goal, TILE: tl.constexpr, LOW_BITS: tl.constexpr
):
    """`search_threshold` over all columns of a row; each pass divides the range into quarters. low
    and high are int64.

    Every other pass divides a wide range by value instead of by order, because most orders belong
    to values near 0.
    """
    is_by_value = True
    while low + 1 < high:
        quarter = tl.maximum((high - low) >> 2, 1)
        first, second, third = low + quarter, low + 2 * quarter, low + 3 * quarter
        if is_by_value & (quarter > 64):
            minimum = from_sortable(low.to(tl.int32), LOW_BITS)
            step = 0.25 * (from_sortable((high - 1).to(tl.int32), LOW_BITS) - minimum)
            first = clamp_order(minimum + step, low + 1, high - 3, LOW_BITS)
            second = clamp_order(minimum + 2 * step, first + 1, high - 2, LOW_BITS)
            third = clamp_order(minimum + 3 * step, second + 1, high - 1, LOW_BITS)
        is_by_value = not is_by_value
        sum1, sum2, sum3 = sum_from_thresholds(
            logits, row, stride, vocab, top, scale, COUNT,
            from_sortable(first.to(tl.int32), LOW_BITS), from_sortable(second.to(tl.int32), LOW_BITS),
            from_sortable(third.to(tl.int32), LOW_BITS), TILE,
        )  # fmt: skip
        if sum2 >= goal:
            low, high = tl.where(sum3 >= goal, third, second), tl.where(sum3 >= goal, high, tl.minimum(third, high))
        else:
            low, high = tl.where(sum1 >= goal, first, low), tl.where(sum1 >= goal, tl.minimum(second, high), first)
    return low


@triton.jit
def search_kernel(
    logits, stride, temperature,
    keys,  # int64 [rows]
    top_k, top_p, log_min_p, best, block_max, block_weight, pending, token_ids, table, slots, vocab, num_blocks,
    BLOCKS: tl.constexpr, TILE: tl.constexpr, LOW_BITS: tl.constexpr, GROUP: tl.constexpr, STORE_LAST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Draws the token of a pending row, by passes over all columns."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    if tl.load(pending + row) > 0:
        top = tl.load(best + row)
        scale = load_inverse_temperature(temperature, row)
        k, p, _filtered, _drawn = load_filters(top_k, top_p, temperature, top, row, vocab)
        low = to_sortable(top + LOWEST / scale, LOW_BITS).to(tl.int64)
        high = to_sortable(top, LOW_BITS).to(tl.int64) + 1
        whole = sum_block_weights(block_max, block_weight, row, num_blocks, top, scale, BLOCKS)
        if k > 0:
            low = search_row_threshold(logits, row, stride, vocab, top, scale, True, low, high, k, TILE, LOW_BITS)
            if p < 1.0:
                above, at = from_sortable((low + 1).to(tl.int32), LOW_BITS), from_sortable(low.to(tl.int32), LOW_BITS)
                number, number_at, _c = sum_from_thresholds(logits, row, stride, vocab, top, scale, True, above, at, at, TILE)
                weight, minimum, _c = sum_from_thresholds(logits, row, stride, vocab, top, scale, False, above, at, at, TILE)
                each = (minimum - weight) / tl.maximum(number_at - number, 1.0)
                whole = (weight + (k - number) * each).to(tl.float64)
        if p < 1.0:
            goal = tl.maximum(p.to(tl.float64) * whole, 1e-30)  # never 0: an empty set would satisfy 0
            # if every column below this were as heavy as this, all together would still weigh less
            # than top-p may remove
            if k == 0:
                lightest = tl.maximum(tl.log2(((1.0 - p) * whole.to(tl.float32)) / vocab) - 0.01, LOWEST)
                low = tl.maximum(to_sortable(top + lightest / scale, LOW_BITS).to(tl.int64), low)
            low = search_row_threshold(logits, row, stride, vocab, top, scale, False, low, high, goal, TILE, LOW_BITS)
        limit, min_p = from_sortable(low.to(tl.int32), LOW_BITS), tl.load(log_min_p + row)
        key, score, token = tl.load(keys + row), float("-inf"), NO_COLUMN + 0 * row
        for start in range(0, vocab, TILE):
            groups = start // GROUP + tl.arange(0, TILE // GROUP)
            columns = list_columns(groups, GROUP)
            values = load_logits(logits, row, stride, columns, vocab)
            is_kept = (values >= limit) & ((values - top) * scale >= min_p) & (columns < vocab)
            winner, column = race_groups(values, groups, is_kept, top, scale, key, GROUP)
            token = tl.where(winner > score, column, token)
            score = tl.maximum(winner, score)
        store_token(token, row, token_ids, table, slots, STORE_LAST)


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of each row, and the numbers with which it is drawn."""

    temperature: torch.Tensor  # float32 [rows], temperature * ln 2; 0: greedy, filters have no effect
    key: torch.Tensor  # int64 [rows]: key of the draw
    top_k: torch.Tensor  # int32 [rows]; 0: off
    top_p: torch.Tensor  # float32 [rows]; 1: off
    log_min_p: torch.Tensor  # float32 [rows]: log2(min_p); -inf: off


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns that may pass the filters, in no order, of rows that have few of them."""

    bounds: torch.Tensor  # float32 [rows]: bound; infinity: no candidates
    counts: torch.Tensor  # int32 [rows]: number found; more than CANDIDATES: the list is incomplete
    values: torch.Tensor  # float32 [rows, CANDIDATES]
    columns: torch.Tensor  # int32 [rows, CANDIDATES]


def find_candidates(logits: torch.Tensor, filters: Filters, best: torch.Tensor, stats: BlockStats) -> Candidates:
    """Columns that may pass the rows' filters, of logits [rows, vocab] whose block statistics
    include group maxima. A row with too many is searched whole (`search_kernel`)."""
    if stats.group_max is None:
        raise ValueError("candidates are found by the maxima of groups; compute the block statistics with with_groups=True")
    rows, vocab = logits.shape
    device = logits.device
    launch = launch_options(device, _WARPS)
    bounds = torch.empty(rows, dtype=torch.float32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    num_groups = stats.group_max.shape[1] // 2
    bound_kernel[(rows,)](
        filters.temperature, filters.top_k, filters.top_p, filters.log_min_p, best, stats.block_max, stats.block_weight,
        stats.group_max, bounds, counts,
        vocab, stats.num_blocks, num_groups, next_power_of_2(stats.num_blocks), next_power_of_2(num_groups), _STEPS, **launch,
    )  # fmt: skip
    values = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
    columns = torch.empty(rows, CANDIDATES, dtype=torch.int32, device=device)
    span = min(_MAX_BLOCKS, 1 + rows // _ROWS_PER_SPAN)
    gather_kernel[(ceil_div(stats.num_blocks, span), rows)](
        logits, logits.stride(0), stats.block_max, bounds, counts, values, columns,
        vocab, stats.num_blocks, span, BLOCK, CANDIDATES, **launch,
    )  # fmt: skip
    return Candidates(bounds, counts, values, columns)


def sample_filtered(
    logits: torch.Tensor,
    filters: Filters,
    unfiltered: tuple[torch.Tensor, torch.Tensor] | None = None,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_unfiltered` with filters, for logits [rows, vocab] of any float dtype. `unfiltered`:
    its result for the same logits, if known; the token ids of rows with filters are overwritten,
    and so are those rows of `last_tokens`."""
    rows, vocab = logits.shape
    device = logits.device
    stats = compute_block_stats(logits, filters.temperature, with_groups=True, with_weights=True)
    token_ids, best = unfiltered or draw_tokens(logits, filters.temperature, filters.key, stats, last_tokens)
    remembered = last_tokens or (token_ids, token_ids)
    candidates = find_candidates(logits, filters, best, stats)
    pending = torch.empty(rows, dtype=torch.int32, device=device)
    blocks, low_bits = next_power_of_2(stats.num_blocks), _LOW_BITS[logits.dtype]
    pick_kernel[(rows,)](
        filters.temperature, filters.key, filters.top_k, filters.top_p, filters.log_min_p, best, stats.block_max, stats.block_weight,
        candidates.bounds, candidates.counts, candidates.values, candidates.columns, pending, token_ids, *remembered, vocab,
        stats.num_blocks, blocks, CANDIDATES, min(_FEW, CANDIDATES), low_bits, RACE_GROUP, last_tokens is not None,
        **launch_options(device, _WARPS),
    )  # fmt: skip
    search_kernel[(rows,)](
        logits, logits.stride(0), filters.temperature, filters.key, filters.top_k, filters.top_p, filters.log_min_p, best,
        stats.block_max, stats.block_weight, pending, token_ids, *remembered, vocab, stats.num_blocks,
        blocks, TILE, low_bits, RACE_GROUP, last_tokens is not None, **launch_options(device, _SEARCH_WARPS),
    )  # fmt: skip
    return token_ids, best

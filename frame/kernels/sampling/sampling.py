# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Tokens from logits in two launches: a survey of all columns in blocks, then a draw that reads one block again.

Logits are read in their own type, once; what is computed is float32, and what decides between columns is float64. Rows do not see
each other, and blocks have one size whatever the number of rows, so company changes nothing. Nothing waits for the host: both
launches can be captured in a CUDA graph. Knows no request, no filter and no processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous

BLOCK = 2048  # columns of one program of the survey
GROUP = 128  # columns whose greatest value the survey can keep, for filters
NO_COLUMN = tl.constexpr(2**31 - 1)
MINUS_INFINITY = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(kernels.INTERPRETED)
_WARPS = 4


@triton.jit
def load_logits(logits, row, stride, columns, vocab):
    """float32 values of a row's columns; minus infinity past its end."""
    return tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < vocab, other=MINUS_INFINITY).to(tl.float32)


@triton.jit
def load_inverse_temperature(temperature, row):
    """What a distance in logits is multiplied by to be one in powers of 2; greedy rows (temperature 0) have 1."""
    value = tl.load(temperature + row)
    return 1.0 / tl.where(value > 0, value, 1.0)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_with_nan(values, AXIS: tl.constexpr):
    """Maximum along an axis, of which a NaN is the greatest."""
    if INTERPRETED:  # it would loop over the values, as it knows no such operation
        return tl.where(tl.max((values != values).to(tl.int32), AXIS) > 0, float("nan"), tl.max(values, AXIS))
    else:
        return tl.reduce(values, AXIS, _greater)


@triton.jit
def block_stats_kernel(
    logits,  # [rows, vocab]
    stride,  # between rows
    temperature,  # float32 [rows], times ln 2
    block_max,  # float32 [rows, blocks]: greatest value
    block_argmax,  # int32 [rows, blocks]: its first column, where it is not finite or the row is greedy
    block_weight,  # float32 [rows, blocks]: sum of weights, the greatest value's is 1, where the row is drawn
    group_max,  # float32 [rows, blocks * BLOCK / GROUP]: greatest value of each group of columns
    vocab,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # 0: no peaks
    PDL: tl.constexpr,
):
    """One block of one row."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(logits, row, stride, columns, vocab)
    place = row * tl.num_programs(0) + block
    if GROUP > 0:
        groups: tl.constexpr = BLOCK // GROUP
        heights = max_with_nan(tl.reshape(values, (groups, GROUP)), 1)
        tl.store(group_max + place * groups + tl.arange(0, groups), heights)
        top = max_with_nan(heights, 0)
    else:
        top = max_with_nan(values, 0)
    tl.store(block_max + place, top)
    if (tl.load(temperature + row) > 0) & (tl.abs(top) < float("inf")):
        tl.store(block_weight + place, tl.sum(tl.exp2((values - top) * load_inverse_temperature(temperature, row)), 0))
    else:
        is_greatest = (values == top) | (values != values)
        tl.store(block_argmax + place, tl.min(tl.where(is_greatest, columns, NO_COLUMN), 0))
        tl.store(block_weight + place, 0.0)


@triton.jit
def find_crossing(weights, goal):
    """-> (first index where the running sum of float64 weights is above the goal, the sum before it). At most the last index of any
    weight, where rounding puts the goal at the very end."""
    sum_three = tl.cumsum(weights, 0)
    total = tl.max(sum_three, 0)
    index = tl.minimum(tl.sum((sum_three <= goal).to(tl.int32), 0), tl.sum((sum_three < total).to(tl.int32), 0))
    before = tl.max(tl.where(tl.arange(0, weights.shape[0]) < index, sum_three, 0.0), 0)
    return index, before


@triton.jit
def store_token(token, row, token_ids, table, slots, STORE_LAST: tl.constexpr):
    tl.store(token_ids + row, token.to(tl.int64))
    if STORE_LAST:
        tl.store(table + tl.load(slots + row), token.to(tl.int64))


@triton.jit
def draw_kernel(
    logits,  # [rows, vocab]
    stride,
    temperature,  # float32 [rows], times ln 2; 0: greedy
    uniform,  # float64 [rows]
    block_max,  # the survey's
    block_argmax,
    block_weight,
    token_ids,  # int64 [rows]
    best,  # float32 [rows]
    table,  # int64 [slots]: where tokens are remembered
    slots,  # int64 [rows]
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of 2 from num_blocks on
    STORE_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the first greatest column, or the column in which the running sum of weights passes its share."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    places = row * num_blocks + blocks
    there = blocks < num_blocks
    heights = tl.load(block_max + places, mask=there, other=MINUS_INFINITY)
    columns = tl.load(block_argmax + places, mask=there, other=NO_COLUMN)
    top = max_with_nan(heights, 0)
    is_greatest = (heights == top) | (heights != heights)
    token = tl.min(tl.where(is_greatest, columns, NO_COLUMN), 0)
    if (tl.load(temperature + row) > 0) & (tl.abs(top) < float("inf")):
        scale = load_inverse_temperature(temperature, row)
        weights = tl.load(block_weight + places, mask=there, other=0.0) * tl.exp2((heights - top) * scale)
        weights = weights.to(tl.float64)
        goal = tl.sum(weights, 0) * tl.load(uniform + row).to(tl.float64)
        block, before = find_crossing(weights, goal)
        inside = block * BLOCK + tl.arange(0, BLOCK)
        values = load_logits(logits, row, stride, inside, vocab)
        index, _ = find_crossing(tl.exp2((values - top) * scale).to(tl.float64), goal - before)
        token = block * BLOCK + index
    store_token(token, row, token_ids, table, slots, STORE_LAST)
    tl.store(best + row, top)


@dataclass(frozen=True, slots=True)
class BlockStats:
    """What the survey found, by row and block of columns (`block_stats_kernel`)."""

    block_max: torch.Tensor
    block_argmax: torch.Tensor
    block_weight: torch.Tensor
    group_max: torch.Tensor | None  # None: not asked for

    @property
    def num_blocks(self) -> int:
        return self.block_max.shape[1]


def compute_block_stats(logits: torch.Tensor, temperature: torch.Tensor, *, with_group_max: bool = False) -> BlockStats:
    """Read all logits [rows, vocab] once. temperature float32 [rows], times ln 2; 0 is taken for ln 2."""
    rows, vocab = logits.shape
    num_blocks = ceil_div(vocab, BLOCK)
    block_max = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    block_weight = torch.empty_like(
        block_max
    )  # not a part of one tensor with these: kernels are compiled anew for an address that 16 does not divide
    block_argmax = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    group = GROUP if with_group_max else 0
    group_max = torch.empty(rows, num_blocks * (BLOCK // group), dtype=torch.float32, device=logits.device) if group else None
    block_stats_kernel[(num_blocks, rows)](
        logits, logits.stride(0), temperature, block_max, block_argmax, block_weight,
        block_max if group_max is None else group_max, vocab, BLOCK, group,
        **launch_options(logits.device, _WARPS),
    )  # fmt: skip
    return BlockStats(block_max, block_argmax, block_weight, group_max)


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    stats: BlockStats,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_unfiltered`, of logits that have been surveyed."""
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    draw_kernel[(rows,)](
        logits, logits.stride(0), temperature, uniform, stats.block_max, stats.block_argmax, stats.block_weight, token_ids, best,
        *(last_tokens or (token_ids, token_ids)), vocab, stats.num_blocks,
        BLOCK, next_power_of_2(stats.num_blocks), last_tokens is not None, **launch_options(logits.device, _WARPS),
    )  # fmt: skip
    return token_ids, best


def sample_unfiltered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids int64 [rows], greatest logit float32 [rows]: not finite when the row's logits are broken).

    logits [rows, vocab] of any float type, columns side by side; temperature float32 [rows], **times ln 2**, 0 for the first greatest
    column; uniform float64 [rows] in (0, 1), read where the temperature is above 0: the token is drawn by inverse CDF in column order.
    `last_tokens`: a table int64 [slots], and each row's slot int64 [rows], where its token is written too.
    """
    return draw_tokens(logits, temperature, uniform, compute_block_stats(logits, temperature), last_tokens)

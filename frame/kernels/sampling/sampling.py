# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Draws tokens from logits in two launches: statistics of blocks of columns, then a draw that reads
one block again.

A row's token depends on that row alone: the block size does not depend on the batch
(batch-invariant). Nothing waits for the host, so both launches can be captured in a CUDA graph.
Depends on no request, filter or processor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous

BLOCK = 2048  # columns per block
GROUP = 128  # columns per group, whose maxima the filters use
NO_COLUMN = tl.constexpr(2**31 - 1)
MINUS_INFINITY = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(kernels.INTERPRETED)
_WARPS = 4


@triton.jit
def load_logits(logits, row, stride, columns, vocab):
    """float32 values of a row's columns; -inf past its end."""
    return tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < vocab, other=MINUS_INFINITY).to(tl.float32)


@triton.jit
def load_inverse_temperature(temperature, row):
    """1 / temperature: logit differences times it are exponents of 2. Greedy rows (temperature 0)
    get 1."""
    value = tl.load(temperature + row)
    return 1.0 / tl.where(value > 0, value, 1.0)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_with_nan(values, AXIS: tl.constexpr):
    """Maximum along an axis; NaN counts as the greatest value."""
    if INTERPRETED:  # the interpreter has no such reduction and would loop over the values
        return tl.where(tl.max((values != values).to(tl.int32), AXIS) > 0, float("nan"), tl.max(values, AXIS))
    else:
        return tl.reduce(values, AXIS, _greater)


@triton.jit
def block_stats_kernel(
    logits,  # [rows, vocab]
    stride,  # stride of rows
    temperature,  # float32 [rows], times ln 2
    block_max,  # float32 [rows, blocks]: maximum
    block_argmax,  # int32 [rows, blocks]: first column of the maximum, for greedy rows and non-finite maxima
    block_weight,  # float32 [rows, blocks]: sum of exp2((logit - maximum) / temperature), for drawn rows
    group_max,  # float32 [rows, blocks * BLOCK / GROUP]: maximum of each group of columns
    vocab,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # 0: no group maxima
    PDL: tl.constexpr,
):
    """Grid: (blocks, rows)."""
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
    """(first index where the running sum of the float64 weights exceeds `goal`, the sum before it).
    At most the last index with any weight, in case rounding puts the goal at the end."""
    sum_three = tl.cumsum(weights, 0)
    total = tl.max(sum_three, 0)
    index = tl.minimum(tl.sum((sum_three <= goal).to(tl.int32), 0), tl.sum((sum_three < total).to(tl.int32), 0))
    before = tl.max(tl.where(tl.arange(0, weights.shape[0]) < index, sum_three, 0.0), 0)
    return index, before


@triton.jit
def store_token(token, row, token_ids, table, slots, STORE_LAST: tl.constexpr):
    """Store a row's token, and if STORE_LAST also in the table of last tokens."""
    tl.store(token_ids + row, token.to(tl.int64))
    if STORE_LAST:
        tl.store(table + tl.load(slots + row), token.to(tl.int64))


@triton.jit
def draw_kernel(
    logits,  # [rows, vocab]
    stride,
    temperature,  # float32 [rows], temperature * ln 2; 0: greedy
    uniform,  # float64 [rows]
    block_max,  # results of `block_stats_kernel`
    block_argmax,
    block_weight,
    token_ids,  # int64 [rows]
    best,  # float32 [rows]
    table,  # int64 [slots]: the table of last tokens
    slots,  # int64 [rows]
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # num_blocks rounded up to a power of two
    STORE_LAST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: rows. Greedy: the first column of the maximum; otherwise the column in which the
    running sum of weights passes `uniform` times the total.

    p(j) = exp((logit[j] - max) / temperature) / sum, by the inverse CDF in column order. Logits are
    read once, in their own dtype; values are float32, and sums that decide between columns are
    float64.
    """
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
    """The results of `block_stats_kernel`, by row and block of columns."""

    block_max: torch.Tensor
    block_argmax: torch.Tensor
    block_weight: torch.Tensor
    group_max: torch.Tensor | None  # None: not computed

    @property
    def num_blocks(self) -> int:
        return self.block_max.shape[1]


def compute_block_stats(logits: torch.Tensor, temperature: torch.Tensor, *, with_group_max: bool = False) -> BlockStats:
    """Compute the block statistics of logits [rows, vocab]. temperature float32 [rows] is times ln
    2; 0 is treated as ln 2."""
    rows, vocab = logits.shape
    num_blocks = ceil_div(vocab, BLOCK)
    block_max = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    block_weight = torch.empty_like(block_max)  # a separate tensor: a kernel is compiled again for an address that is not 16-byte aligned
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
    """`sample_unfiltered` of logits whose block statistics are known."""
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
    """Draw tokens without filters -> (token ids int64 [rows], maximum logit float32 [rows], not
    finite when the row's logits are invalid).

    logits [rows, vocab] of any float dtype, columns contiguous. temperature float32 [rows], **times
    ln 2**; 0 selects the first column of the maximum. uniform float64 [rows] in (0, 1), read where
    the temperature is above 0: the token is drawn by inverse CDF in column order. `last_tokens`: a
    table int64 [slots] and each row's slot int64 [rows]; the token is stored there too.
    """
    return draw_tokens(logits, temperature, uniform, compute_block_stats(logits, temperature), last_tokens)

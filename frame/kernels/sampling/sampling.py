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
from frame.kernels.launch import begin, blocks_of, options, power_of_2, wait_for_previous

BLOCK = 2048  # columns of one program of the survey
GROUP = 128  # columns whose greatest value the survey can keep, for filters
NOWHERE = tl.constexpr(2**31 - 1)
NEVER = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(kernels.INTERPRETED)
_WARPS = 4


@triton.jit
def load_logits(logits, row, stride, columns, vocab):
    """float32 values of a row's columns; minus infinity past its end."""
    return tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < vocab, other=NEVER).to(tl.float32)


@triton.jit
def scale_of(temperature, row):
    """What a distance in logits is multiplied by to be one in powers of 2; greedy rows (temperature 0) have 1."""
    value = tl.load(temperature + row)
    return 1.0 / tl.where(value > 0, value, 1.0)


@triton.jit
def _greater(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def greatest(values, AXIS: tl.constexpr):
    """Maximum along an axis, of which a NaN is the greatest."""
    if INTERPRETED:  # it would loop over the values, as it knows no such operation
        return tl.where(tl.max((values != values).to(tl.int32), AXIS) > 0, float("nan"), tl.max(values, AXIS))
    else:
        return tl.reduce(values, AXIS, _greater)


@triton.jit
def survey_kernel(
    logits,  # [rows, vocab]
    stride,  # between rows
    temperature,  # float32 [rows], times ln 2
    tops,  # float32 [rows, blocks]: greatest value
    firsts,  # int32 [rows, blocks]: its first column, where it is not finite or the row is greedy
    masses,  # float32 [rows, blocks]: sum of weights, the greatest value's is 1, where the row is drawn
    peaks,  # float32 [rows, blocks * BLOCK / GROUP]: greatest value of each group of columns
    vocab,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # 0: no peaks
    PDL: tl.constexpr,
):
    """One block of one row."""
    begin(PDL)
    wait_for_previous(PDL)
    block, row = tl.program_id(0), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = load_logits(logits, row, stride, columns, vocab)
    place = row * tl.num_programs(0) + block
    if GROUP > 0:
        groups: tl.constexpr = BLOCK // GROUP
        heights = greatest(tl.reshape(values, (groups, GROUP)), 1)
        tl.store(peaks + place * groups + tl.arange(0, groups), heights)
        top = greatest(heights, 0)
    else:
        top = greatest(values, 0)
    tl.store(tops + place, top)
    if (tl.load(temperature + row) > 0) & (tl.abs(top) < float("inf")):
        tl.store(masses + place, tl.sum(tl.exp2((values - top) * scale_of(temperature, row)), 0))
    else:
        is_greatest = (values == top) | (values != values)
        tl.store(firsts + place, tl.min(tl.where(is_greatest, columns, NOWHERE), 0))
        tl.store(masses + place, 0.0)


@triton.jit
def crossing(weights, goal):
    """-> (first index where the running sum of float64 weights is above the goal, the sum before it). At most the last index of any
    weight, where rounding puts the goal at the very end."""
    sums = tl.cumsum(weights, 0)
    total = tl.max(sums, 0)
    index = tl.minimum(tl.sum((sums <= goal).to(tl.int32), 0), tl.sum((sums < total).to(tl.int32), 0))
    before = tl.max(tl.where(tl.arange(0, weights.shape[0]) < index, sums, 0.0), 0)
    return index, before


@triton.jit
def store_token(token, row, token_ids, table, slots, REMEMBERED: tl.constexpr):
    tl.store(token_ids + row, token.to(tl.int64))
    if REMEMBERED:
        tl.store(table + tl.load(slots + row), token.to(tl.int64))


@triton.jit
def draw_kernel(
    logits,  # [rows, vocab]
    stride,
    temperature,  # float32 [rows], times ln 2; 0: greedy
    uniform,  # float64 [rows]
    tops,  # the survey's
    firsts,
    masses,
    token_ids,  # int64 [rows]
    best,  # float32 [rows]
    table,  # int64 [slots]: where tokens are remembered
    slots,  # int64 [rows]
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # power of 2 from num_blocks on
    REMEMBERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: the first greatest column, or the column in which the running sum of weights passes its share."""
    begin(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    places = row * num_blocks + blocks
    there = blocks < num_blocks
    heights = tl.load(tops + places, mask=there, other=NEVER)
    columns = tl.load(firsts + places, mask=there, other=NOWHERE)
    top = greatest(heights, 0)
    is_greatest = (heights == top) | (heights != heights)
    token = tl.min(tl.where(is_greatest, columns, NOWHERE), 0)
    if (tl.load(temperature + row) > 0) & (tl.abs(top) < float("inf")):
        scale = scale_of(temperature, row)
        weights = tl.load(masses + places, mask=there, other=0.0) * tl.exp2((heights - top) * scale)
        weights = weights.to(tl.float64)
        goal = tl.sum(weights, 0) * tl.load(uniform + row).to(tl.float64)
        block, before = crossing(weights, goal)
        inside = block * BLOCK + tl.arange(0, BLOCK)
        values = load_logits(logits, row, stride, inside, vocab)
        index, _ = crossing(tl.exp2((values - top) * scale).to(tl.float64), goal - before)
        token = block * BLOCK + index
    store_token(token, row, token_ids, table, slots, REMEMBERED)
    tl.store(best + row, top)


@dataclass(frozen=True, slots=True)
class Survey:
    """What the survey found, by row and block of columns (`survey_kernel`)."""

    tops: torch.Tensor
    firsts: torch.Tensor
    masses: torch.Tensor
    peaks: torch.Tensor | None  # None: not asked for

    @property
    def num_blocks(self) -> int:
        return self.tops.shape[1]


def survey(logits: torch.Tensor, temperature: torch.Tensor, *, with_peaks: bool = False) -> Survey:
    """Read all logits [rows, vocab] once. temperature float32 [rows], times ln 2; 0 is taken for ln 2."""
    rows, vocab = logits.shape
    num_blocks = blocks_of(vocab, BLOCK)
    tops = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(tops)  # not a part of one tensor with these: kernels are compiled anew for an address that 16 does not divide
    firsts = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    group = GROUP if with_peaks else 0
    peaks = torch.empty(rows, num_blocks * (BLOCK // group), dtype=torch.float32, device=logits.device) if group else None
    survey_kernel[(num_blocks, rows)](
        logits, logits.stride(0), temperature, tops, firsts, masses, tops if peaks is None else peaks, vocab, BLOCK, group,
        **options(logits.device, _WARPS),
    )  # fmt: skip
    return Survey(tops, firsts, masses, peaks)


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    uniform: torch.Tensor,
    seen: Survey,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_simple`, of logits that have been surveyed."""
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    draw_kernel[(rows,)](
        logits, logits.stride(0), temperature, uniform, seen.tops, seen.firsts, seen.masses, token_ids, best,
        *(last_tokens or (token_ids, token_ids)), vocab, seen.num_blocks,
        BLOCK, power_of_2(seen.num_blocks), last_tokens is not None, **options(logits.device, _WARPS),
    )  # fmt: skip
    return token_ids, best


def sample_simple(
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
    return draw(logits, temperature, uniform, survey(logits, temperature), last_tokens)

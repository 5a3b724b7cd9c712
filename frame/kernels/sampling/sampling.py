# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Draws tokens from logits in two launches: the greatest logits of blocks and groups of columns,
then a Gumbel race (`frame.core.sampling.gumbel_race`) that reads the groups again that may win.

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
from frame.kernels.sampling.gumbel_noise import RACE_GROUP, leader_of_group, min_of_group, noise_of_tokens

BLOCK = 2048  # columns per block
NO_COLUMN = tl.constexpr(2**31 - 1)
MINUS_INFINITY = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(kernels.INTERPRETED)
LOWEST_SCORE = tl.constexpr(-3e38)
LANES = 32  # groups that race at once; each is the best of every 32nd group
_WARPS, _DRAW_WARPS = 4, 8


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
    WEIGHTS: tl.constexpr,  # whether to store block_weight
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
        if WEIGHTS:
            tl.store(block_weight + place, tl.sum(tl.exp2((values - top) * load_inverse_temperature(temperature, row)), 0))
    else:
        is_greatest = (values == top) | (values != values)
        tl.store(block_argmax + place, tl.min(tl.where(is_greatest, columns, NO_COLUMN), 0))
        if WEIGHTS:
            tl.store(block_weight + place, 0.0)


@triton.jit
def race_tokens(values, columns, is_in, top, scale, key, GROUP: tl.constexpr):
    """(greatest score, its first column) of tokens in any order. is_in: whether a token may be
    drawn."""
    groups = columns // GROUP
    noise = noise_of_tokens(key, columns, min_of_group(key, groups), leader_of_group(key, groups))
    scores = tl.where(is_in, (values - top) * scale - noise, MINUS_INFINITY)
    score = tl.max(scores, 0)
    return score, tl.min(tl.where(scores == score, columns, NO_COLUMN), 0)


@triton.jit
def list_columns(groups, GROUP: tl.constexpr):
    """The columns of groups [n], [n, GROUP]."""
    return groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]


@triton.jit
def race_groups(values, groups, is_in, top, scale, key, GROUP: tl.constexpr):
    """`race_tokens` of whole groups: values and is_in are [n, GROUP], groups is [n]."""
    columns = list_columns(groups, GROUP)
    noise = noise_of_tokens(key, columns, min_of_group(key, groups)[:, None], leader_of_group(key, groups)[:, None])
    scores = tl.where(is_in, (values - top) * scale - noise, MINUS_INFINITY)
    score = tl.max(tl.max(scores, 1), 0)
    return score, tl.min(tl.min(tl.where(scores == score, columns, NO_COLUMN), 1), 0)


@triton.jit
def store_token(token, row, token_ids, table, slots, STORE_LAST: tl.constexpr):
    """Store a row's token, and if STORE_LAST also in the table of last tokens."""
    tl.store(token_ids + row, token.to(tl.int64))
    if STORE_LAST:
        tl.store(table + tl.load(slots + row), token.to(tl.int64))


@triton.jit
def race_row(
    logits, stride, group_max, row, top, scale, key, vocab, num_groups, LANES: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr
):
    """The token of a row by the race of all its groups, LANES of them at a time, until no group
    that is left can win."""
    groups = tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    heights = tl.load(group_max + row * num_groups + groups, mask=groups < num_groups, other=MINUS_INFINITY)
    # a little more than any token of the group scores, because rounding differs between the sums
    bounds = (heights - top) * scale - tl.log2(min_of_group(key, groups)) + 1e-4
    score, token = LOWEST_SCORE + 0.0 * top, NO_COLUMN + 0 * row
    while tl.max(tl.max(bounds, 0), 0) > score:
        best = tl.max(bounds, 0)
        chosen = tl.min(tl.where(bounds == best[None, :], groups, NO_COLUMN), 0)
        columns = list_columns(chosen, GROUP)
        may_win = (best > score)[:, None] & (columns < vocab)
        values = tl.load(logits + row.to(tl.int64) * stride + columns, mask=may_win, other=MINUS_INFINITY).to(tl.float32)
        winner, column = race_groups(values, chosen, may_win, top, scale, key, GROUP)
        token = tl.where(winner > score, column, token)
        score = tl.maximum(winner, score)
        bounds = tl.where(groups == chosen[None, :], MINUS_INFINITY, bounds)
    return token


@triton.jit
def draw_kernel(
    logits,  # [rows, vocab]
    stride,
    temperature,  # float32 [rows], temperature * ln 2; 0: greedy
    keys,  # int64 [rows]
    block_max,  # results of `block_stats_kernel`
    block_argmax, group_max,
    token_ids,  # int64 [rows]
    best,  # float32 [rows]
    table,  # int64 [slots]: the table of last tokens
    slots,  # int64 [rows]
    vocab, num_blocks, num_groups,
    BLOCKS: tl.constexpr,  # num_blocks rounded up to a power of two
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,  # LANES * DEPTH is at least num_groups
    GROUP: tl.constexpr, STORE_LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. Greedy: the first column of the maximum; otherwise the winner of the Gumbel race.
    Logits are read in their own dtype; scores are float32."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    blocks = tl.arange(0, BLOCKS)
    places = row * num_blocks + blocks
    there = blocks < num_blocks
    heights = tl.load(block_max + places, mask=there, other=MINUS_INFINITY)
    top = max_with_nan(heights, 0)
    if (tl.load(temperature + row) > 0) & (tl.abs(top) < float("inf")):
        scale, key = load_inverse_temperature(temperature, row), tl.load(keys + row)
        token = race_row(logits, stride, group_max, row, top, scale, key, vocab, num_groups, LANES, DEPTH, GROUP)
    else:
        columns = tl.load(block_argmax + places, mask=there, other=NO_COLUMN)
        is_greatest = (heights == top) | (heights != heights)
        token = tl.min(tl.where(is_greatest, columns, NO_COLUMN), 0)
    store_token(token, row, token_ids, table, slots, STORE_LAST)
    tl.store(best + row, top)


@dataclass(frozen=True, slots=True)
class BlockStats:
    """The results of `block_stats_kernel`, by row and block of columns. None: not computed."""

    block_max: torch.Tensor
    block_argmax: torch.Tensor
    block_weight: torch.Tensor | None
    group_max: torch.Tensor | None

    @property
    def num_blocks(self) -> int:
        return self.block_max.shape[1]


def compute_block_stats(logits: torch.Tensor, temperature: torch.Tensor, *, with_groups: bool, with_weights: bool) -> BlockStats:
    """Compute the block statistics of logits [rows, vocab]. temperature float32 [rows] is times ln
    2; 0 is treated as ln 2."""
    rows, vocab = logits.shape
    num_blocks = ceil_div(vocab, BLOCK)
    block_max = torch.empty(rows, num_blocks, dtype=torch.float32, device=logits.device)
    block_weight = torch.empty_like(block_max) if with_weights else None  # separate: an address that is not 16-byte aligned recompiles
    block_argmax = torch.empty(rows, num_blocks, dtype=torch.int32, device=logits.device)
    group = RACE_GROUP if with_groups else 0
    group_max = torch.empty(rows, num_blocks * (BLOCK // group), dtype=torch.float32, device=logits.device) if group else None
    block_stats_kernel[(num_blocks, rows)](
        logits, logits.stride(0), temperature, block_max, block_argmax,
        block_max if block_weight is None else block_weight, block_max if group_max is None else group_max,
        vocab, BLOCK, group, with_weights, **launch_options(logits.device, _WARPS),
    )  # fmt: skip
    return BlockStats(block_max, block_argmax, block_weight, group_max)


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    keys: torch.Tensor,
    stats: BlockStats,
    last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_unfiltered` of logits whose block statistics, with groups, are known."""
    if stats.group_max is None:
        raise ValueError("the race needs block statistics with groups; compute them with with_groups=True")
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows, dtype=torch.float32, device=logits.device)
    num_groups = stats.group_max.shape[1]
    draw_kernel[(rows,)](
        logits, logits.stride(0), temperature, keys, stats.block_max, stats.block_argmax, stats.group_max, token_ids, best,
        *(last_tokens or (token_ids, token_ids)), vocab, stats.num_blocks, num_groups,
        next_power_of_2(stats.num_blocks), LANES, next_power_of_2(ceil_div(num_groups, LANES)), RACE_GROUP,
        last_tokens is not None, **launch_options(logits.device, _DRAW_WARPS),
    )  # fmt: skip
    return token_ids, best


def sample_unfiltered(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, last_tokens: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens without filters -> (token ids int64 [rows], maximum logit float32 [rows], not
    finite when the row's logits are invalid).

    logits [rows, vocab] of any float dtype, columns contiguous. temperature float32 [rows], **times
    ln 2**; 0 selects the first column of the maximum. keys int64 [rows], read where the temperature
    is above 0: the noise of the race is hashed from key and column. `last_tokens`: a table int64
    [slots] and each row's slot int64 [rows]; the token is stored there too.
    """
    stats = compute_block_stats(logits, temperature, with_groups=True, with_weights=False)
    return draw_tokens(logits, temperature, keys, stats, last_tokens)

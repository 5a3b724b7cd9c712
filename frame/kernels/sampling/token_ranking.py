# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Finds the likeliest next tokens of the branches of a tree of drafted tokens in two launches: the
greatest logits of blocks and groups of columns, then a search of the groups that may have the
greatest scores. The PyTorch version is `frame.speculation.token_ranking.rank_tokens`.

Nothing waits for the host, so both launches can be captured in a CUDA graph. Used by the passes of
device drafters.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from frame.kernels.launch import launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.sampling.gumbel_noise import RACE_GROUP, leader_of_group, min_of_group, noise_of_tokens
from frame.kernels.sampling.sampling import (
    LOWEST_SCORE,
    MINUS_INFINITY,
    NO_COLUMN,
    compute_block_stats,
    list_columns,
    load_inverse_temperature,
    max_with_nan,
)

_LN_2 = tl.constexpr(math.log(2.0))
_WARPS = 8


@triton.jit
def _rank_kernel(
    logits,  # [rows * branches, vocab]
    stride,  # stride of logits
    temperature,  # float32 [rows], times ln 2; 0: greedy
    keys,  # int64 [rows]
    block_max,  # results of `block_stats_kernel` at temperature 1
    block_weight, group_max,
    scores_out,  # float32 [rows * branches, COUNT]
    ids_out,  # int64 [rows * branches, COUNT]
    vocab, num_blocks, num_groups,
    BRANCHES: tl.constexpr, COUNT: tl.constexpr,
    PLACES: tl.constexpr,  # COUNT rounded up to a power of two
    BLOCKS: tl.constexpr,  # num_blocks rounded up to a power of two
    GROUPS: tl.constexpr,  # num_groups rounded up to a power of two
    SEARCHED: tl.constexpr,  # groups, a power of two
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows * branches. Scores are in units of ln 2 until they are stored."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    branch = tl.program_id(0)
    row = branch // BRANCHES
    blocks = tl.arange(0, BLOCKS)
    places = branch * num_blocks + blocks
    heights = tl.load(block_max + places, mask=blocks < num_blocks, other=MINUS_INFINITY)
    top = max_with_nan(heights, 0)
    is_drawn, scale, key = tl.load(temperature + row) > 0, load_inverse_temperature(temperature, row), tl.load(keys + row)

    groups = tl.arange(0, GROUPS)
    bounds = tl.load(group_max + branch * num_groups + groups, mask=groups < num_groups, other=MINUS_INFINITY) * scale
    if is_drawn:
        bounds -= tl.log2(min_of_group(key, groups))
    bounds = tl.where(bounds == bounds, tl.maximum(bounds, LOWEST_SCORE), float("inf"))
    bounds = tl.where(groups * GROUP < vocab, bounds, MINUS_INFINITY)
    lanes = tl.arange(0, SEARCHED)
    chosen = tl.full([SEARCHED], -1, tl.int32)
    for lane in range(SEARCHED):
        best, group = tl.max(bounds, 0, return_indices=True)
        chosen = tl.where(lanes == lane, tl.where(best > MINUS_INFINITY, group, -1), chosen)
        bounds = tl.where(groups == group, MINUS_INFINITY, bounds)

    columns = list_columns(chosen, GROUP)
    is_in = (chosen >= 0)[:, None] & (columns < vocab)
    values = tl.load(logits + branch.to(tl.int64) * stride + columns, mask=is_in, other=MINUS_INFINITY).to(tl.float32) - top
    if is_drawn:
        noise = noise_of_tokens(key, columns, min_of_group(key, chosen)[:, None], leader_of_group(key, chosen)[:, None])
        raced = tl.where(is_in, values * scale - noise, MINUS_INFINITY)
        first = tl.max(tl.max(raced, 1), 0)
        scores = (raced - first - tl.log2(tl.sum(tl.sum(tl.exp2(raced - first), 1), 0))) * _LN_2
    else:
        weights = tl.load(block_weight + places, mask=blocks < num_blocks, other=0.0)
        scores = values - tl.log2(tl.sum(weights * tl.exp2((heights - top) / _LN_2), 0)) * _LN_2
    scores = tl.where(is_in & (scores == scores), scores, MINUS_INFINITY)
    scores, columns = tl.reshape(scores, [SEARCHED * GROUP]), tl.reshape(tl.where(is_in, columns, vocab - 1), [SEARCHED * GROUP])
    order = tl.arange(0, PLACES)
    best_scores, best_ids = tl.full([PLACES], MINUS_INFINITY, tl.float32), tl.full([PLACES], 0, tl.int32)
    for place in range(COUNT):
        best = tl.max(scores, 0)
        column = tl.min(tl.where(scores == best, columns, NO_COLUMN), 0)
        best_scores, best_ids = tl.where(order == place, best, best_scores), tl.where(order == place, column, best_ids)
        scores = tl.where(columns == column, MINUS_INFINITY, scores)
    tl.store(scores_out + branch * COUNT + order, best_scores, mask=order < COUNT)
    tl.store(ids_out + branch * COUNT + order, best_ids.to(tl.int64), mask=order < COUNT)


def find_likeliest(
    logits: torch.Tensor, draws: tuple[torch.Tensor, torch.Tensor] | None, branches: int, count: int, searched: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rank_tokens`, to the rounding of float32 in the scores; of equal ones the least token comes
    first. logits: of any float dtype, columns contiguous. searched: groups of tokens of a branch
    that are examined, a power of two."""
    total, vocab = logits.shape
    if draws is None:
        draws = logits.new_zeros(total // branches, dtype=torch.float32), logits.new_zeros(total // branches, dtype=torch.int64)
    unit = torch.full((total,), _LN_2.value, dtype=torch.float32, device=logits.device)
    stats = compute_block_stats(logits, unit, with_groups=True, with_weights=True)
    assert stats.block_weight is not None and stats.group_max is not None
    scores = torch.empty(total // branches, branches, count, dtype=torch.float32, device=logits.device)
    ids = torch.empty_like(scores, dtype=torch.int64)
    num_groups = stats.group_max.shape[1]
    _rank_kernel[(total,)](
        logits, logits.stride(0), *draws, stats.block_max, stats.block_weight, stats.group_max, scores, ids,
        vocab, stats.num_blocks, num_groups, branches, count, next_power_of_2(count), next_power_of_2(stats.num_blocks),
        next_power_of_2(num_groups), searched, RACE_GROUP, **launch_options(logits.device, _WARPS),
    )  # fmt: skip
    return scores, ids

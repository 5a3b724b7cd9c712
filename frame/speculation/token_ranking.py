"""Finds the likeliest next tokens of the branches of a tree of drafted tokens.

Used by the passes of device drafters. Must not know a drafter or a batch.
"""

from __future__ import annotations

import math

import torch

from frame import kernels
from frame.core.sampling.gumbel_race import GROUP, find_heights, find_min, find_noise

SEARCHED = 32  # groups of tokens of a branch, at least as many as branches of a tree


def rank_tokens(
    logits: torch.Tensor, draws: tuple[torch.Tensor, torch.Tensor] | None, branches: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest next tokens of each branch: their log-probabilities, float32, and their
    ids, int64, [rows, branches, count] each; the likeliest first.

    logits: [rows * branches, vocab]. draws: the rows' temperatures, float32 [rows], times ln 2, 0:
    greedy; and keys, int64 [rows]; None: all rows are greedy. The tokens of other rows race with
    the row's key, and those that come first are the likelier ones. Only tokens of the SEARCHED
    groups that may have the greatest scores are examined: a sort of a whole vocabulary takes longer
    than a pass. NaN counts as the lowest score.
    """
    if kernels.can_use_triton(logits.device):
        from frame.kernels.sampling.token_ranking import find_likeliest

        return find_likeliest(logits, draws, branches, count, SEARCHED)
    return rank_with_torch(logits, draws, branches, count)


def rank_with_torch(
    logits: torch.Tensor, draws: tuple[torch.Tensor, torch.Tensor] | None, branches: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `rank_tokens`."""
    vocab = logits.shape[1]
    logits = logits.float()
    heights, logits = (each.unflatten(0, (-1, branches)) for each in (find_heights(logits), logits))
    bounds = heights
    if draws is not None:
        temperature, keys = draws[0].view(-1, 1, 1), draws[1]
        is_drawn = temperature > 0
        scale, minimum = torch.where(is_drawn, temperature, 1.0), find_min(keys, heights.shape[2]).unsqueeze(1)
        bounds = heights / scale - minimum.log2() * is_drawn
    groups = bounds.topk(min(SEARCHED, bounds.shape[2]), sorted=False).indices
    ids = (groups.unsqueeze(3) * GROUP + torch.arange(GROUP, device=groups.device)).flatten(2)
    is_beyond = ids >= vocab if vocab % GROUP else None
    values = logits.gather(2, ids if is_beyond is None else ids.clamp_(max=vocab - 1))
    if is_beyond is not None:
        values.masked_fill_(is_beyond, -torch.inf)
    best = heights.amax(2, keepdim=True)
    values -= best
    scores = values - (logits - best).exp_().sum(2, keepdim=True).log_()
    if draws is not None:
        noise = find_noise(keys, groups.flatten(1), minimum.expand_as(heights).gather(2, groups).flatten(1))
        raced = ((values / scale - noise.view_as(values)) * math.log(2.0)).log_softmax(2)
        scores = torch.where(is_drawn, raced, scores)
    scores, order = scores.nan_to_num_(nan=-torch.inf, neginf=-torch.inf).topk(count)
    return scores, ids.gather(2, order)

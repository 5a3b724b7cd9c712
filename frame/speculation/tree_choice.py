"""Chooses the branches that a pass of a tree extends, and the tokens that are drafted.

Of the candidates, the first `width` are the root's; then each branch that a pass extends has
`width` next ones, pass by pass. Used by the passes of device drafters. Must not know a drafter or a
batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from frame import kernels


@dataclass(frozen=True, slots=True)
class Branches:
    """The branches that a pass extends, [rows, width] each."""

    values: torch.Tensor  # float32; log-probabilities from the root
    ids: torch.Tensor  # int64; the last tokens
    numbers: torch.Tensor  # int64; these tokens among all candidates
    sources: torch.Tensor  # int64; the branches of the pass before that they follow, counted through all rows
    bits: torch.Tensor  # int32; see `TreeMask`


def begin_branches(values: torch.Tensor, ids: torch.Tensor) -> Branches:
    """The branches of the first pass, from the root's next tokens, [rows, width] each."""
    rows, width = ids.shape
    places = torch.arange(width, device=ids.device)
    sources = torch.arange(rows, device=ids.device).unsqueeze(1).expand(-1, width)
    return Branches(values, ids, places.expand(rows, -1), sources, ((-2 << places) | 1).int().expand(rows, -1))


def choose_branches(values: torch.Tensor, ids: torch.Tensor, before: Branches, start: int) -> Branches:
    """The likeliest branches of the next pass. values, ids: the tokens that follow `before`, [rows,
    width * width]. start: candidates before them."""
    width = before.ids.shape[1]
    if kernels.can_use_triton(ids.device):
        from frame.kernels.sampling.tree_choice import find_branches

        return Branches(*find_branches(values, ids, before.bits, start))
    values, chosen = values.topk(width)
    places, branch = torch.arange(width, device=ids.device), chosen // width
    sources = branch + torch.arange(0, ids.shape[0] * width, width, device=ids.device).unsqueeze(1)
    # a token sees what its parent sees, the parent at a greater distance, and itself
    bits = (before.bits.gather(1, branch) << (places + width - branch)) | 1
    return Branches(values, ids.gather(1, chosen), chosen + start, sources, bits.int())


def choose_nodes(values: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor, width: int, maximum: int) -> torch.Tensor:
    """The likeliest candidates and their parents as nodes, int64 [rows, 2, maximum]. values,
    ids: [rows, n]. numbers: those of the branches of all passes, [rows, (n - width) / width]. A
    token is no likelier than its parent, which comes before it, so it is also sorted after it."""
    if kernels.can_use_triton(ids.device):
        from frame.kernels.sampling.tree_choice import find_nodes

        return find_nodes(values, ids, numbers, width, maximum)
    order = values.argsort(dim=1, descending=True, stable=True)
    nodes = torch.empty_like(order).scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order))
    order = order[:, :maximum]
    if numbers.shape[1]:
        parents = nodes.gather(1, numbers).gather(1, (order // width - 1).clamp_(min=0)).masked_fill_(order < width, 0)
    else:
        parents = torch.zeros_like(order)
    return torch.stack((ids.gather(1, order), parents), 1)

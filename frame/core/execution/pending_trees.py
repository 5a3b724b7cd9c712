"""Trees of drafted tokens that the device alone has: what `build_trees` computes on the host, from
the parents in the device's table.

Used by `PendingRows`. Nothing waits for the device. Must not know a drafter or a request.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad


def trace_trees(parents: torch.Tensor, token_ids: torch.Tensor, exists: torch.Tensor, depth: int) -> dict[str, torch.Tensor]:
    """The fields of `DraftTrees` by name, int64 but for `branches`. parents, token_ids: int64
    [rows, width - 1], of the nodes from 1 on. exists: bool [rows, width], whether the row has the
    node. depth: of the deepest node, at most."""
    nodes, is_drafted = torch.arange(exists.shape[1], device=parents.device), exists[:, 1:]
    parents = pad(torch.where(is_drafted, parents, 0), (1, 0))
    branch = [nodes.expand_as(parents)]  # of each node: the node itself, its parent and so on, then 0
    for _ in range(depth):
        branch.append(parents.gather(1, branch[-1]))
    above = torch.stack(branch, 2)
    in_branch = above > 0
    depths = in_branch.sum(dim=2) * exists
    branches = torch.zeros(*parents.shape, len(nodes), dtype=torch.bool, device=parents.device).scatter_(2, above, in_branch)
    places = (depths.unsqueeze(2) - torch.arange(depth + 1, device=parents.device)).clamp_(min=0)
    seen = (in_branch.long() << (nodes.unsqueeze(1) - above)).sum(dim=2)
    return {
        "parents": parents,
        "depths": depths,
        "tokens": pad(torch.where(is_drafted, token_ids, -2), (1, 0), value=-2),
        "branches": branches | ~exists.unsqueeze(2),
        "paths": nodes.expand_as(branches).scatter(2, places, above),
        "bits": seen - (1 << nodes),  # and all tokens before the draft, and node 0
    }

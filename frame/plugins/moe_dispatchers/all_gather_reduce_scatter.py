"""`all_gather_reduce_scatter`: each rank computes its experts for all tokens; the sum over the
ranks is divided among them by tokens and gathered again.

Attention groups have different tokens, which are gathered before; each group gets the sums of its
own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement
from frame.plugins.moe_dispatchers.all_reduce import AllReduce


class AllGatherReduceScatter(AllReduce):
    """Both halves of the sum are collectives of their own. A rank of an attention group gathers
    and gets its share of the group's tokens."""

    only_sums: ClassVar[bool] = False

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        group, tp = self.context.experts, self.context.tp
        if group is None:
            return super().dispatch(x, ids, weights, placement)
        share = -(-len(x) // tp.size)
        shares = (_take_share(each, tp.rank, share, tp.size) for each in (x, ids, weights))
        gathered, ids, weights = (group.all_gather(each, dim=0) for each in shares)
        local = self.select(ids, weights, group.rank * placement.per_rank, placement.per_rank)
        return DispatchOutput(gathered, *local, state=len(x))

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        group, tp, count = self.context.experts, self.context.tp, len(out)
        if group is not None:
            summed = group.reduce_scatter(out, dim=0)
            return summed if tp.size == 1 else tp.all_gather(summed, dim=0)[: tokens.state]
        if tp.size == 1:
            return out
        padded = F.pad(out, (0, 0, 0, -count % tp.size))
        return tp.all_gather(tp.reduce_scatter(padded, dim=0), dim=0)[:count]


def _take_share(rows: torch.Tensor, rank: int, share: int, size: int) -> torch.Tensor:
    """The `share` rows of a rank, of `rows` padded with zeros for `size` ranks."""
    if size == 1:
        return rows
    return F.pad(rows, (0, 0, 0, share * size - len(rows)))[rank * share : (rank + 1) * share]

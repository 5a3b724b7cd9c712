"""`all_reduce`: each rank computes its experts, or its slice of every expert, for all tokens, and
the results are summed over the ranks."""

from __future__ import annotations

from typing import ClassVar

import torch

from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement, MoEDispatcher, select_local


class AllReduce(MoEDispatcher):
    """Moves no token. Does nothing on one rank."""

    only_sums: ClassVar[bool] = True

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        if placement.ranks > 1:
            ids, weights = select_local(ids, weights, self.context.tp.rank * placement.per_rank, placement.per_rank)
        return DispatchOutput(x, ids, weights)

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.all_reduce(out)

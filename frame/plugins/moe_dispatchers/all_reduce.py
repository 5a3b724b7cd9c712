"""`all_reduce`: each rank computes its experts, or its slice of every expert, for all tokens, and
the results are summed over the ranks."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import BaseModel

from frame import kernels
from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement, MoEDispatcher, select_local
from frame.core.interfaces.rank_context import RankContext


class AllReduce(MoEDispatcher):
    """Moves no token. Does nothing on one rank."""

    only_sums: ClassVar[bool] = True

    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.select = select_local
        if kernels.can_use_triton(context.device):
            from frame.kernels.moe.local_pairs import select_local_pairs

            self.select = select_local_pairs

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        if placement.ranks > 1:
            ids, weights = self.select(ids, weights, self.context.tp.rank * placement.per_rank, placement.per_rank)
        return DispatchOutput(x, ids, weights)

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.all_reduce(out)

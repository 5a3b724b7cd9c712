"""`all_reduce`: each rank holds a slice of every expert, and the results are summed over the
ranks."""

from __future__ import annotations

import torch

from frame.core.interfaces.moe import DispatchOutput, MoEDispatcher


class AllReduce(MoEDispatcher):
    """Tensor parallelism inside experts. Does nothing on one rank."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> DispatchOutput:
        return DispatchOutput(x, ids, weights)

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        return self.context.tp.all_reduce(out)

"""`all_gather_reduce_scatter`: each rank computes its experts for all tokens; the sum over the
ranks is divided among them by tokens and gathered again."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from frame.core.interfaces.moe import DispatchOutput
from frame.plugins.moe_dispatchers.all_reduce import AllReduce


class AllGatherReduceScatter(AllReduce):
    """Both halves of the sum are collectives of their own."""

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        tp, count = self.context.tp, len(out)
        if tp.size == 1:
            return out
        padded = F.pad(out, (0, 0, 0, -count % tp.size))
        return tp.all_gather(tp.reduce_scatter(padded, dim=0), dim=0)[:count]

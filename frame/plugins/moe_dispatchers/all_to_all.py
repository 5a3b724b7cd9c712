"""`all_to_all`: each rank sends its share of the tokens to the ranks of their experts, and gets the
results back (DeepSpeed-MoE, arXiv 2201.05596)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from frame.core.interfaces.moe import DispatchOutput, ExpertPlacement, MoEDispatcher, select_local


@dataclass(frozen=True, slots=True)
class Exchange:
    """One dispatch: `sources` int64 [sent], the token of each row that this rank sent, by target
    rank; the numbers of rows by rank; and the numbers of all tokens and of a rank's share."""

    sources: torch.Tensor
    sent: list[int]
    received: list[int]
    num_tokens: int
    share: int


class AllToAll(MoEDispatcher):
    """A token is sent once to each rank that holds one of its experts. The numbers of rows are read
    on the host."""

    def dispatch(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, placement: ExpertPlacement) -> DispatchOutput:
        tp, group, each = self.context.tp, self.context.ep_group, placement.per_rank
        if group.size == 1:
            return DispatchOutput(x, ids, weights)
        share = -(-len(x) // tp.size)
        mine = slice(tp.rank * share, (tp.rank + 1) * share)
        x, ids, weights, num_tokens = x[mine], ids[mine], weights[mine], len(x)
        is_sent = torch.zeros(group.size, len(x), dtype=torch.bool, device=x.device)
        is_sent[(ids // each).T, torch.arange(len(x), device=x.device)] = True
        counts = is_sent.sum(1)
        matrix = group.all_gather(counts[None], dim=0).tolist()  # [source][target]
        sent, received = matrix[group.rank], [row[group.rank] for row in matrix]
        sources = is_sent.nonzero()[:, 1]

        def exchange(rows: torch.Tensor) -> torch.Tensor:
            return group.all_to_all(rows.index_select(0, sources), sent, received)

        local = select_local(exchange(ids), exchange(weights), group.rank * each, each)
        return DispatchOutput(exchange(x), *local, state=Exchange(sources, sent, received, num_tokens, share))

    def combine(self, out: torch.Tensor, tokens: DispatchOutput) -> torch.Tensor:
        tp, state = self.context.tp, tokens.state
        if state is None:
            return out
        returned = self.context.ep_group.all_to_all(out, state.received, state.sent)
        summed = out.new_zeros(state.share, out.shape[1], dtype=torch.float32).index_add_(0, state.sources, returned.float())
        return tp.all_gather(summed.to(out.dtype), dim=0)[: state.num_tokens]

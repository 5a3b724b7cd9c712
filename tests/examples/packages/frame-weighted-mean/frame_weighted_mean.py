"""A pooler: the mean of a prompt's tokens with weights 1, 2, …, which sentence-transformers calls
`pooling_mode_weightedmean_tokens`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.interfaces.pooling import Pooler
from frame.registration import KindRegistry, hookimpl

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.batch import ForwardBatch


class WeightedMean(Pooler):
    """Token i of a prompt counts i times."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        import torch

        rows = torch.arange(batch.num_rows, device=hidden.device)
        rows = rows.repeat_interleave(batch.query_lens.long(), output_size=batch.num_tokens)
        weights = (batch.positions + 1).float()
        sums = hidden.new_zeros(batch.num_rows, hidden.shape[1], dtype=torch.float32)
        sums.index_add_(0, rows, hidden.float() * weights.unsqueeze(1))
        return sums / sums.new_zeros(batch.num_rows).index_add_(0, rows, weights).unsqueeze(1)


@hookimpl
def register_poolers(registry: KindRegistry) -> None:
    """Add `weightedmean`, the name that folders of sentence-transformers have for it."""
    registry.add("weightedmean", WeightedMean, api="pooler/1", summary="The mean of all tokens, of which later ones count more.")

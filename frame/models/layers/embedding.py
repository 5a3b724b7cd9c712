"""Token embedding and output head, split over the vocabulary. Both may share one parameter (tied
embeddings)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.models.layers.parameter import Range, ShardedParameter, ShardRule
from frame.models.layers.weights.layer_weight import LayerWeight
from frame.models.layers.weights.plain_product import PlainProduct

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.gemm_kernel import Product


def split_vocabulary(context: BuildContext, vocab_size: int) -> tuple[int, Range]:
    """(rows on every rank, this rank's range). The last ranks may hold padding, so any vocabulary
    size can be split."""
    rows = -(-vocab_size // context.tp.size)
    start = min(rows * context.tp.rank, vocab_size)
    return rows, Range(vocab_size, start, min(rows, vocab_size - start))


class VocabEmbedding(nn.Module):
    """ids int64 [tokens] -> [tokens, hidden]. Each rank looks up the ids that it holds; the sum
    over the ranks is the embedding."""

    def __init__(self, context: BuildContext, name: str, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.tp = context.tp
        rows, self.range = split_vocabulary(context, vocab_size)
        self.weight = ShardedParameter(torch.empty(rows, hidden_size, dtype=context.dtype), ShardRule(output=0))
        self.weight.bind(f"{name}.weight", self.range)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.range.start
        foreign = (local < 0) | (local >= self.range.size)
        rows = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill_(foreign.unsqueeze(-1), 0))


class Head(nn.Module):
    """[n, hidden] -> logits [n, vocab], the full vocabulary on every rank. With `tied`, the weight
    is that of the embedding."""

    def __init__(self, context: BuildContext, name: str, vocab_size: int, hidden_size: int, tied: VocabEmbedding | None = None) -> None:
        super().__init__()
        self.tp = context.tp
        self.vocab_size = vocab_size
        self.weights: LayerWeight | None = None
        self.product: Product | None = None
        if tied is not None:
            self.weight = tied.weight
            return
        rows, span = split_vocabulary(context, vocab_size)
        self.weights = LayerWeight(self, context, (name,), Range.whole(hidden_size), (rows,), "head")
        self.weights.bind(0, span, Range.whole(hidden_size))

    def finish(self) -> None:
        """Decode the loaded weights and select their product."""
        self.product = self.weights.finish() if self.weights is not None else PlainProduct(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.product(hidden)  # type: ignore[misc]
        if self.tp.size == 1:
            return logits
        return self.tp.all_gather(logits)[..., : self.vocab_size]

"""Token embedding and output head, split over the vocabulary. Both may share one parameter (tied
embeddings)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from frame.models.layers.parameter import Range, ShardedParameter, ShardRule, own_parameters
from frame.models.layers.plain_matmul import PlainMatmul

if TYPE_CHECKING:
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.quantization import LinearMethod


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
        self.method: LinearMethod | None = None
        if tied is not None:
            self.weight = tied.weight
            self.product = PlainMatmul(self.weight)
            return
        if context.quantization is None:
            raise TypeError("the build context of a model needs a quantization method (`none` for unquantized weights)")
        rows, span = split_vocabulary(context, vocab_size)
        self.method = context.quantization.linear(name, "head")
        self.method.create_weights(self, hidden_size, (rows,), context.dtype)
        for key, parameter in own_parameters(self):
            parameter.bind(f"{name}.{key}", span)

    def finish(self) -> None:
        """Let the quantization method repack the loaded weights."""
        if self.method is not None:
            self.method.process_weights(self)
        else:
            self.product = PlainMatmul(self.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.method.apply(self, hidden) if self.method is not None else self.product(hidden, self.weight)
        if self.tp.size == 1:
            return logits
        return self.tp.all_gather(logits)[..., : self.vocab_size]

"""The pooler `last`: the hidden state of the last token."""

from __future__ import annotations

import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.interfaces.pooling import Pooler


class LastToken(Pooler):
    """The token that attends to the whole text of a decoder."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return hidden.index_select(0, batch.logits_indices)

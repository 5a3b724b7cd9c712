"""The pooler `cls`: the hidden state of the first token."""

from __future__ import annotations

import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.interfaces.pooling import Pooler


class FirstToken(Pooler):
    """The token `[CLS]` of encoders."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return hidden.index_select(0, batch.query_starts[:-1].long())

"""The pooler `mean`: the mean of all tokens."""

from __future__ import annotations

import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.interfaces.pooling import Pooler


class Mean(Pooler):
    """The mean of each dimension, in float32."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return torch.segment_reduce(hidden.float(), "mean", lengths=batch.query_lens.long(), unsafe=True)

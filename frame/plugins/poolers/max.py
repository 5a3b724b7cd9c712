"""The pooler `max`: the maximum of all tokens."""

from __future__ import annotations

import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.interfaces.pooling import Pooler


class Max(Pooler):
    """The maximum of each dimension."""

    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return torch.segment_reduce(hidden.float(), "max", lengths=batch.query_lens.long(), unsafe=True)

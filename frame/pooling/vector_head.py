"""`VectorHead`: turns the hidden states of a step into the vector of each sequence, by a pooler and
the head of a classifier.

Used by `PoolingRunner`. Must not know a request, a page, or a pooler or model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.interfaces.pooling import Pooler

Head = Callable[[torch.Tensor], torch.Tensor]


class VectorHead:
    """`head` maps pooled hidden states to logits, of which the columns `label_ids` are kept (all if
    empty). `head` None: the pooled hidden states are the result. Activations and the scaling to
    length 1 are of the request, and follow on the host."""

    def __init__(self, pooler: Pooler, head: Head | None = None, label_ids: Sequence[int] = (), device: torch.device | None = None) -> None:
        self._pooler = pooler
        self._head = head
        self._labels = torch.tensor(label_ids, dtype=torch.int64, device=device) if label_ids else None

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden [tokens, hidden_size] -> float32 [rows of `batch.logits_indices`, width]."""
        pooled = self._pooler.pool(hidden, batch)
        if self._head is None:
            return pooled.float()
        logits = self._head(pooled.to(hidden.dtype)).float()
        return logits if self._labels is None else logits.index_select(-1, self._labels)

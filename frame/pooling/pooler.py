"""`Pooler`: turns the hidden states of a step into one vector per sequence, in batched tensor code.

Used by `PoolingRunner`. Must not know a request, a page or a model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import Pooling

Head = Callable[[torch.Tensor], torch.Tensor]


class Pooler:
    """`head` maps pooled hidden states to logits, of which the columns `label_ids` are kept (all if
    empty). `head` None: the pooled hidden states are the result. Activations and the scaling to
    length 1 are of the request, and follow on the host."""

    def __init__(
        self, pooling: Pooling, head: Head | None = None, label_ids: Sequence[int] = (), device: torch.device | None = None
    ) -> None:
        self._pooling = pooling
        self._head = head
        self._labels = torch.tensor(label_ids, dtype=torch.int64, device=device) if label_ids else None

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden [tokens, hidden_size] -> float32 [rows of `batch.logits_indices`, width]. Unless
        the mode is "last", the batch has only rows of whole prompts."""
        pooled = self._pool(hidden, batch)
        if self._head is not None:
            logits = self._head(pooled).float()
            return logits if self._labels is None else logits.index_select(-1, self._labels)
        return pooled.float()

    def _pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        mode = self._pooling.mode
        if mode == "last":
            return hidden.index_select(0, batch.logits_indices)
        if mode == "cls":
            return hidden.index_select(0, batch.query_starts[:-1].long())
        pooled = torch.segment_reduce(hidden.float(), mode, lengths=batch.query_lens.long(), unsafe=True)
        return pooled.to(hidden.dtype) if self._head is not None else pooled

"""The interface of poolers: how the hidden states of a sequence become one vector (kind `pooler`).

The runner of models that embed or classify calls it once a step. Imports no torch. Must not know a
request, a head, labels, or the scaling to length 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frame.core.interfaces.plugin import Anything

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class PoolerCapabilities(Anything):
    """What a pooler reads. False makes chunks of prompts and cached prefixes possible."""

    whole_prompts: bool = True  # it reads hidden states of other tokens than the last one


@dataclass(frozen=True, slots=True)
class PoolerContext:
    """What a pooler is built for."""

    hidden_size: int
    device: torch.device
    dtype: torch.dtype  # of the hidden states


class Pooler(ABC):
    """Pools the rows of a step.

    Contract: a vector depends on the hidden states of its own row alone, and on no earlier step.
    `hidden` is not changed. `pool` does device work only: no synchronization and no loop over rows.
    """

    def __init__(self, context: PoolerContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def pool(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """hidden [tokens, hidden_size] -> [n, hidden_size], any float dtype, a vector for each of
        `batch.logits_indices`, the last tokens of prompts that are complete, in their order.

        With `whole_prompts`, every row of the batch is a whole prompt: row r has the
        `batch.query_lens[r]` tokens from `batch.query_starts[r]` on, and n is the number of rows.
        Without, rows may also be a part of a prompt, of which the earlier tokens are not in
        `hidden`, and rows whose prompts are not complete have no vector."""

"""Logits processors (`logits_processor/1`) and grammars (`grammar/1`): what changes the distribution before a token is drawn.

Both work by slot and on whole batches; a request that needs none of them pays nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import SlotSetup
    from frame.core.sampling_params import SamplingParams

PROCESSOR_API = "logits_processor/1"
GRAMMAR_API = "grammar/1"


class LogitsProcessor(ABC):
    """Changes logits in place for the rows that want it.

    Laws: `wants` is pure and decides per request; `admit` and `release` keep state by slot, allocated on first use;
    `apply` is called only when a row of the batch wants it, with tensors (no per-request loop), and never synchronises;
    `observe` sees every token that is sampled for wanting slots, so that a re-admitted request has the same state.
    `eos_token_ids` are the model's end tokens, set once before the first `admit`.
    """

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, vocab_size: int, max_slots: int, device: torch.device, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def wants(self, params: SamplingParams) -> bool: ...

    @abstractmethod
    def admit(self, setup: SlotSetup) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """logits float32 [n, vocab]; the wanting rows int64 [m], their slots int64 [m], and the positions
        int64 [m] of the tokens to be sampled (prompt + output so far)."""

    @abstractmethod
    def observe(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """The tokens sampled for wanting slots, both int64 [m], on the device."""

    @abstractmethod
    def release(self, slot: int) -> None: ...


class Grammar(Protocol):
    """One request's constraint; host state."""

    def fill(self, mask: np.ndarray) -> bool:
        """Write the allowed-token bits into int32 [ceil(vocab / 32)]; False when everything is allowed."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance; False when the token breaks the grammar."""
        ...

    def is_finished(self) -> bool:
        """Whether only the end may follow."""
        ...


class GrammarBackend(ABC):
    """Compiles grammars. Law: a bad grammar raises ValueError with one sentence, and harms no other request."""

    def __init__(self, tokenizer: Any, vocab_size: int, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def compile(self, kind: str, source: str) -> Grammar:
        """kind: "json_schema", "json_object" (no source), "regex", "ebnf", "choice" (JSON list of texts) or "structural_tag" (JSON)."""

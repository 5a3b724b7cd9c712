"""Logits processors (`logits_processor/1`) and grammars (`grammar/2`): what changes the distribution before a token is drawn.

Both work by slot and on whole batches; a request that needs none of them pays nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    import numpy as np
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import SlotSetup
    from frame.core.interfaces.sampling_params import SamplingParams

PROCESSOR_API = "logits_processor/1"
GRAMMAR_API = "grammar/2"


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
    """One request's constraint; host state. `fill` and `accept` may raise ValueError, one sentence: the request ends with it. So it
    does with any other error, which is reported as the backend's fault. Calls for one request never overlap; `fill` for different
    requests of a step may, in threads of their own, so that what they share must bear it."""

    def fill(self, mask: np.ndarray) -> bool:
        """Write the allowed-token bits into int32 [ceil(vocab / 32)]; False when everything is allowed."""
        ...

    def accept(self, token_id: int) -> bool:
        """Advance; False when the token breaks the grammar."""
        ...

    def is_finished(self) -> bool:
        """Whether only the end may follow."""
        ...


class CompiledGrammar(Protocol):
    """A grammar, ready for any number of requests."""

    @property
    def num_bytes(self) -> int:
        """Roughly the memory that it holds."""
        ...

    def start(self) -> Grammar:
        """A constraint at its beginning; cheap."""
        ...


GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")


@dataclass(frozen=True, slots=True)
class GrammarCapabilities:
    """Which kinds of grammars a backend compiles."""

    kinds: tuple[str, ...] = GRAMMAR_KINDS

    def unsupported(self, requirements: Any) -> list[Reason]:
        return []  # a kind is a request's choice, not the server's


class GrammarBackend(ABC):
    """Compiles grammars. Law: a bad grammar raises ValueError with one sentence, and harms no other request.

    `compile` runs in a process of its own that ends when it takes too long or too much memory. What it made comes to the engine as
    `load(kind, source, dump(compiled))`, which must be quick: by default it compiles again, now that this is known to do no harm.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def compile(self, kind: str, source: str) -> CompiledGrammar:
        """kind: "json_schema", "json_object" (no source), "regex", "ebnf", "choice" (JSON list of texts) or "structural_tag" (JSON)."""

    def dump(self, compiled: CompiledGrammar) -> bytes:
        return b""

    def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
        return self.compile(kind, source)

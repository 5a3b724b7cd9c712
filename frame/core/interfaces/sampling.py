"""The interfaces of logits processors (kind `logits_processor`) and grammar backends (kind
`grammar_backend`), which change logits before sampling.

Processors keep state by slot and work on whole batches. A request that uses none of them costs
nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    import numpy as np
    import torch
    from pydantic import BaseModel

    from frame.core.interfaces.batch import SlotSetup
    from frame.core.interfaces.sampling_params import SamplingParams

# Fields of SamplingParams that logits processors implement; a record's capabilities name its own.
PROCESSOR_PARAMS = (
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "bad_words", "bad_words_ids", "min_tokens",
    "thinking_token_budget",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessorCapabilities:
    """The request parameters that a logits processor implements. A request with a parameter that no
    chosen processor implements is refused with status 400.

    `params`: fields of SamplingParams, of `PROCESSOR_PARAMS`. `custom`: keys of
    `SamplingParams.custom`; None: any key. Raises ValueError for a field that is not among
    `PROCESSOR_PARAMS`.
    """

    params: tuple[str, ...] = ()
    custom: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if unknown := [name for name in self.params if name not in PROCESSOR_PARAMS]:
            raise ValueError(f"params holds {unknown[0]!r}; a logits processor implements {', '.join(PROCESSOR_PARAMS)}, or keys of custom")

    def unsupported(self, requirements: Any) -> list[Reason]:
        return []  # each request chooses its parameters


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """The model and the slots that a logits processor is built for."""

    vocab_size: int
    max_slots: int
    device: torch.device
    eos_token_ids: tuple[int, ...] = ()  # of the model


class LogitsProcessor(ABC):
    """Changes logits in place for the rows whose request it applies to.

    Contract: `applies_to` is pure and decides per request. `add_slot` and `remove_slot` keep state
    by slot, allocated on first use. `apply` is called only if the processor applies to a row of the
    batch; it works on tensors, without a loop over requests, and never synchronises.
    `observe_tokens` gets every token sampled for its slots, so that a resumed request has the same
    state. An error that `add_slot` raises ends that request alone. One that `apply` or
    `observe_tokens` raises ends the requests of the batch that the processor applies to; the others
    continue.
    """

    def __init__(self, context: ProcessorContext, options: BaseModel | None = None) -> None: ...

    def validate_params(self, params: SamplingParams) -> None:
        """Raise ValueError with one sentence that names the field for parameters that the processor
        cannot use; the request is refused with status 400. Called before admission, for requests
        that it applies to. By default every parameter is taken."""

    @abstractmethod
    def applies_to(self, params: SamplingParams) -> bool: ...

    @abstractmethod
    def add_slot(self, setup: SlotSetup) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Change rows of logits, float32 [n, vocab]. rows, slots: int64 [m], the rows that it
        applies to and their slots. positions: int64 [m], of the tokens to be sampled (prompt +
        output so far)."""

    @abstractmethod
    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """The tokens sampled for these slots, each slot once. Both int64 [m], on the device."""

    @abstractmethod
    def remove_slot(self, slot: int) -> None: ...


MAX_ROLLBACK = 512  # tokens that a grammar must be able to undo


class Grammar(Protocol):
    """The constraint of one request; host state.

    `fill_mask` and `accept_token` may raise ValueError with one sentence, which ends the request.
    With speculative decoding, drafted tokens are accepted, masks are filled along them, and
    `rollback_tokens` undoes them.
    Any other error also ends it, as a fault of the backend. Calls for one request never overlap.
    Threads call `fill_mask` for different requests at once, so shared data must be thread-safe.
    """

    def fill_mask(self, mask: np.ndarray) -> bool:
        """Write the bits of the allowed tokens into int32 [ceil(vocab / 32)]. -> False when every
        token is allowed."""
        ...

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token. -> False when the grammar does not allow it."""
        ...

    def is_finished(self) -> bool:
        """Whether only an end token may follow."""
        ...

    def rollback_tokens(self, count: int) -> None:
        """Undo the last `count` tokens that `accept_token` took, end tokens included. count: 0 to
        `MAX_ROLLBACK`, and no more than were taken. Masks and results are then as before these
        tokens."""
        ...


class MaskBatch(Protocol):
    """Fills the masks of many requests in one call, with threads of its own and without the
    interpreter's lock. Grammars that share one are filled together."""

    def fill_masks(self, handles: Sequence[Any], rows: Sequence[int], masks: np.ndarray) -> None:
        """Write the mask of each handle, from `BatchedGrammar.start_mask`, into its row of masks,
        int32 [n, ceil(vocab / 32)], C-contiguous."""
        ...


class BatchedGrammar(Grammar, Protocol):
    """A `Grammar` whose masks a `MaskBatch` can fill. Its `accept_token` is called in the engine's
    thread and must be quick.

    `start_mask`, the batch and `finish_mask` have the effect of `fill_mask`. No other call comes
    between them. `fill_mask` may be called after `start_mask` instead.

    It may have `num_measured`: masks that requests share and that took a short time, since the last
    one that took longer. Such a request need not be measured before its masks are filled in
    batches, and is not preempted because other masks are quicker: each mask is computed once.
    """

    @property
    def batch(self) -> MaskBatch | None:
        """None: the masks are filled by `fill_mask` only."""
        ...

    def start_mask(self, mask: np.ndarray) -> Any:
        """-> The handle to fill the mask with. None: `mask` holds it already."""
        ...

    def finish_mask(self, mask: np.ndarray, seconds: float) -> bool:
        """Complete the mask that the batch has written. seconds: CPU time that it is estimated to
        have taken. -> As `fill_mask`."""
        ...


class CompiledGrammar(Protocol):
    """A compiled grammar, which any number of requests may use."""

    @property
    def num_bytes(self) -> int:
        """Approximate memory use. It may grow while requests use the grammar: the cache reads it
        again."""
        ...

    def start(self) -> Grammar:
        """A new constraint at the start of the output; cheap."""
        ...


GRAMMAR_KINDS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")


@dataclass(frozen=True, slots=True)
class GrammarCapabilities:
    """The grammar kinds that a backend compiles."""

    kinds: tuple[str, ...] = GRAMMAR_KINDS

    def unsupported(self, requirements: Any) -> list[Reason]:
        return []  # each request chooses its kind


@dataclass(frozen=True, slots=True)
class GrammarContext:
    """The tokens that a grammar backend compiles for.

    without_limits: enters a context without the limits on time and memory of a compilation. A
    `compile` that needs a library which is slow to load imports it there. threads: that compute
    masks in this process; None: as the host has cores.
    """

    tokenizer: Any  # frame.text.tokenizer.Tokenizer.backend; its `eos_token_ids` below vocab_size may end an output
    vocab_size: int  # tokens in a mask; may exceed the tokenizer's
    without_limits: Callable[[], AbstractContextManager[None]] = nullcontext
    threads: int | None = None


class GrammarBackend(ABC):
    """Compiles grammars. Contract: one that is invalid, or that the backend cannot enforce, raises
    ValueError with one sentence, and affects no other request.

    `compile` runs in a separate process with limits on time and memory. The engine then calls
    `load(kind, source, dump(compiled))`, which must be fast. By default `load` compiles again,
    after `compile` has shown that the limits suffice.
    """

    def __init__(self, context: GrammarContext, options: BaseModel | None = None) -> None: ...

    @abstractmethod
    def compile(self, kind: str, source: str) -> CompiledGrammar:
        """kind: "json_schema", "json_object" (no source), "regex", "ebnf", "choice" (JSON list of
        texts) or "structural_tag" (JSON; the JSON of a tag may have a space after "," and ":")."""

    def dump(self, compiled: CompiledGrammar) -> bytes:
        return b""

    def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
        return self.compile(kind, source)

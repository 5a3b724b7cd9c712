"""What running requests' grammars allow, and what becomes of a grammar whose masks cannot be had. Knows no scheduler and no compiler."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from frame.core.request_table import GRAMMAR

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar
    from frame.core.request_table import RequestTable

BAD_GRAMMAR = "invalid grammar"  # prefix of `Finish.error`, so that the HTTP side answers 400
BROKEN_GRAMMAR = "the sampled token breaks the request's grammar; this is a fault of the grammar backend or of a logits processor"
SLOWEST = 1.0  # seconds of CPU for one mask; everybody waits for it, so a grammar that takes longer ends its request


def sentence_of(error: Exception) -> str:
    """Why a request has no grammar: a ValueError is about the grammar itself, anything else is its backend's fault."""
    return f"{BAD_GRAMMAR}: {error}" if isinstance(error, ValueError) else f"the grammar backend failed: {type(error).__name__}: {error}"


class FailedGrammar:
    """Stands for a grammar whose mask could not be had: allows everything, and ends the request at its next token."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fill(self, mask: np.ndarray) -> bool:
        return False

    def accept(self, token_id: int) -> bool:
        raise self._error

    def is_finished(self) -> bool:
        return False


def fill_masks(table: RequestTable, slots: np.ndarray, vocab_size: int) -> np.ndarray | None:
    """The allowed tokens of the slots as bits, int32 [slots, ceil(vocab / 32)]; rows without a grammar allow everything.
    None when no slot has a grammar."""
    constrained = np.flatnonzero(table.arrays.special[slots] & GRAMMAR)
    if not constrained.size:
        return None
    mask = np.full((len(slots), -(-vocab_size // 32)), -1, np.int32)
    last = time.thread_time()  # a process that was stopped, or has no core, is not the grammar's fault
    for i in constrained.tolist():
        request = table.requests[int(slots[i])]
        if request is None or request.grammar is None:  # it has left since the step was built
            continue
        try:
            is_limited = request.grammar.fill(mask[i])
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            request.grammar, is_limited = FailedGrammar(error), False
        if not is_limited:
            mask[i] = -1
        now = time.thread_time()
        if now - last > SLOWEST:
            sentence = f"one token takes {now - last:.1f} s to look for, the limit is {SLOWEST:g} s; simplify it"
            request.grammar = FailedGrammar(ValueError(sentence))
        last = now
    return mask


def advance(grammar: Grammar, token: int) -> tuple[bool, str]:
    """Take a sampled token in. -> (whether only the end may follow, why the request must end with an error: "" when it need not)."""
    try:
        if not grammar.accept(token):
            return False, BROKEN_GRAMMAR
        return grammar.is_finished(), ""
    except Exception as error:  # noqa: BLE001 - as above
        return False, sentence_of(error)


def replay(grammar: Grammar, tokens: Iterable[int]) -> str:
    """Bring a grammar to where a request was that comes back with output. -> why it cannot be; "" when it is there."""
    try:
        return "" if all(grammar.accept(token) for token in tokens) else BROKEN_GRAMMAR
    except Exception as error:  # noqa: BLE001 - as above
        return sentence_of(error)

"""What running requests' grammars allow, and what becomes of a grammar whose masks cannot be had. Knows no scheduler and no compiler."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from frame.core.request_table import GRAMMAR

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar
    from frame.core.request import Request
    from frame.core.request_table import RequestTable

    Rows = deque[tuple[Request, np.ndarray]]  # whose mask, and where it goes

BAD_GRAMMAR = "invalid grammar"  # prefix of `Finish.error`, so that the HTTP side answers 400
BROKEN_GRAMMAR = "the sampled token breaks the request's grammar; this is a fault of the grammar backend or of a logits processor"
SLOWEST = 1.0  # seconds of CPU for one mask; everybody waits for it, so a grammar that takes longer ends its request
MOST_THREADS = 8
SHARE = 250e-6  # CPU seconds of a step's masks for each thread that fills them; to call one costs about 50 microseconds
PAYING = 0.85  # of the CPU seconds: several threads that need more of the clock than this do not pay
STEPS_ALONE = 8  # until several threads are tried again


def sentence_of(error: BaseException) -> str:
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


class MaskFiller:
    """Makes the masks of steps, by several threads while that is seen to pay. `close` ends the threads.

    Grammars spend their time outside of the interpreter's lock where they are native; those that do not, or share a lock of their own,
    and machines that are busy, are found out by the clock. What a row's mask is, and what becomes of a row that fails, does not depend
    on who filled it. `threads`: how many at most, this one too; by default as many as there are cores, up to `MOST_THREADS`.
    """

    def __init__(self, threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = threads or min(MOST_THREADS, cores)
        self._pool: ThreadPoolExecutor | None = None
        self._row_cost = 0.0  # CPU seconds of one of the last step's masks
        self._steps_alone = 0  # to come, since help did not pay

    def fill(self, table: RequestTable, slots: np.ndarray, vocab_size: int) -> np.ndarray | None:
        """The allowed tokens of the slots as bits, int32 [slots, ceil(vocab / 32)]; rows without a grammar allow everything.
        None when no slot has a grammar."""
        constrained = np.flatnonzero(table.arrays.special[slots] & GRAMMAR)
        if not constrained.size:
            return None
        mask = np.full((len(slots), -(-vocab_size // 32)), -1, np.int32)
        requests = [(table.requests[int(slots[i])], i) for i in constrained.tolist()]
        rows: Rows = deque((request, mask[i]) for request, i in requests if request is not None and request.grammar is not None)
        began, count = time.perf_counter(), len(rows)
        helpers, cost = self._call_helpers(rows, self._row_cost), 0.0
        if not helpers:
            cost = fill_rows(rows, SHARE)
            helpers = self._call_helpers(rows, cost / max(1, count - len(rows)))
        cost += fill_rows(rows)
        cost += sum(helper.result() for helper in helpers if not helper.cancel())  # who has not begun finds nothing left
        if not helpers:
            self._steps_alone = max(0, self._steps_alone - 1)
        elif cost > 2 * SHARE and time.perf_counter() - began > PAYING * cost:
            self._steps_alone = STEPS_ALONE
        self._row_cost = cost / max(1, count)
        return mask

    def close(self) -> None:
        """End the threads; masks are made without them from here on."""
        self._threads = 1
        if self._pool is not None:
            self._pool.shutdown()

    def _call_helpers(self, rows: Rows, row_cost: float) -> list[Future[float]]:
        """Threads that fill rows beside this one: as many as the rows are worth at so many CPU seconds each."""
        count = min(self._threads, len(rows), int(len(rows) * row_cost / SHARE)) - 1
        if count < 1 or self._steps_alone:
            return []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="masks")
        return [self._pool.submit(fill_rows, rows) for _ in range(count)]


def fill_rows(rows: Rows, enough: float = math.inf) -> float:
    """Fill masks until none is left, or so many CPU seconds are spent. Several threads may take from the same rows. -> CPU seconds of
    this thread."""
    first = last = time.thread_time()  # a process that was stopped, or has no core, is not the grammar's fault
    while rows and last - first < enough:
        try:
            request, mask = rows.popleft()
        except IndexError:  # another thread took the last one
            break
        _fill_row(request, mask)
        now = time.thread_time()
        if now - last > SLOWEST:
            sentence = f"one token takes {now - last:.1f} s to look for, the limit is {SLOWEST:g} s; simplify it"
            request.grammar = FailedGrammar(ValueError(sentence))
        last = now
    return last - first


def _fill_row(request: Request, mask: np.ndarray) -> None:
    """One request's mask; a grammar that raises is replaced."""
    assert request.grammar is not None
    try:
        is_limited = request.grammar.fill(mask)
    except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
        request.grammar, is_limited = FailedGrammar(error), False
    if not is_limited:
        mask[:] = -1


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

"""What running requests' grammars do in a step: they take the drawn tokens in, and say what may come next. Calls run in threads, and
no step waits for a slow one: its request is held until the call is done. Used by the scheduler. Knows no compiler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frame.core.grammars.grammar_threads import NICENESS, GrammarThreads, ThreadedCall
from frame.core.messages import Finish
from frame.core.scheduling.request import GrammarState, queue_full
from frame.core.scheduling.request_slots import GRAMMAR

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import Grammar
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.scheduling.request import Request
    from frame.core.scheduling.request_slots import RequestTable

BROKEN_GRAMMAR = Finish(
    "error", error="the sampled token breaks the request's grammar; this is a fault of the grammar backend or of a logits processor"
)
MOST_THREADS = 8
SHARE = 250e-6  # CPU seconds of a step's calls for each thread that makes them; to call one costs about 50 microseconds
SLOW = 0.002  # CPU seconds of a call; the next one of that request runs beside the steps
CROWDED = 0.004  # CPU seconds of a step's calls, from which on a quarter of that is slow
TOKEN_ALLOWANCE = 0.002  # seconds that each token adds to a grammar's budget
PATIENCE = 10.0  # seconds that a request waits for a thread while other grammars keep all of them


def grammar_error(error: BaseException, params: SamplingParams) -> Finish:
    """How a request ends whose grammar raised `error`: a ValueError means that the grammar is invalid, any other error is the backend's."""
    if isinstance(error, ValueError):
        kind = params.grammar[0] if params.grammar is not None else None
        return Finish("error", error=f"invalid grammar: {error}", code="invalid_grammar", param=kind)
    return Finish("error", error=f"the grammar backend failed: {type(error).__name__}: {error}")


class GrammarMeter:
    """The CPU seconds that a request's grammar has taken, and may take: `budget` and a little more for each token."""

    def __init__(self, budget: float, spent: float = 0.0) -> None:
        self.spent = spent
        self.num_tokens = 0
        self._budget = budget

    def charge(self, seconds: float) -> None:
        """Raise ValueError when the budget is spent."""
        self.spent += seconds
        self.check()

    def check(self, more: float = 0.0) -> None:
        """Raise ValueError when the budget would be spent with so many seconds more."""
        if self.spent + more > self._budget + TOKEN_ALLOWANCE * self.num_tokens:
            raise ValueError(
                f"the grammar takes more CPU time than its budget of {self._budget:g} s (sampling.grammar_budget), and "
                f"{1000 * TOKEN_ALLOWANCE:g} ms a token; simplify it"
            )


class MeteredGrammar:
    """A `Grammar` that is charged for its calls. It raises ValueError when its budget is spent."""

    def __init__(self, grammar: Grammar, meter: GrammarMeter) -> None:
        self.meter = meter
        self._grammar = grammar

    def fill(self, mask: np.ndarray) -> bool:
        began = time.thread_time()
        is_limited = self._grammar.fill(mask)
        self.meter.charge(time.thread_time() - began)
        return is_limited

    def accept(self, token_id: int) -> bool:
        began = time.thread_time()
        is_taken = self._grammar.accept(token_id)
        self.meter.num_tokens += 1
        self.meter.charge(time.thread_time() - began)
        return is_taken

    def is_finished(self) -> bool:
        began = time.thread_time()
        is_finished = self._grammar.is_finished()
        self.meter.charge(time.thread_time() - began)
        return is_finished


class GrammarCall(ThreadedCall):
    """Accepts a token (None: there is none) and fills the next mask, int32 [words]. `end`: how the token ends the request, if it does;
    `mask_error`: how the request ends because there is no next mask."""

    def __init__(self, request: Request, token: int | None, words: int) -> None:
        super().__init__()
        self.request = request
        self.mask = np.empty(words, np.int32)
        self.end: Finish | None = None
        self.mask_error: Finish | None = None
        self.token = token
        meter = getattr(request.grammar, "meter", None)
        self._meter: GrammarMeter | None = meter
        self._spent = 0.0 if meter is None else meter.spent

    def over_budget(self) -> Finish | None:
        """How the request ends because this call, which still runs, has spent its budget. None: it has not."""
        if self._meter is None:
            return None
        try:
            self._meter.check(self._spent + self.cpu_seconds() - self._meter.spent)  # what it has charged already counts once
        except ValueError as error:
            return grammar_error(error, self.request.params)
        return None

    def call(self) -> None:
        grammar = self.request.grammar
        assert grammar is not None
        if self.token is not None:
            self.end = advance(grammar, self.token, self.request.params)
        if self.end is not None:
            return
        try:
            if not grammar.fill(self.mask):
                self.mask[:] = -1
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            self.mask_error = grammar_error(error, self.request.params)


class GrammarCalls:
    """The calls of a scheduler's steps. Requests that must leave the device are in `take_stopped` after each; those that wait for a call
    come back from `settle`. What a mask is does not depend on the thread that made it."""

    def __init__(self, vocab_size: int, threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._words = -(-vocab_size // 32)
        self._quick = GrammarThreads(threads or min(MOST_THREADS, cores))
        self._slow = GrammarThreads(2, NICENESS)
        self._held: dict[str, GrammarCall] = {}
        self._stopped: list[Request] = []

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    def accept(self, drawn: Sequence[tuple[Request, int]]) -> list[Finish | None]:
        """Accept sampled tokens. -> of each: how it ends its request; None: the request goes on."""
        calls = {i: GrammarCall(*each, self._words) for i, each in enumerate(drawn) if state_of(each[0]).error is None}
        self._run(list(calls.values()))
        return [_result(calls.get(i), request) for i, (request, _) in enumerate(drawn)]

    def fill(self, table: RequestTable, slots: np.ndarray) -> np.ndarray | None:
        """The allowed tokens of the slots as bits, int32 [slots, words]; rows without a grammar allow everything. None when no slot has
        a grammar."""
        constrained = np.flatnonzero(table.arrays.special[slots] & GRAMMAR)
        if not constrained.size:
            return None
        mask = np.full((len(slots), self._words), -1, np.int32)
        calls: dict[int, GrammarCall] = {}
        for i in constrained.tolist():
            request = table.requests[int(slots[i])]  # None: it has ended
            if request is None or request.grammar is None:
                continue
            state = state_of(request)
            if state.mask is not None:
                mask[i], state.mask = state.mask, None
            elif state.error is None:
                calls[i] = GrammarCall(request, None, self._words)
        self._run(list(calls.values()))
        for i, call in calls.items():
            state = state_of(call.request)
            if state.mask is not None:
                mask[i], state.mask = state.mask, None
        return mask

    def take_stopped(self) -> list[Request]:
        """Requests that must leave the device and be held, since a call of theirs is slow."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def hold(self, request: Request) -> None:
        """Keep a request that has left the device."""
        call = state_of(request).call
        assert isinstance(call, GrammarCall)
        self._held[request.rid] = call

    def settle(self) -> list[tuple[Request, Finish | None]]:
        """Held requests that need be held no longer, with their end, or None: they go on."""
        found = [(call.request, outcome) for call in self._held.values() if (outcome := self._outcome(call)) is not None]
        for request, _ in found:
            self.drop(request)
        return [(request, outcome if isinstance(outcome, Finish) else None) for request, outcome in found]

    def drop(self, request: Request) -> bool:
        """Hold a request no longer; whether it was held. What its call does is not waited for."""
        call = self._held.pop(request.rid, None)
        if call is None:
            return False
        self._slow.leave(call)  # one that the other threads left already knows it
        state_of(request).call = None
        return True

    def close(self) -> None:
        """End the threads."""
        self._quick.close()
        self._slow.close()

    def _run(self, calls: list[GrammarCall]) -> None:
        """Run calls, and wait for those that are likely to be quick."""
        quick = []
        for call in calls:
            state = state_of(call.request)
            if state.is_slow:
                self._slow.begin([call])
                self._stop(call)
            else:
                quick.append(call)
        if not quick:
            return
        self._quick.wait(self._quick.begin(quick, 1 + int(sum(state_of(call.request).seconds for call in quick) / SHARE)))
        is_crowded = sum(call.cpu_seconds() for call in quick) > CROWDED
        for call in quick:
            if call.is_finished:
                self._note(call, SLOW / 4 if is_crowded else SLOW)
            else:
                self._stop(call if call.thread is not None else self._begin_slow(call))

    def _begin_slow(self, call: GrammarCall) -> GrammarCall:
        """A call in place of one that never begins, since all threads are busy: it runs when there is one."""
        again = GrammarCall(call.request, call.token, self._words)
        self._slow.begin([again])
        return again

    def _stop(self, call: GrammarCall) -> None:
        state_of(call.request).call = call
        self._stopped.append(call.request)

    def _note(self, call: GrammarCall, slow: float) -> None:
        state = state_of(call.request)
        state.seconds, state.is_slow = call.seconds, call.seconds > slow
        state.error = call.mask_error
        state.mask = call.mask if call.end is None and call.mask_error is None else None

    def _outcome(self, call: GrammarCall) -> Finish | bool | None:
        """Of a held request: its end; true: it goes on; None: it is held."""
        if call.is_finished:
            self._note(call, SLOW)
            return call.end or call.mask_error or True
        if (finish := call.over_budget()) is not None:  # it may be a call that never ends
            return finish
        if call.thread is None and time.monotonic() - call.queued_at > PATIENCE:
            return queue_full("other grammars keep the threads busy")
        return None


def _result(call: GrammarCall | None, request: Request) -> Finish | None:
    if call is None:
        return state_of(request).error
    return call.end if call.is_finished else None


def state_of(request: Request) -> GrammarState:
    """Made when it is asked for first: most requests have no grammar."""
    if request.grammar_state is None:
        request.grammar_state = GrammarState()
    return request.grammar_state


def advance(grammar: Grammar, token: int, params: SamplingParams) -> Finish | None:
    """Accept a sampled token. -> how it ends the request (reason "stop" where nothing may follow); None: the request goes on."""
    try:
        if not grammar.accept(token):
            return BROKEN_GRAMMAR
        return Finish("stop") if grammar.is_finished() else None
    except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
        return grammar_error(error, params)


def replay(grammar: Grammar, tokens: Iterable[int], params: SamplingParams) -> Finish | None:
    """Accept the output of a recovered request, from the grammar's start. -> how the request ends where that fails; None: it goes on."""
    try:
        return None if all(grammar.accept(token) for token in tokens) else BROKEN_GRAMMAR
    except Exception as error:  # noqa: BLE001 - as above
        return grammar_error(error, params)

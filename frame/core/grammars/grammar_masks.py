"""Grammars of running requests in a step: accepts sampled tokens and fills token masks.

Calls run in threads. A step does not wait for a slow call: its request is held until the call ends.
Used by the scheduler. Must not know the compiler.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from frame.core.blame import explain
from frame.core.grammars.draft_masks import fill_draft_masks
from frame.core.grammars.grammar_threads import NICENESS, GrammarThreads, ThreadedCall
from frame.core.interfaces.drafter import Drafts
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
MAX_THREADS = 8
SECONDS_PER_THREAD = 0.0005  # CPU seconds of a step's calls per thread; threads wait for each other's use of the interpreter
SLOW_SECONDS = 0.004  # mean CPU seconds of a request's calls, above which its next call runs beside the steps
CROWDED_SECONDS = 0.004  # CPU seconds of a step's calls per thread, above which `HEAVY_SECONDS` may count as slow
HEAVY_SECONDS = 0.0005  # mean CPU seconds of a request's calls
MEAN_WEIGHT = 0.1  # of the last call in the mean
TOKEN_ALLOWANCE = 0.002  # seconds that each token adds to a grammar's budget
THREAD_TIMEOUT = 10.0  # seconds that a request waits for a thread


def grammar_error(error: BaseException, params: SamplingParams) -> Finish:
    """How a request ends whose grammar raised `error`. ValueError: the grammar is invalid; other
    errors are faults of the backend."""
    if isinstance(error, ValueError):
        kind = params.grammar[0] if params.grammar is not None else None
        return Finish("error", error=f"invalid grammar: {error}", code="invalid_grammar", param=kind)
    return Finish("error", error=f"the grammar backend failed: {explain(error)}")


class GrammarMeter:
    """CPU seconds of a request's grammar: used, and allowed (`budget` plus `TOKEN_ALLOWANCE` for
    each token)."""

    def __init__(self, budget: float, spent: float = 0.0) -> None:
        self.spent = spent
        self.num_tokens = 0
        self._budget = budget

    def charge(self, seconds: float) -> None:
        """Add CPU seconds. Raises ValueError when the budget is exceeded."""
        self.spent += seconds
        self.check()

    def check(self, more: float = 0.0) -> None:
        """Raise ValueError when `more` seconds would exceed the budget."""
        if self.spent + more > self._budget + TOKEN_ALLOWANCE * self.num_tokens:
            raise ValueError(
                f"the grammar takes more CPU time than its budget of {self._budget:g} s (sampling.grammar_budget), and "
                f"{1000 * TOKEN_ALLOWANCE:g} ms a token; simplify it"
            )


class MeteredGrammar:
    """A `Grammar` whose calls are charged to a meter. Raises ValueError when the budget is
    exceeded."""

    def __init__(self, grammar: Grammar, meter: GrammarMeter) -> None:
        self.meter = meter
        self._grammar = grammar

    def fill_mask(self, mask: np.ndarray) -> bool:
        began = time.thread_time()
        is_limited = self._grammar.fill_mask(mask)
        self.meter.charge(time.thread_time() - began)
        return is_limited

    def accept_token(self, token_id: int) -> bool:
        began = time.thread_time()
        is_taken = self._grammar.accept_token(token_id)
        self.meter.num_tokens += 1
        self.meter.charge(time.thread_time() - began)
        return is_taken

    def is_finished(self) -> bool:
        began = time.thread_time()
        is_finished = self._grammar.is_finished()
        self.meter.charge(time.thread_time() - began)
        return is_finished

    def rollback_tokens(self, count: int) -> None:
        self._grammar.rollback_tokens(count)
        self.meter.num_tokens -= count


class GrammarCall(ThreadedCall):
    """Accepts tokens and fills the next mask, int32 [words]. `end`: how the last token ends the
    request, if it does; `mask_error`: how the request ends when the mask could not be filled."""

    def __init__(self, request: Request, tokens: Sequence[int], words: int) -> None:
        super().__init__()
        self.request = request
        self.mask = np.empty(words, np.int32)
        self.end: Finish | None = None
        self.mask_error: Finish | None = None
        self.tokens = tokens
        meter = getattr(request.grammar, "meter", None)
        self._meter: GrammarMeter | None = meter
        self._spent = 0.0 if meter is None else meter.spent

    def check_budget(self) -> Finish | None:
        """How the request ends when this running call has exceeded the budget. None: it has not."""
        if self._meter is None:
            return None
        try:
            self._meter.check(self._spent + self.cpu_seconds() - self._meter.spent)  # avoids counting twice what it has charged
        except ValueError as error:
            return grammar_error(error, self.request.params)
        return None

    def execute(self) -> None:
        grammar = self.request.grammar
        assert grammar is not None
        for token in self.tokens:
            self.end = accept_token(grammar, token, self.request.params)
            if self.end is not None:
                return
        try:
            if not grammar.fill_mask(self.mask):
                self.mask[:] = -1
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            self.mask_error = grammar_error(error, self.request.params)


class DraftCall(GrammarCall):
    """Fills the masks along a draft and undoes it. `path`: int32 [k + 1, words]; `num_allowed`:
    drafted tokens that the grammar allows; `is_known`: see `fill_draft_masks`."""

    def __init__(self, request: Request, draft: Sequence[int], words: int) -> None:
        super().__init__(request, (), words)
        self.path = np.empty((len(draft) + 1, words), np.int32)
        self.num_allowed, self.is_known = 0, False
        self._draft, self._first = draft, get_grammar_state(request).mask

    def execute(self) -> None:
        assert self.request.grammar is not None
        try:
            self.num_allowed, self.is_known = fill_draft_masks(self.request.grammar, self._draft, self._first, self.path)
            self.mask = self.path[0]
            if self._meter is not None:
                self._meter.spent = self._spent  # drafts do not use up the request's budget
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            self.mask_error = grammar_error(error, self.request.params)


class GrammarCalls:
    """Makes the grammar calls of a scheduler's steps. After each step `take_stopped` returns the
    requests that must leave the device because of a slow call, and `take_settled` those whose slow
    call has ended. Masks do not depend on the thread that computes them."""

    def __init__(self, vocab_size: int, threads: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._words = -(-vocab_size // 32)
        self._quick = GrammarThreads(threads or min(MAX_THREADS, cores))
        self._slow = GrammarThreads(2, NICENESS)
        self._held: dict[str, GrammarCall] = {}
        self._stopped: list[Request] = []

    def __len__(self) -> int:
        """The number of held requests."""
        return len(self._held)

    def accept_tokens(self, drawn: Sequence[tuple[Request, Sequence[int]]], num_rows: int) -> list[Finish | None]:
        """Accept sampled tokens, of which only a request's last may end it. Returns for each
        request how it ends. None: it continues. num_rows: rows of the step, with and without a
        grammar."""
        calls = {i: GrammarCall(*each, self._words) for i, each in enumerate(drawn) if get_grammar_state(each[0]).error is None}
        self._run(list(calls.values()), num_rows)
        return [_result(calls.get(i), request) for i, (request, _) in enumerate(drawn)]

    def fill_masks(self, table: RequestTable, slots: np.ndarray) -> np.ndarray | None:
        """Return the allowed tokens of the slots as bits, int32 [slots, words]. Rows without a
        grammar allow all tokens. None: no slot has a grammar."""
        constrained = np.flatnonzero(table.arrays.special[slots] & GRAMMAR)
        if not constrained.size:
            return None
        mask = np.full((len(slots), self._words), -1, np.int32)
        calls: dict[int, GrammarCall] = {}
        firsts = constrained[np.flatnonzero(np.diff(slots[constrained], prepend=-1))]  # a row with a draft has several samples
        for i in firsts.tolist():
            request = table.requests[int(slots[i])]  # None: it has finished
            if request is None or request.grammar is None:
                continue
            state = get_grammar_state(request)
            if state.path is not None and i + 1 < len(slots) and slots[i + 1] == slots[i]:
                samples = np.flatnonzero(slots[i : i + len(state.path)] == slots[i])  # fewer than masks if pages were short
                mask[i + samples], state.path, state.mask = state.path[: len(samples)], None, None
            elif state.mask is not None:
                mask[i], state.mask = state.mask, None
            elif state.error is None and state.call is None:
                calls[i] = GrammarCall(request, (), self._words)
        self._run(list(calls.values()), len(slots))
        for i, call in calls.items():
            state = get_grammar_state(call.request)
            if state.mask is not None:
                mask[i], state.mask = state.mask, None
        return mask

    def trim_drafts(self, table: RequestTable, slots: np.ndarray, drafts: Drafts, *, is_late: bool = False) -> Drafts:
        """Cut the drafts of slots with a grammar before the first token that it does not allow or
        that ends it, and keep their masks for `fill_masks`. Forced tokens, slow grammars and trees
        get no draft. is_late: the drafts are in the step in flight, so that all of them get masks;
        a request without them leaves the device."""
        constrained = np.flatnonzero((drafts.counts > 0) & (table.arrays.special[slots] & GRAMMAR != 0))
        if not constrained.size:
            return drafts
        counts, ends, is_chain = drafts.counts.copy(), np.cumsum(drafts.counts), drafts.parents is None
        calls: dict[int, DraftCall] = {}
        for i in constrained.tolist():
            request = table.requests[int(slots[i])]  # None: it has finished
            counts[i] = 0
            if request is None:
                continue
            state = get_grammar_state(request)
            state.path = None
            is_free = state.error is None and state.call is None
            if is_free and (is_late or (is_chain and not state.is_slow and not getattr(request.grammar, "forced", ()))):
                calls[i] = DraftCall(request, drafts.token_ids[ends[i] - drafts.counts[i] : ends[i]].tolist(), self._words)
        self._run(list(calls.values()), len(slots))
        for i, call in calls.items():
            if is_late and call.is_finished and call.mask_error is None and not call.is_known:
                self.stop_request(call.request)
            elif call.is_finished and (call.num_allowed or is_late) and call.mask_error is None:
                counts[i] = call.num_allowed
                get_grammar_state(call.request).path = call.path[: call.num_allowed + 1]
        return drafts.shorten(counts)

    def stop_request(self, request: Request) -> None:
        """Let a request leave the device until its next mask is filled."""
        state = get_grammar_state(request)
        if state.call is None and state.error is None:
            call = GrammarCall(request, (), self._words)
            self._slow.submit([call])
            self._stop(call)

    def take_stopped(self) -> list[Request]:
        """Remove and return the requests that must leave the device because of a slow call."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def hold_request(self, request: Request) -> None:
        """Hold a request that has left the device."""
        call = get_grammar_state(request).call
        assert isinstance(call, GrammarCall)
        self._held[request.rid] = call

    def take_settled(self) -> list[tuple[Request, Finish | None]]:
        """Remove and return the held requests whose call has ended, each with how it ends. None: it
        continues."""
        found = [(call.request, outcome) for call in self._held.values() if (outcome := self._outcome(call)) is not None]
        for request, _ in found:
            self.release_request(request)
        return [(request, outcome if isinstance(outcome, Finish) else None) for request, outcome in found]

    def release_request(self, request: Request) -> bool:
        """Release a held request and abandon its call. Returns whether it was held."""
        call = self._held.pop(request.rid, None)
        if call is None:
            return False
        self._slow.abandon(call)  # no effect on a call that was abandoned before
        get_grammar_state(request).call = None
        return True

    def close(self) -> None:
        """End the threads."""
        self._quick.close()
        self._slow.close()

    def _run(self, calls: Sequence[GrammarCall], num_rows: int) -> None:
        """Run calls of a step of `num_rows` rows, and wait for those of requests whose calls are
        quick."""
        quick = []
        for call in calls:
            state = get_grammar_state(call.request)
            if state.is_slow:
                self._slow.submit([call])
                self._stop(call)
            else:
                quick.append(call)
        if not quick:
            return
        workers = min(self._quick.threads, 1 + int(sum(get_grammar_state(call.request).seconds for call in quick) / SECONDS_PER_THREAD))
        self._quick.wait(self._quick.submit(quick, workers))
        for call in quick:
            if call.is_finished:
                self._note(call)
            else:
                self._stop(call if call.thread is not None else self._begin_slow(call))
        if sum(call.cpu_seconds() for call in quick) > CROWDED_SECONDS * workers:
            states = [get_grammar_state(call.request) for call in quick]
            heavy = [state for state in states if state.seconds > HEAVY_SECONDS]
            for state in heavy if 4 * len(heavy) < 3 * num_rows else ():  # else they delay few others, and all would leave the batch
                state.is_slow = True

    def _begin_slow(self, call: GrammarCall) -> GrammarCall:
        """Replace a call that did not start because all threads are busy; the new one runs when a
        thread is free."""
        again = GrammarCall(call.request, call.tokens, self._words)
        self._slow.submit([again])
        return again

    def _stop(self, call: GrammarCall) -> None:
        get_grammar_state(call.request).call = call
        self._stopped.append(call.request)

    def _note(self, call: GrammarCall) -> None:
        state = get_grammar_state(call.request)
        seconds = call.seconds / len(call.path) if isinstance(call, DraftCall) else call.seconds
        state.seconds += MEAN_WEIGHT * (seconds - state.seconds)
        state.is_slow = state.seconds > SLOW_SECONDS
        state.error = call.mask_error
        state.mask = call.mask if call.end is None and call.mask_error is None else None

    def _outcome(self, call: GrammarCall) -> Finish | bool | None:
        """How a held request ends. True: it continues; None: it stays held."""
        if call.is_finished:
            self._note(call)
            return call.end or call.mask_error or True
        if (finish := call.check_budget()) is not None:  # the call may never end
            return finish
        if call.thread is None and time.monotonic() - call.queued_at > THREAD_TIMEOUT:
            return queue_full("other grammars keep the threads busy")
        return None


def _result(call: GrammarCall | None, request: Request) -> Finish | None:
    if call is None:
        return get_grammar_state(request).error
    return call.end if call.is_finished else None


def get_grammar_state(request: Request) -> GrammarState:
    """The state of a request's grammar, created on first use: most requests have no grammar."""
    if request.grammar_state is None:
        request.grammar_state = GrammarState()
    return request.grammar_state


def accept_token(grammar: Grammar, token: int, params: SamplingParams) -> Finish | None:
    """Accept a sampled token. Returns how it ends the request (reason "stop" where only the end may
    follow). None: it continues."""
    try:
        if not grammar.accept_token(token):
            return BROKEN_GRAMMAR
        return Finish("stop") if grammar.is_finished() else None
    except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
        return grammar_error(error, params)


def replay_tokens(grammar: Grammar, tokens: Iterable[int], params: SamplingParams) -> Finish | None:
    """Accept the output of a recovered request from the grammar's start. Returns how the request
    ends on failure, else None."""
    try:
        return None if all(grammar.accept_token(token) for token in tokens) else BROKEN_GRAMMAR
    except Exception as error:  # noqa: BLE001 - as above
        return grammar_error(error, params)

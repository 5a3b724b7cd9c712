"""Grammars of running requests in a step: accepts sampled tokens and fills token masks.

Calls run in threads. A step does not wait for a slow call: its request is held until the call ends.
Implements `StepGrammars` for the scheduler. Must not know the compiler.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from frame.core.interfaces.drafter import Drafts
from frame.core.messages import Finish
from frame.core.scheduling.request import queue_full
from frame.core.scheduling.request_slots import GRAMMAR
from frame.core.scheduling.step_features import StepGrammars
from frame.structured_output.grammar_calls import (
    BROKEN_GRAMMAR,
    BatchCall,
    DraftCall,
    GrammarCall,
    GrammarState,
    accept_token,
    accept_tokens,
    get_grammar_state,
    grammar_error,
    start_mask,
)
from frame.structured_output.grammar_threads import NICENESS, QUICK_SECONDS, CallBatch, GrammarThreads

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import MaskBatch
    from frame.core.scheduling.request import Request
    from frame.core.scheduling.request_slots import RequestTable
    from frame.structured_output.jump_forward import JumpForward

MAX_THREADS = 8
SECONDS_PER_THREAD = 0.0005  # CPU seconds of a step's calls per thread; threads wait for each other's use of the interpreter
SLOW_SECONDS = 0.004  # mean CPU seconds of a request's calls, above which its next call runs beside the steps
CROWDED_SECONDS = 0.004  # CPU seconds of a step's calls per thread, above which `HEAVY_SECONDS` may count as slow
HEAVY_SECONDS = 0.0005  # mean CPU seconds of a request's calls
QUICK_ROWS = 64  # of a step; the masks of more rows may take as much longer
THREAD_TIMEOUT = 10.0  # seconds that a request waits for a thread
# A batch does not tell what a single mask took: some masks are filled alone, to measure them.
MIN_MEASURED = 2  # of a request, before its masks are filled in batches
KNOWN_MEASURED = 8  # of a request, while the masks of a step take longer than `CROWDED_SECONDS`
MEASURED_SHARE = 1 / 16  # of the masks after that
MAX_MEASURED = 4  # masks of a step after that, in the mean
NUM_SLICES = 4
MIN_SPARE = 2  # masks of steps: a step has up to two memories, and the device may read those of the last one
MIN_SLICE_ROWS = 16


@dataclass(slots=True)
class _Pending:
    """Calls that have begun. `alone`: one mask each, by `workers` threads; `batches`: many masks
    each."""

    workers: int
    alone: Sequence[GrammarCall]
    batches: Sequence[BatchCall]
    started: CallBatch


@dataclass(slots=True)
class _Filling:
    """Masks of a step of `num_rows` rows that are filled while the engine's thread does other work.
    requests: of the first rows of masks, int32 [requests or more, words]. Those of known masks are
    written last."""

    num_rows: int
    masks: np.ndarray
    requests: list[Request]
    begun: list[_Pending]

    def is_read(self) -> bool:
        """Whether all masks are filled, and none of them is kept for a later step."""
        calls = (call for pending in self.begun for call in (*pending.batches, *pending.alone))
        is_filled = all(call.is_finished and not call.is_abandoned for call in calls)
        return bool(self.requests) and is_filled and all(get_grammar_state(request).mask is None for request in self.requests)


class GrammarCalls(StepGrammars):
    """Makes the grammar calls of a scheduler's steps. Masks do not depend on the thread that
    computes them. jumps: appends forced tokens once the masks of a step are filled; None: all are
    sampled. slices: of a step's rows; the masks of one are filled while the tokens of the next are
    accepted."""

    def __init__(self, vocab_size: int, threads: int | None = None, jumps: JumpForward | None = None, slices: int = NUM_SLICES) -> None:
        self._slices = slices
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._words = -(-vocab_size // 32)
        self._jumps = jumps
        self._quick = GrammarThreads(threads or min(MAX_THREADS, cores))
        self._slow = GrammarThreads(2, NICENESS)
        self._held: dict[str, GrammarCall] = {}
        self._stopped: list[Request] = []
        self._filling: _Filling | None = None
        self._filled: _Filling | None = None  # the last one
        self._spare: deque[np.ndarray] = deque(maxlen=MIN_SPARE + 2)  # memory of earlier steps' masks, oldest first
        self._random = random.Random()  # a client must not know which masks are measured
        self._is_crowded = False  # the masks of the last step took longer than `CROWDED_SECONDS`
        self._batches_masks = True  # False: a batch was slow, so that its masks have to be measured
        self._is_batch_lost = False  # one did not end
        self.total_rows = 0  # of the present step, of which other processes may have a share

    @property
    def num_jumped(self) -> int:
        return 0 if self._jumps is None else self._jumps.num_tokens

    def __len__(self) -> int:
        return len(self._held)

    def start_request(self, request: Request) -> Finish | None:
        grammar = request.grammar
        assert grammar is not None
        if self._jumps is not None:
            grammar = request.grammar = self._jumps.wrap_grammar(grammar, request.params)
        try:
            return None if all(grammar.accept_token(token) for token in request.output) else BROKEN_GRAMMAR
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            return grammar_error(error, request.params)

    def accept_tokens(self, drawn: Sequence[tuple[Request, Sequence[int]]], num_rows: int) -> list[Finish | None]:
        self.wait_for_masks()
        filling = _Filling(num_rows, self._take_masks(len(drawn)), [], [])
        ends: list[Finish | None] = [None] * len(drawn)
        rest: list[int] = []
        for i, (request, tokens) in enumerate(drawn):
            state = request.grammar_state or get_grammar_state(request)
            state.mask = state.known = None
            if state.advance is not None and len(tokens) == 1 and state.error is None and not state.is_slow:
                try:
                    state.known = state.advance(tokens[0])
                except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
                    state.error = grammar_error(error, request.params)
            if state.known is None:
                rest.append(i)
            filling.requests.append(request)
        self._accept_rest(drawn, rest, filling, ends)
        return ends

    def _accept_rest(
        self, drawn: Sequence[tuple[Request, Sequence[int]]], rest: list[int], filling: _Filling, ends: list[Finish | None]
    ) -> None:
        """Accept the tokens of those entries of `drawn` that take more than a look-up, and begin to
        fill their masks."""
        calls: dict[int, GrammarCall] = {}
        fills: list[GrammarCall] = []
        slice_rows = max(MIN_SLICE_ROWS, -(-len(rest) // self._slices))
        # While the masks of a slice are computed, the grammars of the next one must be free.
        rest.sort(key=lambda i: getattr(drawn[i][0].grammar, "origin", 0))
        for number, i in enumerate(rest, 1):
            request, tokens = drawn[i]
            state, grammar = get_grammar_state(request), request.grammar
            end = state.error
            if end is None and not state.is_slow and grammar is not None and _get_batch(request) is not None:
                one = len(tokens) == 1
                end = accept_token(grammar, tokens[0], request.params) if one else accept_tokens(grammar, tokens, request.params)
                if end is None and (call := start_mask(request, state, filling.masks, i)) is not None:
                    fills.append(call)
            elif end is None:
                calls[i] = GrammarCall(request, tokens, np.empty(self._words, np.int32))
            ends[i] = end
            if fills and (number % slice_rows == 0 or number == len(rest)):
                filling.begun += self._begin(fills, filling.num_rows, filling.masks)
                fills = []
        self._filling = filling
        if calls:
            filling.requests.clear()  # their masks are elsewhere
        self._run(list(calls.values()), filling.num_rows)
        for i, call in calls.items():
            ends[i] = call.end if call.is_finished else None

    def _take_masks(self, count: int) -> np.ndarray:
        """Memory for so many masks, int32 [count or more, words]: that of earlier steps, which the
        device has read. New memory takes as much time as its masks."""
        if len(self._spare) > MIN_SPARE and count <= len(masks := self._spare.popleft()) <= max(MIN_SLICE_ROWS, 4 * count):
            return masks
        return np.empty((max(MIN_SLICE_ROWS, 1 << (count - 1).bit_length()), self._words), np.int32)

    def wait_for_masks(self) -> None:
        filling, self._filling = self._filling, None
        if filling is not None:
            self._finish(filling.begun, filling.num_rows)
            self._filled = filling

    def fill_masks(self, table: RequestTable, slots: np.ndarray) -> np.ndarray | None:
        self.wait_for_masks()
        constrained = np.flatnonzero(table.arrays.special[slots] & GRAMMAR)
        if not constrained.size:
            return None
        mask = self._fill_rows(table, slots, constrained)
        if self._jumps is not None:
            self._jumps.apply_jumps(slots)
        return mask

    def _fill_rows(self, table: RequestTable, slots: np.ndarray, constrained: np.ndarray) -> np.ndarray:
        """The masks of samples, of which those at the places `constrained` have a grammar."""
        filled, self._filled = self._filled, None
        if filled is not None and filled.requests == [table.requests[slot] for slot in slots.tolist()]:
            states = [get_grammar_state(request) for request in filled.requests]
            if all(state.mask is not None or state.known is not None for state in states):
                for row, state in zip(filled.masks, states, strict=False):
                    if state.known is not None:
                        state.known.write(row)
                    state.known = state.mask = None
                self._keep_spare(filled.masks)
                return filled.masks[: len(slots)]  # nothing to copy
        whole = self._take_masks(len(slots))
        mask = whole[: len(slots)]
        mask[:] = -1
        calls: dict[int, GrammarCall] = {}
        firsts = constrained[np.flatnonzero(np.diff(slots[constrained], prepend=-1))]  # a row with a draft has several samples
        masks = np.empty((len(firsts), self._words), np.int32)
        for i in firsts.tolist():
            request = table.requests[int(slots[i])]  # None: it has finished
            if request is None or request.grammar is None:
                continue
            state = get_grammar_state(request)
            if state.path is not None and i + 1 < len(slots) and slots[i + 1] == slots[i]:
                samples = np.flatnonzero(slots[i : i + len(state.path)] == slots[i])  # fewer than masks if pages were short
                mask[i + samples], state.path, state.mask, state.known = state.path[: len(samples)], None, None, None
            elif state.known is not None:
                state.known.write(mask[i])
                state.known = None
            elif state.mask is not None:
                mask[i], state.mask = state.mask, None
            elif state.error is None and state.call is None:
                if (call := start_mask(request, state, masks, len(calls))) is not None:
                    calls[i] = call
                elif state.mask is not None:
                    mask[i], state.mask = state.mask, None
        self._run(list(calls.values()), len(slots), masks)
        for i, call in calls.items():
            state = get_grammar_state(call.request)
            if state.mask is not None:
                mask[i], state.mask = state.mask, None
        if filled is not None and filled.is_read():
            self._keep_spare(filled.masks)
        self._keep_spare(whole)
        return mask

    def _keep_spare(self, masks: np.ndarray) -> None:
        if not self._stopped and not self._held:  # no call may still write
            self._spare.append(masks)

    def trim_drafts(self, table: RequestTable, slots: np.ndarray, drafts: Drafts, *, is_late: bool = False) -> Drafts:
        self.wait_for_masks()
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
        self.wait_for_masks()
        state = get_grammar_state(request)
        if state.call is None and state.error is None:
            call = GrammarCall(request, (), np.empty(self._words, np.int32))
            self._slow.submit([call])
            self._stop(call)

    def take_stopped(self) -> list[Request]:
        stopped, self._stopped = self._stopped, []
        return stopped

    def hold_request(self, request: Request) -> None:
        call = get_grammar_state(request).call
        assert isinstance(call, GrammarCall)
        self._held[request.rid] = call

    def take_resolved(self) -> list[tuple[Request, Finish | None]]:
        resolved = [(call.request, outcome) for call in self._held.values() if (outcome := self._outcome(call)) is not None]
        for request, _ in resolved:
            self.release_request(request)
        return [(request, outcome if isinstance(outcome, Finish) else None) for request, outcome in resolved]

    def release_request(self, request: Request) -> bool:
        call = self._held.pop(request.rid, None)
        if call is None:
            return False
        self._slow.abandon(call)  # no effect on a call that was abandoned before
        get_grammar_state(request).call = None
        return True

    def close(self) -> None:
        self._quick.close()
        self._slow.close()

    def _run(self, calls: Sequence[GrammarCall], num_rows: int, masks: np.ndarray | None = None) -> None:
        """Run calls of a step of `num_rows` rows, and wait for those of requests whose calls are
        quick. masks: int32 [n, words], which hold the calls' masks; None: each is made alone."""
        self._finish(self._begin(calls, num_rows, masks), num_rows)

    def _begin(self, calls: Sequence[GrammarCall], num_rows: int, masks: np.ndarray | None) -> list[_Pending]:
        """Start calls, those of slow requests beside the steps. masks: see `_run`. -> an entry if
        any can be waited for."""
        alone: list[GrammarCall] = []
        batched: dict[MaskBatch, list[tuple[GrammarCall, Any, int]]] = {}
        share = min(MEASURED_SHARE, MAX_MEASURED / max(num_rows, self.total_rows))
        for call in calls:
            if get_grammar_state(call.request).is_slow:
                self._slow.submit([call])
                self._stop(call)
            elif masks is None or (batch := self._choose_batch(call, share)) is None:
                alone.append(call)
            else:
                batched.setdefault(batch, []).append((call, call.handle, call.row))
        if not alone and not batched:
            return []
        batches = [BatchCall(batch, masks, entries) for batch, entries in batched.items()] if masks is not None else []
        seconds = sum(get_grammar_state(call.request).seconds for call in alone)
        workers = min(self._quick.threads, 1 + int(seconds / SECONDS_PER_THREAD)) if alone else 0
        return [_Pending(workers, alone, batches, self._quick.submit([*batches, *alone], workers + len(batches)))]

    def _choose_batch(self, call: GrammarCall, share: float) -> MaskBatch | None:
        """What fills the mask of a call with others. None: it is filled alone, as this share of
        the masks that could be filled with others."""
        batch = _get_batch(call.request)
        if batch is None or call.handle is None or not self._batches_masks:
            return None
        num_measured, minimum = get_grammar_state(call.request).num_measured, KNOWN_MEASURED if self._is_crowded else MIN_MEASURED
        if num_measured < minimum and num_measured + _count_measured(call.request) < minimum:
            return None
        return batch if self._random.random() >= share else None

    def _finish(self, begun: Sequence[_Pending], num_rows: int) -> None:
        """Wait for calls of a step that have begun and keep their masks."""
        if not begun:
            return
        for pending in begun:
            self._quick.wait(pending.started)
        for call in (call for pending in begun for call in pending.alone):
            if call.is_finished:
                self._note(call)
            else:
                self._stop(call if call.thread is not None else self._begin_slow(call))
        batches = [batch for pending in begun for batch in pending.batches]
        for batch in batches:
            if batch.is_finished:
                batch.finish_masks()
            for each in batch.calls:
                (_keep_mask if batch.is_finished else self._stop)(each)
            self._is_batch_lost |= not batch.is_finished
        slowest = max((batch.wall for batch in batches), default=0.0)
        more = max(1.0, num_rows / QUICK_ROWS, self.total_rows / QUICK_ROWS)
        self._batches_masks = not self._is_batch_lost and slowest <= QUICK_SECONDS * more
        self._is_crowded = slowest > CROWDED_SECONDS * more or any(
            sum(call.cpu_seconds() for call in pending.alone) > CROWDED_SECONDS * pending.workers for pending in begun
        )
        if self._is_crowded:
            calls = [call for pending in begun for call in (*pending.alone, *(call for batch in pending.batches for call in batch.calls))]
            self._mark_slow([get_grammar_state(call.request) for call in calls if not _count_measured(call.request)], num_rows)

    @staticmethod
    def _mark_slow(states: Sequence[GrammarState], num_rows: int) -> None:
        """Mark the requests that the others of a crowded step wait for: heavy ones, if they take
        most of the time. If almost all rows are heavy, they delay few others."""
        estimates = [state.estimate_seconds() for state in states]
        heavy = [seconds for seconds in estimates if seconds > HEAVY_SECONDS]
        if 4 * len(heavy) < 3 * num_rows and 2 * sum(heavy) > sum(estimates):
            for state in states:
                # `seconds` is below the estimate until many calls are measured, so that a few slow
                # masks do not make a request leave
                state.is_slow |= state.seconds > HEAVY_SECONDS

    def _begin_slow(self, call: GrammarCall) -> GrammarCall:
        """Replace a call that did not start because all threads are busy; the new one runs when a
        thread is free."""
        again = GrammarCall(call.request, call.tokens, np.empty(self._words, np.int32))
        self._slow.submit([again])
        return again

    def _stop(self, call: GrammarCall) -> None:
        get_grammar_state(call.request).call = call
        self._stopped.append(call.request)

    def _note(self, call: GrammarCall) -> None:
        state = get_grammar_state(call.request)
        seconds = call.seconds / len(call.path) if isinstance(call, DraftCall) else call.seconds
        state.measure(seconds)
        state.is_slow = state.seconds > SLOW_SECONDS
        _keep_mask(call)

    def _outcome(self, call: GrammarCall) -> Finish | bool | None:
        """How a held request ends. True: it continues; None: it stays held."""
        if not call.is_finished and call.batch is not None and call.batch.is_finished:
            call.batch.finish_masks()
        if call.is_finished:
            self._note(call)
            return call.end or call.mask_error or True
        if (finish := call.check_budget()) is not None:  # the call may never end
            return finish
        if call.thread is None and time.monotonic() - call.queued_at > THREAD_TIMEOUT:
            return queue_full("other grammars keep the threads busy")
        return None


def _get_batch(request: Request) -> MaskBatch | None:
    """What fills the masks of a request together with others."""
    batch: MaskBatch | None = getattr(request.grammar, "batch", None)
    return batch


def _count_measured(request: Request) -> int:
    """See `num_measured` of `BatchedGrammar`."""
    return getattr(request.grammar, "num_measured", 0)


def _keep_mask(call: GrammarCall) -> None:
    """Keep the mask of a finished call, or why there is none."""
    state = get_grammar_state(call.request)
    state.error, state.known = call.mask_error, None
    state.mask = call.mask if call.end is None and call.mask_error is None else None

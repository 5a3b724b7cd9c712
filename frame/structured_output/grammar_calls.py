"""Calls of one request's grammar, or of many at once, that run in `grammar_threads`, and the budget
of their CPU time.

Used by `grammar_masks`. Must not know the scheduler's steps or a backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from frame.core.blame import explain
from frame.core.messages import Finish
from frame.structured_output.draft_masks import fill_draft_masks
from frame.structured_output.grammar_threads import LOST_SECONDS, ThreadedCall

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import BatchedGrammar, Grammar, MaskBatch
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.scheduling.request import Request
    from frame.interfaces.known_masks import KnownMask

BROKEN_GRAMMAR = Finish(
    "error", error="the sampled token breaks the request's grammar; this is a fault of the grammar backend or of a logits processor"
)
TOKEN_ALLOWANCE = 0.002  # seconds that each token adds to a grammar's budget


def grammar_error(error: BaseException, params: SamplingParams) -> Finish:
    """How a request ends whose grammar raised `error`. ValueError: the grammar is invalid; other
    errors are faults of the backend."""
    if isinstance(error, ValueError):
        kind = params.grammar[0] if params.grammar is not None else None
        return Finish("error", error=f"invalid grammar: {error}", code="invalid_grammar", param=kind)
    return Finish("error", error=f"the grammar backend failed: {explain(error)}")


MEAN_WEIGHT = 0.1  # of the last call in the mean time of a grammar's calls


@dataclass(slots=True)
class GrammarState:
    """What is kept of one request's grammar between steps."""

    call: ThreadedCall | None = None  # a call that no step waits for
    mask: np.ndarray | None = None  # int32 [words]; the next mask, once it is filled
    known: KnownMask | None = None  # the next mask, if it took a look-up
    advance: Callable[[int], KnownMask | None] | None = None  # see `SteppingGrammar`
    path: np.ndarray | None = None  # int32 [k + 1, words]; the masks along the draft of the next row, k tokens
    error: Finish | None = None  # how the request ends at its next token, because the mask could not be filled
    seconds: float = 0.0  # moving mean of the measured calls' CPU time, which begins at 0
    num_measured: int = 0  # calls
    is_slow: bool = False  # the next call runs beside the steps

    def measure(self, seconds: float) -> None:
        """Add the CPU time of a call."""
        self.seconds += MEAN_WEIGHT * (seconds - self.seconds)
        self.num_measured += 1

    def estimate_seconds(self) -> float:
        """The CPU time to expect of a call: `seconds` without its beginning."""
        return self.seconds / (1 - (1 - MEAN_WEIGHT) ** self.num_measured) if self.num_measured else 0.0


class GrammarMeter:
    """CPU seconds of a request's grammar: used, and allowed (`budget` plus `TOKEN_ALLOWANCE` for
    each token)."""

    def __init__(self, budget: float, spent: float = 0.0) -> None:
        self.spent = spent
        self.num_tokens = 0
        self.budget = budget

    def charge(self, seconds: float) -> None:
        """Add CPU seconds. Raises ValueError when the budget is exceeded."""
        self.spent += seconds
        if self.spent > self.budget + TOKEN_ALLOWANCE * self.num_tokens:  # most calls are charged: `check` without a call
            self.check()

    def is_exceeded(self, more: float = 0.0) -> bool:
        """Whether `more` seconds would exceed the budget."""
        return self.spent + more > self.budget + TOKEN_ALLOWANCE * self.num_tokens

    def check(self, more: float = 0.0) -> None:
        """Raise ValueError when `more` seconds would exceed the budget."""
        if self.is_exceeded(more):
            raise ValueError(
                f"the grammar takes more CPU time than its budget of {self.budget:g} s (sampling.grammar_budget), and "
                f"{1000 * TOKEN_ALLOWANCE:g} ms a token; simplify it"
            )


class WrappedGrammar:
    """What a grammar that calls another one has of it unchanged."""

    def __init__(self, grammar: Grammar) -> None:
        self.wrapped = self._grammar = grammar
        self.batch: MaskBatch | None = getattr(grammar, "batch", None)  # see `BatchedGrammar`
        self.origin: int = getattr(grammar, "origin", 0)  # see `SteppingGrammar`

    @property
    def num_measured(self) -> int:
        """See `BatchedGrammar`."""
        return getattr(self._grammar, "num_measured", 0)


class MeteredGrammar(WrappedGrammar):
    """A `Grammar` whose calls are charged to a meter. Raises ValueError when the budget is
    exceeded; `accept_token` only before it takes the token, so that a rollback counts right."""

    def __init__(self, grammar: Grammar, meter: GrammarMeter) -> None:
        super().__init__(grammar)
        self.meter = meter
        self._advance: Callable[[int], KnownMask | None] | None = getattr(grammar, "advance_token", None)
        self._is_finished: bool | None = None  # None: not known
        # Of calls in the engine's thread the clock is enough, which needs no system call: some
        # take 5 µs, as much as the call.
        self._clock = time.thread_time if self.batch is None else time.perf_counter

    def advance_token(self, token_id: int) -> KnownMask | None:
        """See `SteppingGrammar`. Of the time of a look-up the meter takes no note."""
        meter = self.meter
        if self._advance is None or meter.spent > meter.budget + TOKEN_ALLOWANCE * meter.num_tokens:  # `is_exceeded` without a call
            return None
        if (known := self._advance(token_id)) is None:
            return None
        meter.num_tokens += 1
        self._is_finished = False
        return known

    def fill_mask(self, mask: np.ndarray) -> bool:
        return self._fill_mask(mask, time.thread_time)

    def fill_next_mask(self, mask: np.ndarray) -> bool:
        """As `fill_mask`, but charges the time of the clock, which takes no system call. For a
        caller that bounds it, or whose calls are short."""
        return self._fill_mask(mask, self._clock)

    def _fill_mask(self, mask: np.ndarray, clock: Callable[[], float]) -> bool:
        if self.batch is not None and self.start_mask(mask) is None:  # it was known
            return bool(mask[0] != -1 or (mask != -1).any())
        began = clock()
        is_limited = self._grammar.fill_mask(mask)
        self.meter.charge(clock() - began)
        return is_limited

    def start_mask(self, mask: np.ndarray) -> Any:
        """See `BatchedGrammar`."""
        return cast("BatchedGrammar", self._grammar).start_mask(mask)

    def finish_mask(self, mask: np.ndarray, seconds: float) -> bool:
        """See `BatchedGrammar`."""
        is_limited = cast("BatchedGrammar", self._grammar).finish_mask(mask, seconds)
        self.meter.charge(seconds)
        return is_limited

    def accept_token(self, token_id: int) -> bool:
        meter = self.meter
        if meter.spent > meter.budget + TOKEN_ALLOWANCE * meter.num_tokens:
            meter.check()
        self._is_finished = None
        began = self._clock()
        is_taken = self._grammar.accept_token(token_id)
        self.meter.num_tokens += is_taken
        if is_taken:  # asked for next; a clock for each of both costs as much as they do
            self._is_finished = self._grammar.is_finished()
        self.meter.spent += self._clock() - began
        return is_taken

    def is_finished(self) -> bool:
        if self._is_finished is None:
            began = self._clock()
            self._is_finished = self._grammar.is_finished()
            self.meter.charge(self._clock() - began)
        return self._is_finished

    def rollback_tokens(self, count: int) -> None:
        self._is_finished = None
        self._grammar.rollback_tokens(count)
        self.meter.num_tokens -= count


class GrammarCall(ThreadedCall):
    """Accepts tokens and fills the next mask, int32 [words]. `end`: how the last token ends the
    request, if it does; `mask_error`: how the request ends when the mask could not be filled."""

    def __init__(self, request: Request, tokens: Sequence[int], mask: np.ndarray) -> None:
        super().__init__()
        self.request = request
        self.mask = mask
        self.handle: Any = None  # to fill the mask in a batch
        self.row = 0  # of the batch's masks
        self.batch: BatchCall | None = None  # fills the mask
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
        self.end = accept_tokens(grammar, self.tokens, self.request.params)
        if self.end is not None:
            return
        try:
            if not grammar.fill_mask(self.mask):
                self.mask[:] = -1
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            self.mask_error = grammar_error(error, self.request.params)

    def finish_mask(self, seconds: float) -> None:
        """Complete the mask that a batch has filled."""
        try:
            if not cast("BatchedGrammar", self.request.grammar).finish_mask(self.mask, seconds):
                self.mask[:] = -1
        except Exception as error:  # noqa: BLE001 - as above
            self.mask_error = grammar_error(error, self.request.params)


class BatchCall(ThreadedCall):
    """Fills the masks of several calls at once; `finish_masks` completes them. `wall`: seconds of
    the clock that the backend took. masks: int32 [n, words]; entries: each call with its handle and
    its row of `masks`."""

    def __init__(self, batch: MaskBatch, masks: np.ndarray, entries: Sequence[tuple[GrammarCall, Any, int]]) -> None:
        super().__init__()
        self.calls = [call for call, _, _ in entries]
        for call in self.calls:
            call.batch = self
        self.wall = 0.0
        self._is_filled = False
        self._batch, self._masks = batch, masks
        self._handles, self._rows = [handle for _, handle, _ in entries], [row for _, _, row in entries]

    def execute(self) -> None:
        began = time.perf_counter()
        try:
            self._batch.fill_masks(self._handles, self._rows, self._masks)
        except Exception:  # noqa: BLE001 - each call raises it again for its request alone
            for call in self.calls:
                call.execute()
        else:
            self._is_filled = True
            self.wall = time.perf_counter() - began

    def finish_masks(self) -> None:
        """Complete the masks, once this call is finished. The engine's thread does it: the thread
        of this call would wait 5 ms for the interpreter's lock."""
        share = self.wall / len(self.calls)
        for call in self.calls:
            if self._is_filled:
                state = get_grammar_state(call.request)
                call.finish_mask(state.estimate_seconds() if state.num_measured else share)
            call.is_finished = True

    def is_slow(self) -> bool:
        return self.thread is not None and time.monotonic() - self.queued_at > LOST_SECONDS


class DraftCall(GrammarCall):
    """Fills the masks along a draft and undoes it. `path`: int32 [k + 1, words]; `num_allowed`:
    drafted tokens that the grammar allows; `is_known`: see `fill_draft_masks`."""

    def __init__(self, request: Request, draft: Sequence[int], words: int) -> None:
        self.path = np.empty((len(draft) + 1, words), np.int32)
        super().__init__(request, (), self.path[0])  # the next mask
        self.num_allowed, self.is_known = 0, False
        self._draft, self._first = draft, get_grammar_state(request).mask

    def execute(self) -> None:
        assert self.request.grammar is not None
        try:
            self.num_allowed, self.is_known = fill_draft_masks(self.request.grammar, self._draft, self._first, self.path)
            if self._meter is not None:
                self._meter.spent = self._spent  # drafts do not use up the request's budget
        except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
            self.mask_error = grammar_error(error, self.request.params)


def get_grammar_state(request: Request) -> GrammarState:
    """The state of a request's grammar, created on first use: most requests have no grammar."""
    state: GrammarState | None = request.grammar_state
    if state is None:
        state = request.grammar_state = GrammarState(advance=getattr(request.grammar, "advance_token", None))
    return state


def start_mask(request: Request, state: GrammarState, masks: np.ndarray, row: int) -> GrammarCall | None:
    """Begin to fill a request's next mask, a row of `masks`, int32 [n, words]. Returns the call
    that fills it. None: it is known already, or it has failed."""
    call, mask = None, masks[row]
    try:
        if getattr(request.grammar, "batch", None) is None:
            return GrammarCall(request, (), mask)
        handle = cast("BatchedGrammar", request.grammar).start_mask(mask)
        if handle is None:
            state.mask = mask
        else:
            call = GrammarCall(request, (), mask)
            call.handle, call.row = handle, row
    except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
        state.error = grammar_error(error, request.params)
    return call


def accept_token(grammar: Grammar, token: int, params: SamplingParams) -> Finish | None:
    """Accept a sampled token. Returns how it ends the request (reason "stop" where only the end may
    follow). None: it continues."""
    try:
        if not grammar.accept_token(token):
            return BROKEN_GRAMMAR
        return Finish("stop") if grammar.is_finished() else None
    except Exception as error:  # noqa: BLE001 - the backend's fault, and this request's alone
        return grammar_error(error, params)


def accept_tokens(grammar: Grammar, tokens: Iterable[int], params: SamplingParams) -> Finish | None:
    """Accept tokens, of which the last may end the request. Returns how it ends. None: it
    continues."""
    for token in tokens:
        if (end := accept_token(grammar, token, params)) is not None:
            return end
    return None

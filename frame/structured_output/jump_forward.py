"""Jump-forward decoding: tokens that a grammar forces are computed in one step instead of sampled
one by one.

Where a mask allows a single token, that token is certain before it is sampled, and so may be the
next ones. The request gets such a run at once: its next row computes all of it, like a chunk of a
prompt, and samples the token after it. The tokens are those that masked sampling yields. Used by
`grammar_masks`. Must not know a backend or a device.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from frame.core.interfaces.runner import MAX_SINGLE_TOKEN_ROWS
from frame.core.interfaces.sampling import MAX_ROLLBACK
from frame.core.scheduling.request_slots import GRAMMAR
from frame.interfaces.known_masks import KnownMask, OneTokenMask, find_only_token
from frame.structured_output.grammar_calls import WrappedGrammar, get_grammar_state

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from frame.core.interfaces.sampling import BatchedGrammar, Grammar
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.scheduling.running import RunningSet
    from frame.structured_output.grammar_calls import GrammarMeter

MAX_FORCED_TOKENS = 256  # tokens of one run
# Where a run must have more tokens, none is looked for: finding out that a run is shorter takes the
# engine's thread as long as the masks of its tokens, which threads would compute.
MAX_FEWEST = 16
MAX_LOOKAHEAD_SECONDS = 0.01  # all rows of a step wait for its masks


class MinimumRun:
    """The tokens that a run must have in the present step."""

    __slots__ = ("length",)

    def __init__(self, length: int = 0) -> None:
        self.length = length


class LookaheadGrammar(WrappedGrammar):
    """A `Grammar` that runs ahead of its request while only one token is allowed.

    Its masks and results are those of the wrapped grammar. `forced`: the next tokens, which the
    wrapped grammar has accepted already. minimum: above `MAX_FEWEST` it does not run ahead.
    """

    def __init__(self, grammar: Grammar, minimum: MinimumRun | None = None) -> None:
        super().__init__(grammar)
        self._minimum = minimum or MinimumRun()
        self.forced: deque[int] = deque()
        self._words = 0  # of a mask
        self._advance: Callable[[int], KnownMask | None] | None = getattr(grammar, "advance_token", None)
        self._taken: deque[int] = deque(maxlen=MAX_ROLLBACK)  # forced tokens since the last one that was not forced
        self._next: np.ndarray | KnownMask | None = None  # the mask after `forced`, if computed
        self._ends: bool | None = None  # whether nothing may follow `forced`, if known
        self._error: Exception | None = None  # raised while looking ahead; raised again after the forced tokens

    @property
    def meter(self) -> GrammarMeter | None:
        """The meter of the wrapped grammar."""
        return getattr(self._grammar, "meter", None)

    def fill_mask(self, mask: np.ndarray) -> bool:
        self._words = len(mask)
        if not self.forced:
            if self._error is not None:
                raise self._error
            if self._next is not None:
                if isinstance(self._next, np.ndarray):
                    mask[:] = self._next
                else:
                    self._next.write(mask)
                return True
            if not self._grammar.fill_mask(mask):
                return False
            self._look_ahead_from(mask)
        if self.forced:
            OneTokenMask(self.forced[0]).write(mask)
        return True

    def advance_token(self, token_id: int) -> KnownMask | None:
        """See `SteppingGrammar`."""
        forced = self.forced
        if forced:
            following = OneTokenMask(forced[1]) if len(forced) > 1 else self._next
            if token_id != forced[0] or following is None or isinstance(following, np.ndarray):
                return None
            self._taken.append(forced.popleft())
            return following
        if self._advance is None or self._error is not None or (known := self._advance(token_id)) is None:
            return None
        self._next = self._ends = None
        if self._taken:
            self._taken.clear()
        if known.only_token is not None and self._minimum.length <= MAX_FEWEST:
            self._look_ahead(known.only_token)
        return known

    def start_mask(self, mask: np.ndarray) -> Any:
        """See `BatchedGrammar`."""
        if self.forced or self._error is not None or self._next is not None:
            self.fill_mask(mask)
            return None
        self._words = len(mask)
        handle = cast("BatchedGrammar", self._grammar).start_mask(mask)
        if handle is None:
            self._look_ahead_from(mask)
        return handle

    def finish_mask(self, mask: np.ndarray, seconds: float) -> bool:
        """See `BatchedGrammar`."""
        if not cast("BatchedGrammar", self._grammar).finish_mask(mask, seconds):
            return False
        self._look_ahead_from(mask)
        return True

    def accept_token(self, token_id: int) -> bool:
        if self.forced:
            if token_id != self.forced[0]:
                return False
            self._taken.append(self.forced.popleft())
            return True
        if not self._grammar.accept_token(token_id):
            return False
        self._next = self._ends = None
        self._taken.clear()
        return True

    def rollback_tokens(self, count: int) -> None:
        while count and self._taken:
            self.forced.appendleft(self._taken.pop())
            count -= 1
        if count:
            self._grammar.rollback_tokens(count + len(self.forced))
            self.forced.clear()
            self._next = self._ends = self._error = None

    def is_finished(self) -> bool:
        if self.forced:
            return False
        if self._ends is None:
            self._ends = self._grammar.is_finished()
        return self._ends

    def take_forced(self, fewest: int, maximum: int, stops: Collection[int]) -> list[int]:
        """Remove and return a run of `fewest` to `maximum` forced tokens, none of which may end the
        request: no stop token, and not the grammar's last token. Empty: the run is shorter."""
        count = min(maximum, len(self.forced) - bool(self._ends))
        if count < fewest:
            return []
        run = list(self.forced)[:count]
        run = run[: next((i for i, token in enumerate(run) if token in stops), count)]
        if len(run) < fewest:
            return []
        for _ in run:
            self._taken.append(self.forced.popleft())
        return run

    def _look_ahead_from(self, first: np.ndarray) -> None:
        """Accept forced tokens after the mask `first`, which stays as it is."""
        if self._minimum.length > MAX_FEWEST:
            return
        token = find_only_token(first)
        if token is not None:
            self._look_ahead(token)

    def _look_ahead(self, token: int | None) -> None:
        """Accept forced tokens, of which this is the first."""
        mask, began = None, time.perf_counter()  # needs no system call, unlike the thread's clock
        fill_mask = getattr(self._grammar, "fill_next_mask", self._grammar.fill_mask)
        try:
            while token is not None:
                known = None if self._advance is None else self._advance(token)
                if known is None and not self._grammar.accept_token(token):
                    return
                self.forced.append(token)
                self._ends = known is None and self._grammar.is_finished()
                if self._ends or len(self.forced) == MAX_FORCED_TOKENS or time.perf_counter() - began > MAX_LOOKAHEAD_SECONDS:
                    return
                if known is not None:
                    token = known.only_token
                    self._next = known if token is None else None
                    continue
                mask = np.empty(self._words, np.int32) if mask is None else mask
                is_limited = fill_mask(mask)
                token = find_only_token(mask) if is_limited else None
                if is_limited and token is None:
                    self._next = mask
        except Exception as error:  # noqa: BLE001 - raised again after the forced tokens
            self._error = error


class JumpForward:
    """Appends forced tokens to running requests. `fewest`: minimum length of a run. `rows`:
    a run must have one token for each `rows` rows of the step, since a longer row delays the
    others; 0: no such limit. `tokens`: maximum tokens of a step with runs, which is then computed
    as single rows (at most `MAX_SINGLE_TOKEN_ROWS` of its runs); 0: unlimited. `parts`: processes
    that share the rows of a step, which has `num_samples` in all; 0: those of `apply_jumps`."""

    def __init__(self, running: RunningSet, fewest: int, rows: int = 0, tokens: int = 0, parts: int = 1) -> None:
        self.num_tokens = 0  # jumped over: no step sampled them
        self.num_samples = 0
        self._parts = parts
        self._running = running
        self._fewest = fewest
        self._rows = rows
        self._tokens = tokens
        self._minimum = MinimumRun(fewest)

    def wrap_grammar(self, grammar: Grammar, params: SamplingParams) -> Grammar:
        """Wrap a request's grammar. A request with log-probabilities keeps its own: those come from
        sampling."""
        if params.logprobs is not None or params.prompt_logprobs is not None:
            return grammar
        return LookaheadGrammar(grammar, self._minimum)

    def apply_jumps(self, slots: np.ndarray) -> None:
        """Append forced tokens to the sampling rows of a step whose masks were just filled. All
        steps before it must be committed. A row that jumps samples the first token of its run.
        slots: one entry per sample; rows with a draft, which have several, do not jump."""
        num_samples = self.num_samples or len(slots)
        table, fewest = self._running.table, max(self._fewest, num_samples // self._rows if self._rows else 0)
        self._minimum.length = fewest
        a = table.arrays
        room = min(MAX_SINGLE_TOKEN_ROWS, self._tokens - num_samples) // self._parts if self._tokens else MAX_FORCED_TOKENS * len(slots)
        if fewest > MAX_FORCED_TOKENS:
            return
        is_repeated = slots[1:] == slots[:-1]
        can_jump = (a.special[slots] & GRAMMAR) != 0
        can_jump[1:] &= ~is_repeated
        can_jump[:-1] &= ~is_repeated
        for slot in slots[can_jump].tolist():
            request = table.requests[slot]  # None: it has finished
            if request is None or len(getattr(request.grammar, "forced", ())) < fewest:
                continue
            if not isinstance(request.grammar, LookaheadGrammar):
                continue
            if get_grammar_state(request).call is not None:  # a thread uses the grammar
                continue
            maximum = request.max_num_tokens - 1 - int(a.num_committed_tokens[slot])  # the last token is sampled, which ends the request
            run = request.grammar.take_forced(fewest, min(maximum, room), request.stop_ids)
            if run:
                room -= len(run)
                self._running.extend_request(request, run)
                self.num_tokens += len(run) - 1

"""Tokens that a grammar forces: found ahead of their turn, and computed in one step instead of drawn one by one.

Where a mask allows a single token, the token is certain before it is drawn, and so may be the next ones. A run of them becomes part of
the request at once: its next row computes them all, as a chunk of a prompt is computed, and draws what comes after. The tokens are
those that masked drawing yields. Knows no backend and no device.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from frame.core.grammars.grammar_masks import state_of
from frame.core.interfaces.runner import MOST_SINGLE
from frame.core.scheduling.request_slots import GRAMMAR

if TYPE_CHECKING:
    from collections.abc import Collection

    from frame.core.grammars.grammar_masks import GrammarMeter
    from frame.core.interfaces.sampling import Grammar
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.scheduling.running import RunningSet

MOST_AHEAD = 256  # tokens
FEW_WORDS = 128  # of a mask
LONGEST_LOOK = 0.01  # seconds of CPU; everybody waits for a step's masks


class ForeseeingGrammar:
    """A `Grammar` that runs ahead of its request as long as one token alone is allowed.

    To its caller it is the grammar that it was made of: same masks, same answers. `forced` are the tokens that are certain to come next
    and that the grammar within has taken in already.
    """

    def __init__(self, grammar: Grammar) -> None:
        self.forced: deque[int] = deque()
        self._grammar = grammar
        self._next: np.ndarray | None = None  # the mask after `forced`, where it is known
        self._ends: bool | None = None  # whether nothing may follow `forced`, where that is known
        self._error: Exception | None = None  # of the look ahead; raised when its turn comes

    @property
    def meter(self) -> GrammarMeter | None:
        """Of the grammar within."""
        return getattr(self._grammar, "meter", None)

    def fill(self, mask: np.ndarray) -> bool:
        if not self.forced:
            if self._error is not None:
                raise self._error
            if self._next is not None:
                mask[:] = self._next
                return True
            if not self._grammar.fill(mask):
                return False
            token = only_token(mask)
            if token is not None:
                self._look_ahead(token, np.empty_like(mask))
        if self.forced:
            mask[:] = 0
            mask.view(np.uint32)[self.forced[0] // 32] = 1 << self.forced[0] % 32
        return True

    def accept(self, token_id: int) -> bool:
        if self.forced:
            if token_id != self.forced[0]:
                return False
            self.forced.popleft()
            return True
        self._next = self._ends = None
        return self._grammar.accept(token_id)

    def is_finished(self) -> bool:
        if self.forced:
            return False
        if self._ends is None:
            self._ends = self._grammar.is_finished()
        return self._ends

    def take(self, fewest: int, most: int, stops: Collection[int]) -> list[int]:
        """Take a run of forced tokens away, none of which may end the request: no stop token, and not the grammar's last. Empty where
        there are fewer than `fewest`."""
        count = min(most, len(self.forced) - bool(self._ends))
        if count < fewest:
            return []
        run = list(self.forced)[:count]
        run = run[: next((i for i, token in enumerate(run) if token in stops), count)]
        if len(run) < fewest:
            return []
        for _ in run:
            self.forced.popleft()
        return run

    def _look_ahead(self, token: int | None, mask: np.ndarray) -> None:
        """Go on from the only token that is allowed; `mask` is room to work in."""
        began = time.thread_time()
        try:
            while token is not None and self._grammar.accept(token):
                self.forced.append(token)
                self._ends = self._grammar.is_finished()
                if self._ends or len(self.forced) == MOST_AHEAD or time.thread_time() - began > LONGEST_LOOK:
                    return
                is_limited = self._grammar.fill(mask)
                token = only_token(mask) if is_limited else None
                if is_limited and token is None:
                    self._next = mask
        except Exception as error:  # noqa: BLE001 - raised again when the tokens before it are drawn
            self._error = error


class JumpForward:
    """Gives running requests their forced tokens. `fewest`: length of a run that is worth it; 0: no run is. A step with a longer row may
    cost its other rows something: then a run must have a token for each `rows` of them; 0: it costs them nothing. `tokens`: most of a step
    with runs, which is computed as single rows then (and of its runs, `MOST_SINGLE`); 0: any number."""

    def __init__(self, running: RunningSet, fewest: int, rows: int = 0, tokens: int = 0) -> None:
        self.num_tokens = 0  # that no step had to draw
        self._running = running
        self._fewest = fewest
        self._rows = rows
        self._tokens = tokens

    def watch(self, grammar: Grammar | None, params: SamplingParams) -> Grammar | None:
        """The grammar that a request is to have. One that wants log-probabilities has its tokens drawn, which is where those come from."""
        if grammar is None or not self._fewest or params.logprobs is not None or params.prompt_logprobs is not None:
            return grammar
        return ForeseeingGrammar(grammar)

    def apply(self, slots: np.ndarray) -> None:
        """Jump with the sampling rows of a step whose masks were just made; every step before it must be committed. A row that jumps
        draws the first token of its run, which is known by then."""
        if not self._fewest:
            return
        table, fewest = self._running.table, max(self._fewest, len(slots) // self._rows if self._rows else 0)
        a = table.arrays
        room = min(MOST_SINGLE, self._tokens - len(slots)) if self._tokens else MOST_AHEAD * len(slots)
        for slot in slots[(a.special[slots] & GRAMMAR) != 0].tolist():
            request = table.requests[slot]  # None: it has ended
            if request is None or not isinstance(request.grammar, ForeseeingGrammar):
                continue
            if state_of(request).call is not None or not request.grammar.forced:  # a thread is at it
                continue
            most = request.max_num_tokens - 1 - int(a.num_committed_tokens[slot])  # the last token is drawn, which ends the request
            run = request.grammar.take(fewest, min(most, room), request.stop_ids)
            if run:
                room -= len(run)
                self._running.extend(request, run)
                self.num_tokens += len(run) - 1


def only_token(mask: np.ndarray) -> int | None:
    """The token of a mask that allows one alone. mask int32 [words]."""
    if np.count_nonzero(mask[:FEW_WORDS]) > 1 or np.count_nonzero(mask) != 1:  # most masks show it at once
        return None
    place = int(np.flatnonzero(mask)[0])
    word = int(mask[place]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * place + word.bit_length() - 1

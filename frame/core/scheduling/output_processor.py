"""`OutputProcessor`: takes a step's tokens in, ends what has ended, and makes the `StepTokens` message. Arrays for all rows;
a look at single requests only where one starts, ends or asked for more than its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from frame.core.grammars.grammar_masks import GrammarCalls
from frame.core.interfaces.batch import PromptLogprobs, StepResult
from frame.core.messages import Finish, StepTokens, TokenLogprobs
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import FIRST, LOGPROBS, PROMPT_LOGPROBS
from frame.core.scheduling.running import InFlight, RunningSet

NON_FINITE = Finish(
    "error", error="the model's logits were not finite; the request was ended, others are not affected", code="non_finite_logits"
)


@dataclass(slots=True)
class Sampled:
    """The sampling rows of a step whose requests are still there. `entries[i]` is row i's place in the `StepResult`."""

    slots: np.ndarray  # intp [n]
    tokens: np.ndarray  # int32 [n]
    entries: np.ndarray  # intp [n]
    rows: np.ndarray  # intp [n]; places in the batch
    fresh: np.ndarray  # bool [n]; whether the token is new: the first of a run that a grammar forces is known already
    finishes: dict[int, Finish] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)  # those of which nothing may be kept


class OutputProcessor:
    """`end(request, finish, keep)` takes a finished request off the device; `clock` is the scheduler's, and so is `grammars`."""

    def __init__(
        self, running: RunningSet, end: Callable[[Request, Finish, bool], None], clock: Callable[[], float], grammars: GrammarCalls
    ) -> None:
        self.num_generated = 0
        self._running = running
        self._table = running.table
        self._end = end
        self._clock = clock
        self._grammars = grammars

    def apply(self, record: InFlight, result: StepResult) -> StepTokens:
        """Append tokens (or hand out vectors), stop, insert, free. `record` must not be in flight any more."""
        if result.pooled is not None:
            return self._apply_pooled(record, result, result.pooled)
        if result.prompt_logprobs is not None:
            self._collect_prompt_logprobs(record, result.prompt_logprobs)
        sampled = self._live(record, result)
        self.num_generated += int(np.count_nonzero(sampled.fresh))
        self._find_ended(sampled, self._append(sampled), result)
        slots = sampled.slots.tolist()
        rids = [self._table.rids[slot] for slot in slots]
        message = StepTokens(rids=rids, token_ids=sampled.tokens[:, None].tolist(), finishes=sampled.finishes)
        self._add_details(sampled, result, message)
        self._share_prefilled(sampled, record)
        for i, finish in sampled.finishes.items():
            if i in sampled.broken:
                message.token_ids[i].clear()  # a token drawn from nothing is not worth sending
            self._end(self._table.request(slots[i]), finish, i not in sampled.broken)
        return message

    def _live(self, record: InFlight, result: StepResult) -> Sampled:
        """Leave out the rows of requests that left while the step was in flight."""
        rows = np.flatnonzero(record.samples)
        slots, tokens = record.slots[rows], result.token_ids
        if len(tokens) != len(rows):
            raise RuntimeError(f"step {record.step} yields {len(tokens)} tokens for {len(rows)} sampling rows")
        entries = np.arange(len(rows))
        live = self._table.arrays.epoch[slots] == record.epochs[rows]
        if not live.all():
            slots, tokens, entries, rows = slots[live], tokens[live], entries[live], rows[live]
        fresh = self._table.arrays.num_committed_tokens[slots] == record.num_computed[rows] + record.num_scheduled[rows]
        return Sampled(slots, tokens, entries, rows, fresh)

    def _append(self, sampled: Sampled) -> np.ndarray:
        """Commit the tokens that are new. -> how many each request has now, int32 [n]."""
        fresh = sampled.fresh
        if fresh.all():
            return self._table.append(sampled.slots, sampled.tokens)
        self._table.append(sampled.slots[fresh], sampled.tokens[fresh])
        return self._table.arrays.num_committed_tokens[sampled.slots]

    def _apply_pooled(self, record: InFlight, result: StepResult, pooled: np.ndarray) -> StepTokens:
        """Every prompt that is complete ends with its row of `pooled`."""
        live = record.samples & (self._table.arrays.epoch[record.slots] == record.epochs)
        entries = (np.cumsum(record.samples) - 1)[live]
        requests = [self._table.request(slot) for slot in record.slots[live].tolist()]
        broken = result.invalid[entries].tolist() if result.invalid is not None else [False] * len(requests)
        message = StepTokens(rids=[request.rid for request in requests], token_ids=[[] for _ in requests])
        for i, (request, entry) in enumerate(zip(requests, entries.tolist(), strict=True)):
            finish = NON_FINITE if broken[i] else Finish("stop")
            message.finishes[i] = finish
            _report_start(request, i, message)
            if not broken[i]:
                message.pooled[i] = pooled[entry].tobytes()
            self._end(request, finish, not broken[i])
        return message

    def _find_ended(self, sampled: Sampled, known: np.ndarray, result: StepResult) -> None:
        a, slots, tokens = self._table.arrays, sampled.slots, sampled.tokens
        stops = (a.stop_ids[slots] == tokens[:, None]).any(axis=1)
        stops &= (known >= a.min_num_tokens[slots]) & sampled.fresh
        for i in np.flatnonzero(known >= a.max_num_tokens[slots]).tolist():
            sampled.finishes[i] = Finish("length")
        for i in np.flatnonzero(stops).tolist():
            sampled.finishes[i] = Finish("stop", matched=int(tokens[i]))
        if result.invalid is not None:
            for i in np.flatnonzero(result.invalid[sampled.entries]).tolist():
                sampled.finishes[i] = NON_FINITE
                sampled.broken.add(i)

    def _add_details(self, sampled: Sampled, result: StepResult, message: StepTokens) -> None:
        special = self._table.arrays.special[sampled.slots]
        if not special.any():
            return
        rows = np.flatnonzero(special)
        drawn: list[tuple[int, Request, int]] = []  # tokens for grammars
        columns = [each[rows].tolist() for each in (sampled.slots, special, sampled.tokens, sampled.fresh)]
        for i, slot, flags, token, is_fresh in zip(rows.tolist(), *columns, strict=True):  # lists: reading arrays one by one is slow
            request = self._table.request(slot)
            if flags & (FIRST | PROMPT_LOGPROBS):
                self._add_first(request, flags, i, message)
            if i in sampled.broken:
                continue
            if flags & LOGPROBS and result.logprobs is not None:
                entry = int(sampled.entries[i])
                message.logprobs[i] = _token_logprobs(request, token, float(result.logprobs[entry]), entry, result)
            if request.unsent:
                message.token_ids[i] = request.unsent + [token] * is_fresh
                self.num_generated += len(request.unsent)
                request.unsent = []
            if request.grammar is not None and i not in sampled.finishes and is_fresh:
                drawn.append((i, request, token))
        for (i, _, _), finish in zip(drawn, self._grammars.accept_tokens([each[1:] for each in drawn]), strict=True):
            if finish is not None:
                sampled.finishes[i] = finish
                if finish.reason == "error":
                    sampled.broken.add(i)

    def _add_first(self, request: Request, flags: int, i: int, message: StepTokens) -> None:
        """What comes with a request's first token only."""
        if flags & FIRST:
            request.is_reported = True
            request.first_token = self._clock()
            _report_start(request, i, message)
        if flags & PROMPT_LOGPROBS:
            message.prompt_logprobs[i] = _prompt_logprobs(request)
            request.wants_prompt_logprobs, request.prompt_logprobs = False, []
        self._table.arrays.special[request.slot] = flags & ~(FIRST | PROMPT_LOGPROBS)

    def _share_prefilled(self, sampled: Sampled, record: InFlight) -> None:
        """Insert the prefills that this step completes into the prefix cache, so that siblings find them while these requests run.

        The prefill of a request that was preempted or recovered covers its output as well. A run of forced output is no prefill: it is
        inserted when its request leaves."""
        for i in np.flatnonzero(sampled.rows >= record.num_decodes).tolist():
            slot, row = int(sampled.slots[i]), int(sampled.rows[i])
            if i in sampled.finishes or slot not in self._running.prefilling:
                continue
            request = self._running.prefilling.pop(slot)
            duplicates = self._running.kv_manager.share(request, int(record.num_computed[row]) + int(record.num_scheduled[row]))
            self._running.give_up(slot, duplicates)

    def _collect_prompt_logprobs(self, record: InFlight, chunks: list[PromptLogprobs | None]) -> None:
        live = self._table.arrays.epoch[record.slots] == record.epochs
        for row, chunk in enumerate(chunks):
            if chunk is not None and live[row]:
                request = self._table.request(int(record.slots[row]))
                if request.wants_prompt_logprobs:
                    request.prompt_logprobs.append(chunk)


def _report_start(request: Request, i: int, message: StepTokens) -> None:
    """What a request's first result says about its beginning."""
    message.num_cached_tokens[i] = request.cached_tokens
    message.queue_times[i] = round(request.admitted - request.arrival, 6)


def _token_logprobs(request: Request, token: int, logprob: float, entry: int, result: StepResult) -> TokenLogprobs:
    """The log-probabilities of one sampled token, with as many alternatives as the request asked for."""
    top: list[tuple[int, float]] = []
    count = request.params.logprobs or 0
    if count and result.top_ids is not None and result.top_logprobs is not None:
        top = list(zip(result.top_ids[entry, :count].tolist(), result.top_logprobs[entry, :count].tolist(), strict=True))
    return TokenLogprobs([token], [logprob], [top])


def _prompt_logprobs(request: Request) -> TokenLogprobs:
    """The chunks' log-probabilities as one; the first token has none."""
    count = request.params.prompt_logprobs or 0
    logprobs: list[float | None] = [None] * request.prompt_len
    top: list[list[tuple[int, float]]] = [[] for _ in range(request.prompt_len)]
    ranks: list[int | None] = [None] * request.prompt_len
    for chunk in request.prompt_logprobs:
        counted = [None] * len(chunk.logprobs) if chunk.ranks is None else chunk.ranks.tolist()
        for i, value in enumerate(chunk.logprobs.tolist()):
            if chunk.first + i >= request.prompt_len:
                break
            ranks[chunk.first + i] = counted[i]
            logprobs[chunk.first + i] = value
            top[chunk.first + i] = list(zip(chunk.top_ids[i, :count].tolist(), chunk.top_logprobs[i, :count].tolist(), strict=True))
    return TokenLogprobs(request.prompt.tolist(), logprobs, top, ranks)

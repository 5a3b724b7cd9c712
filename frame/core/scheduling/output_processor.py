"""`OutputProcessor`: commits a step's sampled tokens, ends finished requests and builds the
`StepTokens` message.

Used by the scheduler (vLLM: `Scheduler.update_from_output`). Works on arrays for all rows; looks at
single requests only where one starts, ends, or asked for more than its tokens. It must not know the
queue or a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from frame.core.interfaces.batch import StepResult
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, StepTokens, TokenLogprobs
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import FIRST_TOKEN, LOGPROBS, PROMPT_LOGPROBS
from frame.core.scheduling.running import RunningSet, StepRecord
from frame.core.scheduling.step_features import Speculation, StepGrammars

NON_FINITE = Finish(
    "error", error="the model's logits were not finite; the request was ended, others are not affected", code="non_finite_logits"
)

_GRAMMARS = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
_BANS = {"bad_words": "shorten bad_words", "bad_words_ids": "shorten bad_words_ids", "logit_bias": "change logit_bias"}


@dataclass(slots=True)
class Runs:
    """The output of rows with drafts; i as in `SampledRows`."""

    tokens: np.ndarray  # int32 [n, width]; of row i the first `counts[i]` are output
    counts: np.ndarray  # int32 [n]; at least 1
    num_drafts: np.ndarray  # int32 [n]; drafted tokens of the row
    accepted: np.ndarray  # int32 [n]; of them output
    nodes: np.ndarray | None  # int64 [n, width]; of trees: the node that each token is drawn after; None: chains


@dataclass(slots=True)
class SampledRows:
    """The sampling rows of a step whose requests still run; i is an index into these arrays."""

    slots: np.ndarray  # intp [n]
    tokens: np.ndarray  # int32 [n]; the last token of each row that is output
    entries: np.ndarray  # intp [n]; the sample of this token: an index into the `StepResult`
    rows: np.ndarray  # intp [n]; indices into the batch
    is_new: np.ndarray  # bool [n]; False: the token was committed before, as the first of a run that a grammar forced
    runs: Runs | None = None  # None: each row has one token
    finishes: dict[int, Finish] = field(default_factory=dict)  # by i
    discarded: set[int] = field(default_factory=set)  # each i whose last token is not sent and whose pages are not cached


class OutputProcessor:
    """Commits steps in order.

    `end(request, finish, keep)` takes a finished request off the device and keeps its computed
    tokens in the prefix cache if `keep`. `clock`, `grammars` and `speculation` are those of the
    scheduler.
    """

    def __init__(
        self,
        running: RunningSet,
        end: Callable[[Request, Finish, bool], None],
        clock: Callable[[], float],
        grammars: StepGrammars,
        speculation: Speculation,
    ) -> None:
        self.num_generated = 0
        self._running = running
        self._table = running.table
        self._end = end
        self._clock = clock
        self._grammars = grammars
        self._speculation = speculation

    def process_step(self, record: StepRecord, result: StepResult) -> StepTokens:
        """Commit the step's tokens or vectors and end what is finished. `record` must have been
        removed by `begin_commit`."""
        if result.prompt_logprobs is not None or result.hidden_states is not None:
            self._collect_prompts(record, result)
        if result.pooled is not None:
            return self._process_pooled(record, result, result.pooled)
        sampled = self._select_live_rows(record, result)
        num_committed = self._commit_tokens(sampled) if sampled.runs is None else self._commit_runs(sampled, sampled.runs)
        if self._speculation.is_active:
            self._observe_tokens(sampled, record, result)
        self._find_finished(sampled, num_committed, result)
        slots = sampled.slots.tolist()
        rids = [self._table.rids[slot] for slot in slots]
        message = StepTokens(rids=rids, token_ids=_list_tokens(sampled), finishes=sampled.finishes)
        if sampled.runs is not None:
            _add_drafts(sampled.runs, message)
        for i in sampled.discarded:
            message.token_ids[i].pop()
        self._add_details(sampled, result, message)
        for slot, matrix in result.alignments.items():  # of prompts of one token, which sample in the step that encodes
            if slot in slots:
                message.pooled[slots.index(slot)] = matrix.tobytes()
        self._cache_prefills(sampled, record)
        if self._running.on_cached is not None and self._running.kv_manager.groups is None:
            self._cache_output(sampled)
        for i, finish in sampled.finishes.items():
            self._end(self._table.get_request(slots[i]), finish, i not in sampled.discarded)
        return message

    def _select_live_rows(self, record: StepRecord, result: StepResult) -> SampledRows:
        """The sampling rows, without those of requests that left while the step was in flight.
        Raises RuntimeError where the result's size is not that of the step."""
        rows = np.flatnonzero(record.samples)
        slots, tokens = record.slots[rows], result.token_ids
        num_samples = len(rows) + (0 if record.num_drafts is None else int(record.num_drafts.sum()))
        if len(tokens) != num_samples:
            raise RuntimeError(f"step {record.step} yields {len(tokens)} tokens for {num_samples} samples")
        if record.num_drafts is not None:
            return self._select_live_runs(record, result, rows, record.num_drafts)
        entries = np.arange(len(rows))
        live = self._table.arrays.epoch[slots] == record.epochs[rows]
        if not live.all():
            slots, tokens, entries, rows = slots[live], tokens[live], entries[live], rows[live]
        is_new = self._table.arrays.num_committed_tokens[slots] == record.num_computed[rows] + record.num_scheduled[rows]
        return SampledRows(slots, tokens, entries, rows, is_new)

    def _select_live_runs(self, record: StepRecord, result: StepResult, rows: np.ndarray, num_drafts: np.ndarray) -> SampledRows:
        """The same of a step with drafts. A run ends at the first token that ends its request."""
        a, drafted = self._table.arrays, num_drafts[rows]
        firsts, counts = np.cumsum(drafted + 1) - drafted - 1, result.counts
        if counts is None:
            raise RuntimeError(f"step {record.step} has drafts, but its result does not say how many samples are output")
        live = a.epoch[record.slots[rows]] == record.epochs[rows]
        rows, drafted, firsts, counts = rows[live], drafted[live], firsts[live], counts[live]
        slots, offsets = record.slots[rows], np.arange(int(counts.max(initial=1)))
        cells = np.minimum(firsts[:, None] + offsets, len(result.token_ids) - 1)
        tokens, before = result.token_ids[cells], record.num_computed[rows] + record.num_scheduled[rows] - drafted
        ends = (a.stop_ids[slots][:, None, :] == tokens[:, :, None]).any(axis=2)
        ends &= before[:, None] + 1 + offsets >= a.min_num_tokens[slots][:, None]
        if result.invalid is not None:
            ends |= result.invalid[cells]
        if record.limits is not None:
            counts = np.minimum(counts, record.limits[slots])
        accepted = counts - 1
        counts = np.where(ends.any(axis=1), np.minimum(ends.argmax(axis=1) + 1, counts), counts).astype(np.int32)
        entries, is_new = firsts + counts - 1, a.num_committed_tokens[slots] == before
        nodes = None if result.order is None else result.order[cells] - firsts[:, None]
        runs = Runs(tokens, counts, drafted, np.minimum(accepted, counts), nodes)
        return SampledRows(slots, result.token_ids[entries], entries, rows, is_new, runs)

    def _commit_runs(self, sampled: SampledRows, runs: Runs) -> np.ndarray:
        """Commit the new tokens of a step with drafts, and set the counters of its rows, and of
        their rows in flight, back to what was accepted. -> committed tokens of each request, int32
        [n]."""
        a, is_new = self._table.arrays, sampled.is_new
        for offset in range(runs.tokens.shape[1]):
            chosen = is_new & (runs.counts > offset)
            self._table.append_tokens(sampled.slots[chosen], runs.tokens[chosen, offset])
        self.num_generated += int(runs.counts[is_new].sum())
        has_draft = runs.num_drafts > 0
        slots, rejected = sampled.slots[has_draft], (self._speculation.bound_accepted(runs.num_drafts) + 1 - runs.counts)[has_draft]
        a.num_computed_tokens[slots] -= rejected
        a.num_tokens[slots] -= rejected
        a.can_decode[slots] = a.num_tokens[slots] < a.max_num_tokens[slots]
        self._running.take_back(slots, rejected)
        self._speculation.count(sampled.slots, runs.num_drafts, runs.accepted, runs.nodes)
        return a.num_committed_tokens[sampled.slots]

    def _observe_tokens(self, sampled: SampledRows, record: StepRecord, result: StepResult) -> None:
        """Pass the new tokens to the drafter, and the drafts that the device made after them."""
        runs, chosen = sampled.runs, sampled.is_new
        tokens = sampled.tokens[:, None] if runs is None else runs.tokens
        counts = np.ones(len(tokens), np.int32) if runs is None else runs.counts
        self._speculation.observe(sampled.slots[chosen], tokens[chosen], counts[chosen])
        if result.drafts is not None:
            sampling_rows = (np.cumsum(record.samples) - 1)[sampled.rows[chosen]]
            self._speculation.store(sampled.slots[chosen], result.drafts[sampling_rows])
        elif record.num_ordered and record.samples.any():
            self._speculation.store(sampled.slots, None)

    def _commit_tokens(self, sampled: SampledRows) -> np.ndarray:
        """Commit the new tokens. -> committed tokens of each request, int32 [n]."""
        is_new = sampled.is_new
        self.num_generated += int(np.count_nonzero(is_new))
        if is_new.all():
            return self._table.append_tokens(sampled.slots, sampled.tokens)
        self._table.append_tokens(sampled.slots[is_new], sampled.tokens[is_new])
        return self._table.arrays.num_committed_tokens[sampled.slots]

    def _process_pooled(self, record: StepRecord, result: StepResult, pooled: np.ndarray) -> StepTokens:
        """End every request whose prompt is complete with its vector, a row of `pooled` (float32
        [entries, size])."""
        live = record.samples & (self._table.arrays.epoch[record.slots] == record.epochs)
        entries = (np.cumsum(record.samples) - 1)[live]
        requests = [self._table.get_request(slot) for slot in record.slots[live].tolist()]
        broken = result.invalid[entries].tolist() if result.invalid is not None else [False] * len(requests)
        message = StepTokens(rids=[request.rid for request in requests], token_ids=[[] for _ in requests])
        for i, (request, entry) in enumerate(zip(requests, entries.tolist(), strict=True)):
            finish = NON_FINITE if broken[i] else Finish("stop")
            message.finishes[i] = finish
            _report_start(request, i, message)
            if not broken[i]:
                message.pooled[i] = _join_states(request) if request.wants_prompt_logprobs else pooled[entry].tobytes()
            self._end(request, finish, not broken[i])
        return message

    def _find_finished(self, sampled: SampledRows, num_committed: np.ndarray, result: StepResult) -> None:
        """Note in `sampled.finishes` the requests that end by a stop token, by their length or
        because of non-finite logits or a fault of a logits processor."""
        a, slots, tokens = self._table.arrays, sampled.slots, sampled.tokens
        stops = (a.stop_ids[slots] == tokens[:, None]).any(axis=1)
        stops &= (num_committed >= a.min_num_tokens[slots]) & sampled.is_new
        for i in np.flatnonzero(num_committed >= a.max_num_tokens[slots]).tolist():
            sampled.finishes[i] = Finish("length")
        for i in np.flatnonzero(stops).tolist():
            sampled.finishes[i] = Finish("stop", matched=int(tokens[i]))
        if result.invalid is not None:
            for i in np.flatnonzero(result.invalid[sampled.entries]).tolist():
                is_banned = result.banned is not None and result.banned[sampled.entries[i]]
                request = self._table.get_request(slots[i])
                num_output = int(num_committed[i]) - 1 - request.prompt_len
                sampled.finishes[i] = _explain_bans(request.params, num_output) if is_banned else NON_FINITE
                sampled.discarded.add(i)
        for i, entry in enumerate(sampled.entries.tolist()) if result.faults else ():
            if result.faults is not None and entry in result.faults:
                sampled.finishes[i] = Finish("error", error=result.faults[entry])
                sampled.discarded.add(i)

    def _add_details(self, sampled: SampledRows, result: StepResult, message: StepTokens) -> None:
        """Handle rows with flags: first tokens, log-probabilities, forced tokens, grammars."""
        special = self._table.arrays.special[sampled.slots]
        if not special.any():
            return
        rows = np.flatnonzero(special)
        drawn: list[tuple[int, Request, list[int]]] = []  # (i, request, tokens) for its grammar
        runs = sampled.runs
        columns = [each[rows].tolist() for each in (sampled.slots, special, sampled.tokens, sampled.is_new)]
        for i, slot, flags, token, is_token_new in zip(
            rows.tolist(), *columns, strict=True
        ):  # lists: reading single array elements is slow
            request = self._table.get_request(slot)
            if flags & (FIRST_TOKEN | PROMPT_LOGPROBS):
                self._add_first(request, flags, i, message)
            is_discarded, ids = i in sampled.discarded, message.token_ids[i]
            if flags & LOGPROBS and result.logprobs is not None and ids:
                end = int(sampled.entries[i]) + (not is_discarded)
                message.logprobs[i] = _token_logprobs(request, slice(end - len(ids), end), result)
            if is_discarded:
                continue
            if request.unreported:
                message.token_ids[i] = request.unreported + ids * is_token_new
                self.num_generated += len(request.unreported)
                request.unreported = []
            if request.grammar is not None and i not in sampled.finishes and is_token_new:
                drawn.append((i, request, [token] if runs is None else runs.tokens[i, : runs.counts[i]].tolist()))
        ends = self._grammars.accept_tokens([each[1:] for each in drawn], len(sampled.slots))
        for (i, _, _), finish in zip(drawn, ends, strict=True):
            if finish is not None:
                sampled.finishes[i] = finish
                if finish.reason == "error":  # the token breaks the grammar
                    sampled.discarded.add(i)
                    del message.token_ids[i][0 if runs is None else -1 :]  # a grammar allows all tokens of a draft

    def _add_first(self, request: Request, flags: int, i: int, message: StepTokens) -> None:
        """Add what is sent once, with a request's first token."""
        if flags & FIRST_TOKEN:
            request.is_reported = True
            request.first_token_at = self._clock()
            _report_start(request, i, message)
        if flags & PROMPT_LOGPROBS:
            if request.params.return_hidden_states:
                message.pooled[i] = _join_states(request)
            else:
                message.prompt_logprobs[i] = _prompt_logprobs(request)
            request.wants_prompt_logprobs, request.prompt_logprobs, request.hidden_states = False, [], []
        self._table.arrays.special[request.slot] = flags & ~(FIRST_TOKEN | PROMPT_LOGPROBS)

    def _cache_prefills(self, sampled: SampledRows, record: StepRecord) -> None:
        """Insert the prefills that this step completes into the prefix cache, so that other
        requests match them while these run. With several cache groups, also the chunks before
        them: a match can only end where a window or a state was kept.

        The prefill of a preempted or recovered request covers its output too.
        """
        if self._running.kv_manager.groups is not None:
            self._cache_chunks(record)
        for i in np.flatnonzero(sampled.rows >= record.num_decodes).tolist() if self._running.prefilling else ():
            slot, row = int(sampled.slots[i]), int(sampled.rows[i])
            if i in sampled.finishes or slot not in self._running.prefilling:
                continue
            request = self._running.prefilling.pop(slot)
            self._running.cache_prefill(request, int(record.num_computed[row]) + int(record.num_scheduled[row]))

    def _cache_output(self, sampled: SampledRows) -> None:
        """Insert a running request's output, for the tiers, each time it has grown by a 32nd."""
        shared = self._table.arrays.num_shared[sampled.slots]
        gaps = self._table.arrays.num_computed_tokens[sampled.slots] // self._running.kv_manager.page_size - shared - shared // 32
        for i in np.argsort(-gaps)[: np.count_nonzero(gaps > 1)].tolist():
            request = self._table.get_request(sampled.slots[i])
            if i not in sampled.finishes and request.slot not in self._running.extending and not request.next_namespace:
                self._table.flush_tokens(request.slot)
                request.tokens = request.all_tokens()
                self._running.cache_prefill(request, self._running.count_committed(request.slot))
                break

    def _cache_chunks(self, record: StepRecord) -> None:
        """Insert what this step computed of prompts that it does not complete."""
        is_chunk = ~record.samples & (self._table.arrays.epoch[record.slots] == record.epochs)
        for row in np.flatnonzero(is_chunk).tolist():
            request = self._running.prefilling.get(int(record.slots[row]))
            if request is not None:
                self._running.cache_prefill(request, int(record.num_computed[row]) + int(record.num_scheduled[row]))

    def _collect_prompts(self, record: StepRecord, result: StepResult) -> None:
        live = self._table.arrays.epoch[record.slots] == record.epochs
        for row in np.flatnonzero(live).tolist():
            chunk = None if result.prompt_logprobs is None else result.prompt_logprobs[row]
            states = None if result.hidden_states is None else result.hidden_states[row]
            if chunk is None and states is None:
                continue
            request = self._table.get_request(int(record.slots[row]))
            if chunk is not None and request.wants_prompt_logprobs:
                request.prompt_logprobs.append(chunk)
            if states is not None and request.wants_prompt_logprobs:
                request.hidden_states.append(states)


def _join_states(request: Request) -> bytes:
    """The hidden states of the prompt's tokens."""
    return b"".join(states.tobytes() for states in request.hidden_states)


def _add_drafts(runs: Runs, message: StepTokens) -> None:
    """Add how many drafted tokens of each row were accepted and rejected."""
    rows = np.flatnonzero(runs.num_drafts)
    accepted = runs.accepted[rows]
    counts = zip(accepted.tolist(), (runs.num_drafts[rows] - accepted).tolist(), strict=True)
    message.drafts.update(zip(rows.tolist(), counts, strict=True))


def _report_start(request: Request, i: int, message: StepTokens) -> None:
    """Add the number of cached tokens and the queue time, which are sent with a request's first
    result."""
    message.num_cached_tokens[i] = request.num_cached_tokens
    if request.cached_tiers:
        message.cached_tiers[i] = request.cached_tiers
    message.queue_times[i] = round(request.admitted_at - request.arrival, 6)


def _list_tokens(sampled: SampledRows) -> list[list[int]]:
    """The tokens of each row that are output."""
    if sampled.runs is None:
        tokens: list[list[int]] = sampled.tokens[:, None].tolist()
        return tokens
    return [run[:count] for run, count in zip(sampled.runs.tokens.tolist(), sampled.runs.counts.tolist(), strict=True)]


def _token_logprobs(request: Request, samples: slice, result: StepResult) -> TokenLogprobs:
    """The log-probabilities of a row's samples, and for each those of the `params.logprobs`
    likeliest tokens and of `params.logprob_token_ids`."""
    count, chosen = request.params.logprobs or 0, result.logprobs
    assert chosen is not None
    top: list[list[tuple[int, float]]] = [[] for _ in range(samples.stop - samples.start)]
    if count and result.top_ids is not None and result.top_logprobs is not None:
        columns = zip(result.top_ids[samples, :count].tolist(), result.top_logprobs[samples, :count].tolist(), strict=True)
        top = [list(zip(ids, values, strict=True)) for ids, values in columns]
    if (listed := request.params.logprob_token_ids) and result.listed_logprobs is not None:
        for entries, values in zip(top, result.listed_logprobs[samples, : len(listed)].tolist(), strict=True):
            entries += zip(listed, values, strict=True)
    return TokenLogprobs(result.token_ids[samples].tolist(), chosen[samples].tolist(), top)


def _prompt_logprobs(request: Request) -> TokenLogprobs:
    """Join the chunks' log-probabilities; the first prompt token has none."""
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


def _explain_bans(params: SamplingParams, num_output: int) -> Finish:
    """How a request ends after `num_output` tokens if every logit is -inf: by its parameters,
    where some ban tokens."""
    remedies = {name: remedy for name, remedy in _BANS.items() if getattr(params, name)}
    if params.bad_words:
        remedies.pop("bad_words_ids", None)  # made of them
    if num_output < params.min_tokens:
        remedies = {"min_tokens": f"lower min_tokens to {num_output}"} | remedies
    fields = [*(name for name in _GRAMMARS if getattr(params, name)), *remedies]
    if not fields:
        return NON_FINITE
    remedy = " or ".join(remedies.values()) or f"change {fields[0]}"
    what = f"after {num_output} tokens of output no token is allowed by {' and '.join(fields)}"
    return Finish("error", error=f"{what}; {remedy}", code="invalid_request", param=next(iter(remedies), fields[0]))

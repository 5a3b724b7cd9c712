"""`Scheduler`: queues requests, schedules the tokens of each step and commits the sampled ones.

The engine's loop uses this one object for all that concerns requests (vLLM: `Scheduler`; SGLang:
`Scheduler` with `ScheduleBatch`). It must not touch a device or a socket. Step N + 1 may be
scheduled before step N is committed: decode rows need no token on the host, and a row whose request
has ended meanwhile is ignored when its step is committed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from frame.core.interfaces.batch import DraftOrder, ScheduledBatch, StepResult
from frame.core.interfaces.cache import SupportsOutline, change_version
from frame.core.interfaces.sampling import Grammar
from frame.core.interfaces.scheduling import SchedulingPolicy
from frame.core.ipc.inflight_file import open_inflight
from frame.core.kv_cache.prefix_pins import PrefixPins
from frame.core.messages import Finish, FinishReason, Generate, StepTokens
from frame.core.scheduling.admission import Admission, SchedulerConfig
from frame.core.scheduling.integrity import audit_accounts, check_accounts, repair_accounts
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.output_processor import OutputProcessor
from frame.core.scheduling.planner import StepPlanner
from frame.core.scheduling.request import Request, RequestStatus, queue_full, timed_out
from frame.core.scheduling.request_outline import outline_requests
from frame.core.scheduling.request_slots import GRAMMAR, PROMPT_LOGPROBS
from frame.core.scheduling.running import RunningSet, StepPlan, StepRecord, list_sampling_slots
from frame.core.scheduling.step_features import NoTiers, StepFeatures
from frame.core.scheduling.waiting_queue import Deadlines, TenantUsage, WaitingQueue

__all__ = ["Scheduler", "SchedulerConfig"]

log = logging.getLogger(__name__)

_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class FailedRequests:
    """What became of the requests of a failed step. `is_first`: the failure is no repetition of an
    earlier one, as that of a request that runs alone because its step failed."""

    ended: StepTokens
    retried: list[str]  # rids of requests that run again
    is_first: bool


class Scheduler:
    """Continuous batching with chunked prefill over a paged, prefix-cached KV pool.

    `schedule_batch` and `commit` alternate; with `config.overlap` one batch may be scheduled
    while another one is in flight. Steps are committed in the order of their batches. `running` is
    empty at first. `clock` gives seconds, monotonic; `on_finish` is called once for each request
    that ends.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        running: RunningSet,
        policy: SchedulingPolicy,
        features: StepFeatures,
        clock: Callable[[], float] = time.monotonic,
        on_finish: Callable[[Request, Finish], None] | None = None,
    ) -> None:
        self.config = config
        self._clock = clock
        self._on_finish = on_finish
        self._requests: dict[str, Request] = {}
        self._running = running
        self._queue = WaitingQueue(policy.by_priority, TenantUsage(running.num_of_tenant))
        self._deadlines = Deadlines()
        self._admission = Admission(config)
        self._grammars, self.speculation = features.grammars, features.speculation
        running.on_remove = features.release
        running.on_cached = None if isinstance(features.tiers, NoTiers) else features.tiers.offer
        running.pins = PrefixPins(running.kv_manager.cache, config.page_size, config.max_pinned_pages, clock)
        self._planner = StepPlanner(config, running, self._queue, policy, features)
        self._output = OutputProcessor(running, self._finish_running, clock, self._grammars, self.speculation)
        self._finished: list[tuple[str, Finish]] = []
        self._step = 0
        self._num_prompt_tokens = 0

    # requests -------------------------------------------------------------------------------------

    def add_request(self, message: Generate, grammar: Grammar | None = None, arrival: float | None = None) -> Finish | None:
        """Queue a request. -> None, or how it ends because it is refused (code "queue_full": it may
        be sent again).

        `arrival`: when the engine received it, in seconds of the clock, from which its deadline
        counts; None: now.
        """
        if message.rid in self._requests:
            return Finish("error", error=f"request id {message.rid} is in use; choose another", code="invalid_request", param="rid")
        # Both together: all of a burst is queued before any of it runs
        if len(self._requests) >= self.config.max_running + self.config.max_queued:
            return queue_full(f"{len(self._requests)} requests are running or waiting")
        arrival = self._clock() if arrival is None else arrival
        request = self._admission.create_request(message, arrival, grammar)
        if isinstance(request, Finish):
            return request
        for feature in (self._planner.media, self._planner.adapters):
            if (refusal := feature.start_request(request)) is not None:
                return refusal
        if grammar is not None and (refusal := self._grammars.start_request(request)) is not None:
            return refusal
        self._requests[request.rid] = request
        self._queue.usage.add_request(request.tenant)
        self._queue.push(request)
        self._deadlines.add_request(request, len(self._requests))
        self._num_prompt_tokens += request.prompt_len
        return None

    def abort(self, rids: Sequence[str], reason: FinishReason = "abort") -> None:
        """End these requests, in any state; unknown ones are no error."""
        for rid in rids:
            request = self._requests.get(rid)
            if request is not None:
                self._finish(request, Finish(reason))

    def abort_all(self, reason: FinishReason = "abort") -> None:
        """End every request, in any state."""
        self.abort(list(self._requests), reason)

    def drain_outputs(self) -> StepTokens | None:
        """Return the requests that ended outside of a step since the last call."""
        if not self._finished:
            return None
        ended, self._finished = self._finished, []
        return StepTokens(
            rids=[rid for rid, _ in ended], token_ids=[[] for _ in ended], finishes={i: finish for i, (_, finish) in enumerate(ended)}
        )

    def close(self) -> None:
        """Stop the threads that call grammars, and the cache tiers."""
        self._grammars.close()
        self._planner.tiers.close()

    # steps ----------------------------------------------------------------------------------------

    def schedule_batch(self, now: float | None = None) -> ScheduledBatch | None:
        """Schedule the next step; None when nothing can run before a step is committed or a request
        is added, or when drafts need the tokens of the step in flight. `now`: seconds of the
        clock."""
        now = self._clock() if now is None else now
        self._planner.tiers.poll(now)
        self._running.pins.end_due()
        if len(self._running.in_flight) > self.config.overlap:
            raise RuntimeError("a batch is asked for while too many steps are in flight; commit the oldest first")
        speculation = self.speculation
        if self._running.in_flight and speculation.may_draft and not speculation.overlaps:
            return None
        for request in self._deadlines.pop_expired(now):
            self._finish(request, timed_out(request.deadline - request.arrival))
        self._finish_masks()
        self._resume_held_requests()
        plan = self._planner.plan_step(self._step, now)
        if not plan:
            return None
        batch, record = self._assemble(plan)
        self._running.in_flight.append(record)
        self._hold_slow_grammars()
        self._step += 1
        return batch

    def poll_tiers(self, now: float) -> None:
        """Take in the copies of the cache tiers that have ended, while no step is scheduled. `now`:
        seconds of the clock."""
        self._planner.tiers.poll(now)

    def fill_deferred_mask(self, batch: ScheduledBatch) -> np.ndarray | None:
        """The grammar mask of a batch with `has_deferred_grammar_mask`, int32 [samples, words];
        None if no row has a grammar. All earlier steps must be committed."""
        record = self._running.get_oldest(batch.step)
        mask, record.limits = self._fill_masks(list_sampling_slots(batch.slots, batch.samples, batch.num_drafts), batch.num_pending)
        self._hold_slow_grammars()
        return mask

    def commit(self, batch: ScheduledBatch, result: StepResult) -> StepTokens:
        """Commit the tokens of the oldest step in flight, which must be `batch`. Rows whose request
        has left are ignored."""
        record = self._running.begin_commit(batch.step)
        tokens = self._output.process_step(record, result)
        self._running.end_commit(record)
        if self._planner.prompt_budget is not None:
            self._planner.prompt_budget.record_step(record, self._clock())
        if self.speculation.is_active:
            self.speculation.record_step(record, self._clock())
        self._hold_slow_grammars()
        return tokens

    def fail_step(self, batch: ScheduledBatch, error: str) -> FailedRequests:
        """Take the requests of the oldest step in flight, which raised, off the device.

        A request that was the only row of its step ends with `error`. Those of a step of several
        rows are queued again and run alone once, so that only those at fault end. Nothing that the
        step computed is cached.
        """
        self._finish_masks()
        running, record = self._running, self._running.get_oldest(batch.step)
        alive = running.table.arrays.epoch[record.slots] == record.epochs
        rows = set(record.slots[alive].tolist())
        slots = rows | {setup.slot for setup in batch.setups}  # the device may lack these setups
        slots |= {request.slot for request in self._planner.media.fail_step(batch.step, running.requests)}
        requests = [request for slot in sorted(slots) if (request := running.table.requests[slot]) is not None]
        is_alone = len(record.slots) == 1 and not any(order.first_layer or order.stop_layer for order in batch.encodes)
        ended = [request for request in requests if is_alone and request.slot in rows]
        again = [request for request in requests if request not in ended]
        finish = Finish("error", error=error)
        for request in ended:
            self._finish_running(request, finish, False)
        self._planner.retry_alone(again)
        running.end_commit(running.begin_commit(batch.step))
        running.kv_manager.repeat_table_writes(batch.new_pages[:, 0])
        self._planner.adapters.repeat_loads(batch.adapter_loads)
        finishes = dict.fromkeys(range(len(ended)), finish)
        message = StepTokens(rids=[request.rid for request in ended], token_ids=[[] for _ in ended], finishes=finishes)
        return FailedRequests(message, [request.rid for request in again], bool(rows) and not record.is_retry)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits or runs, no step is in flight, no end is left to report, and no
        cache tier copies."""
        return not (self._requests or self._running.in_flight or self._finished or self._planner.tiers.is_busy)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    def has_request(self, rid: str) -> bool:
        """Whether this request waits or runs."""
        return rid in self._requests

    def publish_inflight(self, path: Path, others: Sequence[Scheduler] = ()) -> None:
        """Record the running requests, and those of `others`, in an in-flight file from now on, or
        log that there is no room for one."""
        maximum = self.config.max_running
        try:
            entries = open_inflight(path, maximum * (1 + len(others)))
            for number, scheduler in enumerate((self, *others)):
                scheduler.set_inflight(entries[:, number * maximum : (number + 1) * maximum])
        except OSError as error:
            path.unlink(missing_ok=True)
            log.warning("no in-flight file is kept (%s): if the engine crashes, all its requests are suspected", error)

    def list_kv_managers(self) -> list[KVCacheManager]:
        """The manager of its KV cache."""
        return [self._running.kv_manager]

    def set_inflight(self, entries: np.ndarray) -> None:
        """Record the running requests in these entries of an in-flight file."""
        self._running.table.inflight = entries

    def end_session(self, tenant: str, session: str) -> bool:
        """Keep what a tenant's session has pinned no more. -> whether there was such a pin."""
        return self._running.pins.end_pin(tenant, session)

    # maintenance ----------------------------------------------------------------------------------

    def flush_cache(self) -> int:
        """Evict all cached prefixes that no running request uses, and let no request read what the
        tiers hold now. -> pages freed."""
        self._planner.tiers.invalidate_blocks()
        self._running.pins.end_all()
        pages = self._running.kv_manager.evict_prefixes()
        self._running.kv_manager.allocator.free(pages)
        return len(pages)

    def preempt_all(self) -> int:
        """Preempt every running request and evict every cached prefix, so that all tokens are
        computed anew; no step may be in flight. -> the number of preempted requests. Raises
        RuntimeError if pages stay in use."""
        self._finish_masks()
        requests = list(self._running.requests)
        for request in reversed(requests):
            self._planner.preempt(request, is_shortage=False)
        self.flush_cache()
        free, total = self._running.kv_manager.allocator.num_free, self.config.num_pages - 1
        if free != total:
            raise RuntimeError(f"{total - free} pages stay in use after all requests were preempted")
        return len(requests)

    def change_weights(self, *, keeps_running: bool) -> int:
        """Other weights come; no step may be in flight. No request reads what the earlier ones have
        cached. Running requests are preempted, or go on with their KV (`keeps_running`), of which
        nothing is cached any more. -> the number of preempted requests."""
        num_preempted = 0 if keeps_running else self.preempt_all()
        self._admission.num_updates += 1
        for request in self._requests.values():
            renewed = change_version(request.namespace, self._admission.num_updates)
            if request.state == RequestStatus.RUNNING:
                request.next_namespace = renewed
            else:
                request.namespace = renewed
        self._planner.media.fail_step(self._step, ())  # rows of other encoders
        if keeps_running:
            self.flush_cache()
        return num_preempted

    def admit_new_requests(self, allowed: bool) -> None:
        """Whether requests that have not run yet may be admitted from now on."""
        self._running.admits_new = allowed

    def count_started(self) -> int:
        """Requests that run, or have run and wait."""
        return sum(1 for request in self._requests.values() if request.admitted_at)

    def outline_cache(self, limit: int) -> dict[str, Any]:
        """The prefix cache's most recently used runs, for display: `CachedRun` as plain data."""
        cache = self._running.kv_manager.cache
        runs = cache.outline(limit) if isinstance(cache, SupportsOutline) else []
        return {"page_size": self.config.page_size, "runs": [asdict(run) for run in runs]}

    def outline_requests(self, limit: int) -> dict[str, Any]:
        """What the requests do now, for display: counts, and the oldest `limit` of them."""
        queue = self._queue if len(self._grammars) else None
        return outline_requests(self._requests, self._running, queue, self._planner, self._clock(), limit)

    def get_load(self) -> dict[str, Any]:
        """Gauges, and counters since the start, named as in `Heartbeat`."""
        kv_manager = self._running.kv_manager
        total, evictable = self.config.num_pages - 1, kv_manager.cache.num_evictable
        return {
            "running": len(self._running),
            "waiting": len(self._queue) + len(self._grammars),
            "used_pages": total - kv_manager.allocator.num_free - evictable,
            "total_pages": total,
            "evictable_pages": evictable,
            "groups": [] if kv_manager.groups is None else kv_manager.groups.describe_load(),
            "preempted": self._planner.num_preempted,
            "cached_tokens": self._planner.num_cached_tokens,
            "prompt_tokens": self._num_prompt_tokens,
            "generated_tokens": self._output.num_generated,
            "jumped_tokens": self._grammars.num_jumped,
            **self.speculation.describe_load(),
            **self._planner.adapters.describe_load(),
            **self._planner.media.describe_load(),
            **self._planner.tiers.describe_load(),
            **self._running.pins.describe_load(),
        }

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every page, lock and slot is accounted for; see `integrity`."""
        check_accounts(self._running, self._planner.tiers)

    def audit_integrity(self) -> Iterator[None]:
        """`check_integrity` in parts of about a millisecond. The result is void if requests were
        added or ran meanwhile."""
        return audit_accounts(self._running, self._planner.tiers)

    def repair_integrity(self) -> list[str]:
        """Repair what `check_integrity` finds. -> one sentence for each repair."""
        return repair_accounts(self._running, self._planner.tiers)

    # internals ------------------------------------------------------------------------------------

    def _assemble(self, plan: StepPlan) -> tuple[ScheduledBatch, StepRecord]:
        """Build the step's batch, and the record of it that is kept until its commit."""
        running, a, drafts = self._running, self._running.table.arrays, plan.drafts
        slots, num_decodes = plan.decode_slots, len(plan.decode_slots)
        num_computed = a.num_computed_tokens[slots] - 1
        num_scheduled = np.ones(num_decodes, np.int32)
        samples = np.ones(num_decodes, np.bool_)
        token_ids, prompt_logprobs, skip_kv_store, num_drafts = _NO_TOKENS, None, None, None
        if drafts is not None:
            counts, slots = drafts.counts, np.concatenate((slots, plan.draft_slots))
            ahead = self.speculation.bound_accepted(counts)
            num_computed = np.concatenate((num_computed, a.num_computed_tokens[plan.draft_slots] - 1 - ahead))
            num_drafts = np.concatenate((np.zeros(num_decodes, np.int32), counts, np.zeros(len(plan.chunks), np.int32)))
            num_scheduled = num_drafts[: len(slots)] + 1
            samples = np.ones(len(slots), np.bool_)
            token_ids = self.speculation.fill_rows(plan.draft_slots, drafts)
        if plan.chunks:
            slots = np.concatenate((slots, [request.slot for request, _, _ in plan.chunks]))
            num_computed = np.concatenate((num_computed, np.array([start for _, start, _ in plan.chunks], np.int32)))
            num_scheduled = np.concatenate((num_scheduled, np.array([count for _, _, count in plan.chunks], np.int32)))
            ends = [start + count == len(request.tokens) for request, start, count in plan.chunks]
            samples = np.concatenate((samples, np.array(ends, np.bool_)))
            token_ids = np.concatenate([token_ids, *(request.tokens[start : start + count] for request, start, count in plan.chunks)])
            asks = (a.special[slots] & PROMPT_LOGPROBS) != 0
            prompt_logprobs = asks if asks.any() else None
            rereads = a.num_shared[slots] * self.config.page_size > num_computed
            skip_kv_store = rereads if rereads.any() else None
        setups, released = running.take_setups(), running.take_released()
        draft_length = self.speculation.update(setups, released)
        sampling_slots = list_sampling_slots(slots, samples, num_drafts)
        # What a grammar allows depends on its last token, which a step in flight may be sampling:
        # the mask is deferred then.
        waits = bool(running.in_flight) and bool((a.special[sampling_slots] & GRAMMAR).any())
        pending = None
        if self.config.overlaps_drafts:
            pending = self.speculation.bound_accepted(running.count_drafts_in_flight(slots))
            pending[len(slots) - len(plan.chunks) :] = 0  # what a chunk begins after is known
            pending = pending if plan.has_device_drafts or pending.any() else None
        has_order = self.speculation.needs_order(has_prompts=bool(plan.chunks))
        order = self._order_drafts(plan, slots) if has_order else None
        self.speculation.note_order(slots[samples], order)
        mask, limits = (None, None) if waits else self._fill_masks(sampling_slots, pending)
        groups = running.kv_manager.groups
        loads, saves = groups.take_states() if groups is not None else (None, None)
        batch = ScheduledBatch(
            step=self._step,
            num_decodes=num_decodes,
            slots=slots.astype(np.int32),
            num_computed=num_computed,
            num_scheduled=num_scheduled,
            token_ids=token_ids,
            samples=samples,
            new_pages=running.kv_manager.take_table_writes(),
            group_pages=groups.take_writes() if groups is not None else [],
            state_loads=loads,
            state_saves=saves,
            setups=setups,
            released=released,
            adapter_loads=self._planner.adapters.take_loads(),
            prompt_logprobs=prompt_logprobs,
            skip_kv_store=skip_kv_store,
            num_drafts=num_drafts,
            draft_parents=None if drafts is None else drafts.parents,
            draft_order=order,
            num_pending=pending,
            grammar_mask=mask,
            has_deferred_grammar_mask=waits,
            **self._planner.media.take_inputs(plan, len(token_ids)),
        )
        rows = (slots, a.epoch[slots], num_computed, num_scheduled, samples)
        followed = (order is not None, limits, 0 if order is None else order.num_tokens)
        return batch, StepRecord(self._step, *rows, num_decodes, plan.is_retry, num_drafts, draft_length, *followed)

    def _order_drafts(self, plan: StepPlan, slots: np.ndarray) -> DraftOrder:
        """What the device drafter does after the step, whose rows have these slots."""
        limits = np.minimum(self._running.table.arrays.num_pages[slots] * self.config.page_size, self.config.max_context)
        next_tokens = np.zeros(len(slots), np.int32)
        for row, (request, start, count) in enumerate(plan.chunks, len(slots) - len(plan.chunks)):
            if start + count < len(request.tokens):
                next_tokens[row] = request.tokens[start + count]
        return DraftOrder(self.speculation.next_length, limits.astype(np.int32), next_tokens)

    def _fill_masks(self, slots: np.ndarray, pending: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | None]:
        """The masks of a step's samples, and `StepRecord.limits`. slots: those of the samples."""
        table = self._running.table
        if not table.num_grammars:
            return None, None
        limits = None if pending is None else self.speculation.mask_device_drafts(slots)
        return self._grammars.fill_masks(table, slots), limits

    def _finish_masks(self) -> None:
        """Wait for the masks that the last commit has begun."""
        self._grammars.wait_for_masks()
        self._hold_slow_grammars()

    def _hold_slow_grammars(self) -> None:
        """Take requests with a slow grammar call off the device until it is done. Their rows in
        flight are void, as those of requests that ended."""
        for request in self._grammars.take_stopped():
            if request.state == RequestStatus.RUNNING:
                self._running.remove_request(request, keep=True, state=RequestStatus.WAITING)
                self._grammars.hold_request(request)

    def _resume_held_requests(self) -> None:
        """Queue or end the requests whose slow grammar call is done."""
        for request, finish in self._grammars.take_resolved():
            self._queue.push_front(request)
            if finish is not None:
                self._finish(request, finish)

    def _finish(self, request: Request, finish: Finish) -> None:
        """End a request outside of a step."""
        if request.state == RequestStatus.WAITING:
            if not self._grammars.release_request(request):
                self._queue.remove(request)
            request.state = RequestStatus.FINISHED
            self._forget(request, finish)
        else:
            self._finish_running(request, finish, True)
        self._finished.append((request.rid, finish))

    def _finish_running(self, request: Request, finish: Finish, keep: bool) -> None:
        self._running.remove_request(request, keep=keep, state=RequestStatus.FINISHED)
        self._forget(request, finish)

    def _forget(self, request: Request, finish: Finish) -> None:
        del self._requests[request.rid]
        self._queue.usage.remove_request(request.tenant)
        self._planner.adapters.finish_request(request)
        self._planner.tiers.forget(request)
        if self._on_finish is not None:
            self._on_finish(request, finish)

"""`StepPlanner`: chooses the rows of the next step, admits waiting requests and preempts running
ones (vLLM: the body of `Scheduler.schedule`).

A step has all decodes, some with drafted tokens, then chunks of running prompts within the token
budget, then new prompts. Works on arrays by slot; must not know token values or messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence, Set

import numpy as np

from frame.core.interfaces.drafter import Drafts
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.admission import SchedulerConfig
from frame.core.scheduling.policy_guard import GuardedPolicy
from frame.core.scheduling.prefix_dedup import InBatchPrefixSharing
from frame.core.scheduling.request import Request, RequestStatus
from frame.core.scheduling.running import RunningSet, StepPlan
from frame.core.scheduling.step_features import StepFeatures
from frame.core.scheduling.waiting_queue import TenantUsage, WaitingQueue

POLICY_WINDOW = 128  # waiting requests that a policy sees
POLICY_MATCH_WINDOW = 64  # the same, for policies that need each request's cached prefix
MAX_GROWTH_RESERVE = 512  # tokens; upper bound of the growth reserve for each running request
MAX_PREFIX_LOOKUPS = 8  # long waiting prompts of which a step looks up how many of their tokens are not cached
RESERVE_DECAY_STEPS = 128  # the growth reserve is halved after so many steps without a preemption


class StepPlanner:
    """Plans steps. Invariants: the oldest running request is never preempted; while requests run, a
    row is scheduled or a step is in flight."""

    def __init__(
        self, config: SchedulerConfig, running: RunningSet, queue: WaitingQueue, policy: SchedulingPolicy, features: StepFeatures
    ) -> None:
        self.num_preempted = 0
        self.num_cached_tokens = 0
        self._config = config
        self._running = running
        self._queue = queue
        self.speculation, self.adapters, self.media, self.tiers = features.speculation, features.adapters, features.media, features.tiers
        self._policy, self.prompt_budget = GuardedPolicy(policy), features.prompt_budget
        self._growth_reserve = config.growth_reserve
        self._last_preemption = -1
        self._step = 0
        self._suspects: deque[Request] = deque()  # of a failed step; each runs alone until its tokens are computed again

    def plan_step(self, step: int, now: float) -> StepPlan:
        """Plan step number `step` at the time `now` (seconds, monotonic). Counters, pages and
        page-table rows are advanced as if the step had run."""
        self._step = step
        if self._running.kv_manager.groups is not None:
            self._running.kv_manager.groups.trim_rows()
        if self._suspects and (retry := self._plan_suspect(now)):
            return retry
        if self._config.preemption and not self._suspects and len(self._queue) and (self._policy.may_preempt or self._usage.is_shared):
            self._preempt_for_waiting(now)
        before = -1 if self._suspects else self.num_preempted  # no request is admitted before a suspect
        slots, limit = self._schedule_decodes(now), self._config.token_budget
        if self.prompt_budget is not None:
            limit = self.prompt_budget.choose(step, len(slots), now)
        plan = StepPlan(slots, budget=limit, limit=limit, step=step)
        if self.speculation.is_active:
            self._schedule_drafts(plan)
        if self._exceeds_long_prompt_budget(plan.limit - int(plan.limit * self._config.short_prompt_share)):
            self._schedule_short_prompts(plan, now, may_admit=self.num_preempted == before)
        if self._usage.is_shared and self._running.extending and self.num_preempted == before:
            self._admit_waiting(plan, now, only_underserved=True)
        self._schedule_running_prompts(plan)
        if not plan.chunks and self._running.extending and plan.limit < self._config.token_budget:  # an undivided item
            plan.budget = self._config.token_budget
            self._schedule_running_prompts(plan, only_one=True)
            plan.budget = 0
        while not plan and self._running.extending and not self._running.in_flight:
            if not self._preempt_one(now):
                break
            self._schedule_running_prompts(plan)
        if self.num_preempted == before:  # otherwise a preempted request would be admitted again at once
            self._admit_waiting(plan, now)
        if self.speculation.num_ahead:
            self._reserve_ahead(plan)
        return plan

    @property
    def _usage(self) -> TenantUsage:
        return self._queue.usage

    def preempt(self, request: Request, *, is_shortage: bool = True) -> None:
        """Preempt a running request: it returns to the head of the queue with its tokens, and its
        pages stay in the prefix cache. is_shortage: pages ran out; the reserve is doubled."""
        self._running.remove_request(request, keep=True, state=RequestStatus.WAITING)
        request.num_preemptions += 1
        request.prompt_logprobs, request.hidden_states = [], []  # the prompt is computed again
        self._queue.push_front(request)
        self.num_preempted += 1
        if is_shortage and self._last_preemption != self._step:  # one shortage may preempt several requests
            self._growth_reserve = min(max(1, self._growth_reserve * 2), MAX_GROWTH_RESERVE)
            self._last_preemption = self._step

    def retry_alone(self, requests: Sequence[Request]) -> None:
        """Preempt the running requests of a failed step. Each then runs in steps without other
        rows, up to the next token that it samples."""
        for request in reversed(requests):
            self.preempt(request, is_shortage=False)
        self._suspects += [request for request in requests if request not in self._suspects]

    def _plan_suspect(self, now: float) -> StepPlan:
        """Plan the next chunk of the first suspect alone; nothing if it does not fit beside the
        running requests, or if no suspect is left."""
        plan = StepPlan(np.empty(0, np.intp), budget=self._config.token_budget, is_retry=True, step=self._step)
        while self._suspects and not plan:
            request = self._suspects[0]
            if request.state == RequestStatus.WAITING:
                has_slot = self._running.table.num_free > 0
                if not has_slot or not self.adapters.acquire(request, is_idle=not self._running.in_flight):
                    break
                if self._admit_request(request, self._count_reserved_pages(), now) is None:
                    break
            if request.slot in self._running.extending:
                self._schedule_chunk(plan, request)
                if not plan:
                    break
            if request.slot not in self._running.extending:  # it has ended, or all its tokens are scheduled
                self._suspects.popleft()
        return plan

    # decodes --------------------------------------------------------------------------------------

    def _schedule_decodes(self, now: float) -> np.ndarray:
        """Schedule every slot that can decode, allocating a page where its next token needs one. ->
        slots, intp [n]."""
        a, page_size = self._running.table.arrays, self._config.page_size
        while True:
            slots = np.flatnonzero(a.can_decode)
            if not slots.size:
                return slots
            computed = a.num_computed_tokens[slots]
            crosses = computed >= a.num_pages[slots] * page_size
            crossing = slots[crosses]
            if not crossing.size or self._running.kv_manager.grow_rows(crossing):
                break
            coming = self._running.kv_manager.num_growable + self._running.num_deferred_pages
            if coming >= crossing.size or not self._preempt_one(now):
                slots, computed = slots[~crosses], computed[~crosses]  # these slots wait for deferred pages
                break
        total = a.num_tokens[slots] + 1
        a.num_computed_tokens[slots] = computed + 1
        a.num_tokens[slots] = total
        a.can_decode[slots] = total < a.max_num_tokens[slots]
        a.last_step[slots] = self._step
        if self._running.kv_manager.groups is not None:
            self._running.kv_manager.groups.save_decodes(slots, computed + 1)
        return slots

    def _schedule_drafts(self, plan: StepPlan) -> None:
        """Add drafted tokens to the decodes, as far as pages are available without a preemption.
        Counters advance by the most tokens that may be accepted; the commit sets them back."""
        slots, plan.has_device_drafts = plan.decode_slots, self.speculation.overlaps
        drafts = self.speculation.count_device_drafts(slots) if plan.has_device_drafts else self.speculation.propose(slots)
        if drafts is None:
            return
        a, page_size = self._running.table.arrays, self._config.page_size
        self._running.kv_manager.grow_rows_to(slots, a.num_computed_tokens[slots] + drafts.counts)
        room = a.num_pages[slots] * page_size - a.num_computed_tokens[slots]
        if self._running.kv_manager.groups is not None:
            room = np.minimum(room, self._running.kv_manager.groups.limit_drafts(a.num_computed_tokens[slots]))
        drafts = drafts.shorten(np.minimum(drafts.counts, room))
        has_draft = drafts.counts > 0
        if not has_draft.any():
            return
        chosen, counts = slots[has_draft], drafts.counts[has_draft]
        ahead = self.speculation.bound_accepted(counts)
        a.num_computed_tokens[chosen] += ahead
        a.num_tokens[chosen] += ahead
        a.can_decode[chosen] = plan.has_device_drafts & (a.num_tokens[chosen] < a.max_num_tokens[chosen])
        plan.decode_slots, plan.draft_slots = slots[~has_draft], chosen
        plan.drafts = Drafts(drafts.token_ids, counts, drafts.parents)

    def _reserve_ahead(self, plan: StepPlan) -> None:
        """Add the pages that a device drafter writes to after this step's last tokens, as far as
        they are available without a preemption."""
        a = self._running.table.arrays
        ended = [request.slot for request, start, count in plan.chunks if start + count == len(request.tokens)]
        slots = np.concatenate((plan.decode_slots, plan.draft_slots, np.array(ended, np.intp)))
        reached = a.num_computed_tokens[slots] + self.speculation.num_ahead
        # of a chain, entries after the last output token are not read
        maximum = a.max_num_tokens[slots] if self.speculation.tree is None else self._config.max_context
        self._running.kv_manager.grow_rows_to(slots, np.minimum(reached, maximum))

    # prompts --------------------------------------------------------------------------------------

    def _exceeds_long_prompt_budget(self, limit: int) -> bool:
        """Whether the running prompts would use more than the long prompts' part of the token
        budget. Not if one of them goes on with an item that needs more: it gets its turn."""
        extending = self._running.extending.values()
        if not extending or sum(map(self._count_unscheduled, extending)) <= limit:
            return False
        start_of = self._running.table.arrays.num_computed_tokens
        return not any(request.media and self.media.count_next(request, int(start_of[request.slot])) > limit for request in extending)

    def _count_unscheduled(self, request: Request) -> int:
        """Prompt tokens of a running request that are not scheduled yet."""
        return len(request.tokens) - int(self._running.table.arrays.num_computed_tokens[request.slot])

    def _schedule_short_prompts(self, plan: StepPlan, now: float, may_admit: bool) -> None:
        """Schedule prompts that end within the budget kept for short ones, so that they do not wait
        for long ones. Long prompts get the rest of the budget, and all of it while there is no
        short prompt."""
        kept, served = int(plan.limit * self._config.short_prompt_share), self._usage.get_tokens
        for request in sorted(self._running.extending.values(), key=lambda r: (served(r.tenant), self._count_unscheduled(r))):
            if self._count_unscheduled(request) <= kept + plan.budget - plan.limit:
                self._schedule_chunk(plan, request)
        max_uncached = kept + plan.budget - plan.limit
        if may_admit and max_uncached > 0:
            self._admit_waiting(plan, now, max_uncached)

    def _schedule_running_prompts(self, plan: StepPlan, only_one: bool = False) -> None:
        """Schedule the next chunks of running prompts, those of the least served tenant first."""
        begun, served = {request.slot for request, _, _ in plan.chunks}, self._usage.get_tokens
        for request in sorted(self._running.extending.values(), key=lambda r: (served(r.tenant), r.index)):
            if plan.budget <= 0 or (only_one and plan.chunks):
                return
            if request.slot not in begun:
                self._schedule_chunk(plan, request)

    def _schedule_chunk(self, plan: StepPlan, request: Request) -> None:
        """Schedule the next chunk of a prompt as far as budget and pages allow; with
        `whole_prompts` the whole prompt or nothing."""
        a, slot = self._running.table.arrays, request.slot
        start, end = int(a.num_computed_tokens[slot]), len(request.tokens)
        room = (int(a.num_pages[slot]) + self._running.kv_manager.num_growable) * self._config.page_size - start
        count = min(end - start, plan.budget, room)
        groups, maximum = self._running.kv_manager.groups, count
        if groups is not None and count > 0:
            count = groups.limit_chunk(start, count, end, request.branch)
        if request.media and count > 0:  # an item that must not be divided is more important than a checkpoint in it
            count = self.media.limit_chunk(plan, request, start, count) or self.media.limit_chunk(plan, request, start, maximum)
        if self._config.whole_prompts and count < end - start:
            return
        if count <= 0 or not self._running.kv_manager.grow_row(slot, start + count):
            return
        if groups is not None:
            groups.save_chunk(slot, start + count)
        if request.media:
            self.media.schedule_chunk(request, start, count, self._step)
        plan.chunks.append((request, start, count))
        plan.budget -= count
        self._usage.add_tokens(request.tenant, count)
        a.num_computed_tokens[slot] = self._running.table.inflight[1, slot] = start + count
        a.last_step[slot] = self._step
        if start + count == end:
            a.num_tokens[slot] = end + 1
            a.can_decode[slot] = end + 1 < request.max_num_tokens
            del self._running.extending[slot]

    # admission ------------------------------------------------------------------------------------

    def _admit_waiting(self, plan: StepPlan, now: float, max_uncached: int | None = None, *, only_underserved: bool = False) -> None:
        """Admit waiting requests in the policy's order, until one does not fit.

        `max_uncached`: most tokens that all of them together may need computed; longer ones are
        skipped in this step. `only_underserved`: stop at a request whose tenant was served more
        tokens than every tenant with a running prompt.
        """
        if not len(self._queue) or plan.budget <= 0 or not self._running.table.num_free:
            return
        reserved = self._count_reserved_pages()
        if len(self._running) and reserved >= self._running.kv_manager.num_available:
            return
        if self._step - self._last_preemption > RESERVE_DECAY_STEPS:
            self._growth_reserve, self._last_preemption = max(self._growth_reserve // 2, self._config.growth_reserve // 2), self._step
        floor = 0 if max_uncached is None else plan.budget - max_uncached
        max_tokens = self._min_served_tokens() if only_underserved else None
        lookups = MAX_PREFIX_LOOKUPS
        prefills = InBatchPrefixSharing(
            self._running.prefilling.values() if self._running.kv_manager.cache.reuses else (), self._config.min_shared_tokens
        )
        for request in self._order_waiting(now):
            if plan.budget <= floor or not self._running.table.num_free:
                return
            if max_tokens is not None and self._usage.get_tokens(request.tenant) > max_tokens:
                return
            if not (self._running.admits_new or request.admitted_at) or self._should_wait_for_prefix(request, prefills):
                continue
            if max_uncached is not None and request.num_tokens > plan.budget - floor:
                lookups -= 1
                if lookups < 0 or self._count_uncached(request) > plan.budget - floor:
                    continue
            if not self.tiers.may_start(request) or (request.media and not self.media.may_start(request)):
                continue
            if not self.adapters.acquire(request, is_idle=not (plan or self._running.in_flight)):
                continue
            need = self._admit_request(request, reserved, now)
            if need is None:
                return
            if self._running.kv_manager.cache.reuses:
                prefills.add(request)
            held = int(self._running.table.arrays.num_pages[request.slot])
            self._schedule_chunk(plan, request)
            reserved += need - (int(self._running.table.arrays.num_pages[request.slot]) - held)

    def _min_served_tokens(self) -> float:
        """The lowest token counter of the tenants whose prompts are running."""
        return min(self._usage.get_tokens(request.tenant) for request in self._running.extending.values())

    def _order_waiting(self, now: float) -> Generator[Request]:
        """Yield the head of the queue in the policy's order, lazily."""
        window = self.adapters.begin_pass(self._queue, POLICY_MATCH_WINDOW if self._policy.needs_matches else POLICY_WINDOW, now)
        try:
            if self._policy.needs_matches:
                for request in window:
                    request.match = self._running.kv_manager.cache.match(request.cache_keys(request.all_tokens()), request.namespace)
            ordered = self._policy.sort_waiting(window, self._make_view(now))
            yield from self._interleave_tenants(ordered) if self._usage.is_shared else ordered
        finally:
            for request in window:
                request.match = None  # valid for this step only; it also keeps nodes of the cache alive

    def _interleave_tenants(self, ordered: Iterator[Request]) -> Iterator[Request]:
        """Keep the policy's order within each tenant, and interleave the tenants by their running
        requests. A policy by priority decides between tenants too: its order is kept."""
        if self._policy.by_priority:
            return ordered
        queues: dict[str, list[Request]] = {}
        for request in ordered:
            queues.setdefault(request.tenant, []).append(request)
        return self._usage.interleave_tenants(queues.values())

    def _should_wait_for_prefix(self, request: Request, prefills: InBatchPrefixSharing) -> bool:
        """Whether a waiting request should wait for a running prefill that computes its prefix, and
        read it from the cache then.

        It does not wait if the rest of that prefill is long compared to the shared prefix: only
        whole prefills are inserted.
        """
        other, shared = prefills.find(request)
        if other is None:
            return False
        shared -= shared % self._config.page_size
        groups = self._running.kv_manager.groups
        if groups is not None and groups.snapshot is not None:  # the other prompt leaves no state at the end of the prefix
            return False
        if self._count_unscheduled(other) > max(self._config.token_budget, 2 * shared):
            return False
        return prefills.is_worth_waiting(shared, request.num_tokens - self._count_uncached(request), request.num_tokens)

    def _count_uncached(self, request: Request) -> int:
        """Tokens of a waiting request that are not in the prefix cache, at least 1."""
        tokens = request.all_tokens()
        return max(1, len(tokens) - self._running.kv_manager.cache.match(request.cache_keys(tokens), request.namespace).num_tokens)

    def _admit_request(self, request: Request, reserved: int, now: float) -> int | None:
        """Put a request on the device if its prompt and the growth reserve of all requests fit.

        `reserved`: pages that the running requests still need. -> pages that this request still
        needs; None: it does not fit.
        """
        request.tokens = request.all_tokens()
        cached = self._running.kv_manager.lock_prefix(request)
        need = self._count_pages_for(request) - len(cached)
        groups = self._running.kv_manager.groups
        is_full = len(self._running) and reserved + need > self._running.kv_manager.num_available
        if is_full or (groups is not None and not groups.has_room(request.num_tokens, self._growth_reserve, len(cached))):
            self._running.kv_manager.unlock_prefix(request)
            self.adapters.release(request)
            return None
        self._queue.remove(request)
        self._running.add_request(request, cached)
        self.tiers.forget(request)
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = min(int(self._running.table.arrays.num_computed_tokens[request.slot]), request.prompt_len)
            self.num_cached_tokens += request.num_cached_tokens
            request.admitted_at = now
        return need

    def _count_pages_for(self, request: Request) -> int:
        """Pages for all tokens of a waiting request and its growth reserve."""
        tokens = min(request.num_tokens + self._growth_reserve, request.max_num_tokens)
        return -(-tokens // self._config.page_size)

    def _count_reserved_pages(self, leaving: Set[Request] = frozenset()) -> int:
        """Pages that running requests, except those in `leaving`, still need for the rest of their
        prompts and their growth reserve."""
        a = self._running.table.arrays
        slots = np.array([request.slot for request in self._running.requests if request not in leaving], np.intp)
        tokens = np.minimum(a.num_tokens[slots] + self._growth_reserve, a.max_num_tokens[slots])
        missing = -(-tokens // self._config.page_size) - a.num_pages[slots]
        return int(np.maximum(missing, 0).sum())

    # preemption -----------------------------------------------------------------------------------

    def _preempt_one(self, now: float) -> bool:
        """Preempt the policy's victim, or the newest request if it chooses none, of the tenant with
        most of them; False when only the oldest request is left."""
        running = self._running.requests
        if len(running) < 2:
            return False
        if self._usage.is_shared:
            running = self._keep_largest_tenant(running)
        self.preempt(self._choose_victim(running, now) or running[-1])
        return True

    def _keep_largest_tenant(self, running: list[Request]) -> list[Request]:
        """The oldest request and those of the tenant with most running requests; all, if that
        tenant has no other than the oldest."""
        ((largest, _),) = self._usage.num_running.most_common(1)
        kept = [running[0], *(request for request in running[1:] if request.tenant == largest)]
        return kept if len(kept) > 1 else running

    def _choose_victim(self, running: Sequence[Request], now: float) -> Request | None:
        """The policy's victim among `running`, oldest first; None if it chooses none."""
        for request in running:
            self._running.table.flush_tokens(request.slot)  # the policy may read `Request.output`
        return self._policy.select_victim(running, self._make_view(now))

    def _preempt_for_waiting(self, now: float) -> None:
        """Preempt running requests for the first waiting one, if it does not fit otherwise and the
        policy or fair sharing allows it."""
        candidates = self._order_waiting(now)
        first = next(candidates, None)
        candidates.close()
        if first is None or not (self._running.admits_new or first.admitted_at):
            return
        if not self.adapters.is_on_device(first):
            for victim in self.adapters.choose_victims(first, self._list_excess_requests(first))[::-1]:
                self.preempt(victim, is_shortage=False)
            return
        if not self.tiers.may_start(first):
            return
        first.tokens = first.all_tokens()
        cached = self._running.kv_manager.lock_prefix(first)
        for victim in self._choose_victims_for(first, cached, now):
            self.preempt(victim, is_shortage=False)
        self._running.kv_manager.unlock_prefix(first)

    def _choose_victims_for(self, first: Request, cached: np.ndarray, now: float) -> list[Request]:
        """Running requests whose preemption makes room for `first`, whose locked prefix has the
        pages `cached`. Empty where `first` fits without, and where it does not fit even if all are
        preempted that may be."""
        victims: set[Request] = set()
        if self._would_fit(first, cached, victims):
            return []
        running = self._running.requests
        eligible = [request for request in running[1:] if self._policy.may_preempt and self._policy.can_preempt(first, request, now)]
        eligible = eligible or self._list_excess_requests(first)
        if not eligible or not self._would_fit(first, cached, set(eligible)):
            return []
        while not self._would_fit(first, cached, victims):
            victim = self._choose_victim((running[0], *eligible), now) or eligible[-1]
            victims.add(victim)
            eligible.remove(victim)
        return sorted(victims, key=lambda request: -request.index)  # each goes to the head of the queue: the oldest last

    def _list_excess_requests(self, first: Request) -> list[Request]:
        """Running requests, oldest first, that other tenants have in excess of the tenant of
        `first`: the newest of each tenant, never the oldest of all, nor one that a policy by
        priority would admit again before `first`."""
        usage, excess = self._usage, []
        left = {tenant: usage.count_excess(first.tenant, tenant) for tenant in usage.num_running}
        for request in reversed(self._running.requests[1:]):
            if left[request.tenant] and not (self._policy.by_priority and request.priority > first.priority):
                left[request.tenant] -= 1
                excess.append(request)
        return excess[::-1]

    def _would_fit(self, first: Request, cached: np.ndarray, leaving: Set[Request]) -> bool:
        """Whether `first` fits without the requests in `leaving`, after the steps in flight."""
        running = self._running
        pages = self._running.kv_manager.num_available + running.num_deferred_pages + self._count_freed_pages(cached, leaving)
        need = self._count_pages_for(first) - len(cached)
        slots = running.table.num_free + running.num_deferred_slots + len(leaving)
        return slots > 0 and self._count_reserved_pages(leaving) + need <= pages

    def _count_freed_pages(self, cached: np.ndarray, leaving: Set[Request]) -> int:
        """Pages that become available when requests leave: those that no other request holds and
        that are not in `cached`."""
        if not leaving:
            return 0
        kv_manager, a, is_freed = self._running.kv_manager, self._running.table.arrays, np.zeros(self._config.num_pages, np.bool_)
        for request in leaving:
            is_freed[a.page_table[request.slot, : a.num_pages[request.slot]]] = True
        for request in self._running.requests:
            if request not in leaving:
                is_freed[kv_manager.shared_pages(request.slot)] = False
        is_freed[cached] = False
        return int(np.count_nonzero(is_freed))

    def _make_view(self, now: float) -> SchedulerView:
        return SchedulerView(
            now=now,
            num_running=len(self._running),
            token_budget=self._config.token_budget,
            free_pages=self._running.kv_manager.allocator.num_free,
            evictable_pages=self._running.kv_manager.cache.num_evictable,
            page_size=self._config.page_size,
        )

"""`StepPlanner`: which rows the next step has. Decodes first, then prompts under the token budget, then newcomers; who gives way
when pages run out.

Works on slot arrays; looks at a request object only when it starts, stops or is prefilled.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.admission import SchedulerConfig
from frame.core.scheduling.policy_guard import GuardedPolicy
from frame.core.scheduling.prefix_dedup import InBatchPrefixSharing
from frame.core.scheduling.request import Request, RequestStatus
from frame.core.scheduling.running import RunningSet
from frame.core.scheduling.waiting_queue import WaitingQueue

WINDOW = 128  # waiting requests that a policy sees
MATCH_WINDOW = 64  # the same, when each must be matched first
AHEAD_MOST = 512  # tokens of growth that are kept free for each running request, at most
PEEKS = 8  # long waiting prompts whose cached prefix is looked up in a step, to see whether what is left of them is short
CALM_STEPS = 128  # after so many steps without a retraction the reserve is halved


@dataclass(slots=True)
class Rows:
    """The rows of a step. `chunks` are the extend rows, (request, start, length) each."""

    decodes: np.ndarray  # intp [n]; slots
    chunks: list[tuple[Request, int, int]] = field(default_factory=list)
    budget: int = 0  # prompt tokens that may still be added

    def __bool__(self) -> bool:
        return bool(self.chunks) or self.decodes.size > 0


class StepPlanner:
    """Chooses rows, admits and retracts. Promises: the oldest running request is never retracted, and as long as something
    runs, some row is scheduled now or a step is in flight whose commit makes one possible."""

    def __init__(self, config: SchedulerConfig, running: RunningSet, queue: WaitingQueue, policy: SchedulingPolicy) -> None:
        self.num_preempted = 0
        self.num_cached_tokens = 0
        self._config = config
        self._running = running
        self._kv_manager = running.kv_manager
        self._queue = queue
        self._policy = GuardedPolicy(policy)
        self._usage = queue.usage
        self._ahead = config.growth_reserve
        self._last_preemption = -1
        self._step = 0

    def plan(self, step: int, now: float) -> Rows:
        """The rows of step `step`. Counters, pages and page-table rows are advanced as if it had run."""
        self._step = step
        if self._config.preemption and len(self._queue) and (self._policy.may_preempt or self._usage.is_shared):
            self._preempt(now)
        before = self.num_preempted
        rows = Rows(self._decodes(now), budget=self._config.token_budget)
        if self._is_crowded():
            self._short_first(rows, now, may_admit=self.num_preempted == before)
        if self._usage.is_shared and self._running.extending and self.num_preempted == before:
            self._admit(rows, now, only_owed=True)
        self._extend_running(rows)
        while not rows and self._running.extending and not self._running.in_flight:
            if not self._preempt_one(now):
                break
            self._extend_running(rows)
        if self.num_preempted == before:  # else who was just retracted would come straight back
            self._admit(rows, now)
        return rows

    def preempt(self, request: Request, *, is_shortage: bool = True) -> None:
        """Take a request off the device, back to the head of the queue, with its tokens and its cached prefix. A shortage of pages makes
        the reserve for growth larger."""
        self._running.leave(request, keep=True, state=RequestStatus.WAITING)
        request.num_preemptions += 1
        request.prompt_logprobs = []  # its prompt is computed anew
        self._queue.push_front(request)
        self.num_preempted += 1
        if is_shortage and self._last_preemption != self._step:  # one shortage retracts several, but is one sign
            self._ahead = min(max(1, self._ahead * 2), AHEAD_MOST)
            self._last_preemption = self._step

    # decodes ------------------------------------------------------------------------------------------------------------

    def _decodes(self, now: float) -> np.ndarray:
        """The slots that decode, with a page for each new token."""
        a, page_size = self._running.table.arrays, self._config.page_size
        while True:
            slots = np.flatnonzero(a.can_decode)
            if not slots.size:
                return slots
            computed = a.num_computed_tokens[slots]
            crosses = computed >= a.num_pages[slots] * page_size
            crossing = slots[crosses]
            if not crossing.size or self._kv_manager.grow_by_one(crossing):
                break
            coming = self._kv_manager.num_available + self._running.num_deferred_pages
            if coming >= crossing.size or not self._preempt_one(now):
                slots, computed = slots[~crosses], computed[~crosses]  # the others wait for pages that are on their way
                break
        total = a.num_tokens[slots] + 1
        a.num_computed_tokens[slots] = computed + 1
        a.num_tokens[slots] = total
        a.can_decode[slots] = total < a.max_num_tokens[slots]
        a.last_step[slots] = self._step
        return slots

    # prompts ------------------------------------------------------------------------------------------------------------

    def _is_crowded(self) -> bool:
        """Whether the prompts that are being computed would take what is kept for short ones."""
        extending = self._running.extending.values()
        return bool(extending) and sum(map(self._remaining, extending)) > self._config.token_budget - self._config.short_budget

    def _remaining(self, request: Request) -> int:
        """Tokens of a running request's prompt that are not scheduled yet."""
        return len(request.tokens) - int(self._running.table.arrays.num_computed_tokens[request.slot])

    def _short_first(self, rows: Rows, now: float, may_admit: bool) -> None:
        """Prompts that end within the budget kept for short ones, so that they do not wait for long ones. These get all the rest, and
        lose nothing while there is no short one."""
        kept, served = self._config.short_budget, self._usage.get_tokens
        for request in sorted(self._running.extending.values(), key=lambda r: (served(r.tenant), self._remaining(r))):
            if self._remaining(request) <= kept + rows.budget - self._config.token_budget:
                self._extend(rows, request)
        longest = kept + rows.budget - self._config.token_budget
        if may_admit and longest > 0:
            self._admit(rows, now, longest)

    def _extend_running(self, rows: Rows) -> None:
        begun, served = {request.slot for request, _, _ in rows.chunks}, self._usage.get_tokens
        for request in sorted(self._running.extending.values(), key=lambda r: (served(r.tenant), r.index)):
            if rows.budget <= 0:
                return
            if request.slot not in begun:
                self._extend(rows, request)

    def _extend(self, rows: Rows, request: Request) -> None:
        """Schedule the next chunk of a prompt (all of it, where prompts are computed whole), as long as budget and pages allow."""
        a, slot = self._running.table.arrays, request.slot
        start, end = int(a.num_computed_tokens[slot]), len(request.tokens)
        room = (int(a.num_pages[slot]) + self._kv_manager.num_available) * self._config.page_size - start
        count = min(end - start, rows.budget, room)
        if self._config.whole_prompts and count < end - start:
            return
        if count <= 0 or not self._kv_manager.grow(slot, start + count):
            return
        rows.chunks.append((request, start, count))
        rows.budget -= count
        self._usage.add_tokens(request.tenant, count)
        a.num_computed_tokens[slot] = self._running.table.inflight[1, slot] = start + count
        a.last_step[slot] = self._step
        if start + count == end:
            a.num_tokens[slot] = end + 1
            a.can_decode[slot] = end + 1 < request.max_num_tokens
            del self._running.extending[slot]

    # newcomers ----------------------------------------------------------------------------------------------------------

    def _admit(self, rows: Rows, now: float, longest: int | None = None, *, only_owed: bool = False) -> None:
        """Admit waiting requests in the policy's order, until one does not fit. `longest`: most tokens that they may need computed, all
        together; who needs more is passed over, and has its turn when the prompts before it are done. `only_owed`: until one is of a
        tenant for whom more was computed than for those whose prompts are being computed."""
        if not len(self._queue) or rows.budget <= 0 or not self._running.table.num_free:
            return
        reserved = self._reserved_pages()
        if len(self._running) and reserved >= self._kv_manager.num_available:
            return
        if self._step - self._last_preemption > CALM_STEPS:
            self._ahead, self._last_preemption = max(self._ahead // 2, self._config.growth_reserve // 2), self._step
        floor = 0 if longest is None else rows.budget - longest
        most_tokens = self._least_served() if only_owed else None
        peeks = PEEKS
        prefills = InBatchPrefixSharing(
            self._running.prefilling.values() if self._kv_manager.cache.reuses else (), self._config.least_shared
        )
        for request in self._candidates(now):
            if rows.budget <= floor or not self._running.table.num_free:
                return
            if most_tokens is not None and self._usage.get_tokens(request.tenant) > most_tokens:
                return
            if self._had_better_wait(request, prefills):
                continue
            if longest is not None and request.num_tokens > rows.budget - floor:
                peeks -= 1
                if peeks < 0 or self._uncached(request) > rows.budget - floor:
                    continue
            need = self._enter(request, reserved, now)
            if need is None:
                return
            if self._kv_manager.cache.reuses:
                prefills.add(request)
            held = int(self._running.table.arrays.num_pages[request.slot])
            self._extend(rows, request)
            reserved += need - (int(self._running.table.arrays.num_pages[request.slot]) - held)

    def _least_served(self) -> float:
        """The least that was computed for a tenant whose prompts are being computed."""
        return min(self._usage.get_tokens(request.tenant) for request in self._running.extending.values())

    def _candidates(self, now: float) -> Generator[Request]:
        """The head of the queue in the policy's order, as far as it is read."""
        window = self._queue.head(MATCH_WINDOW if self._policy.needs_matches else WINDOW)
        try:
            if self._policy.needs_matches:
                for request in window:
                    request.match = self._kv_manager.cache.match(request.all_tokens(), request.namespace)
            ordered = self._policy.order(window, self._view(now))
            yield from self._in_turn(ordered) if self._usage.is_shared else ordered
        finally:
            for request in window:
                request.match = None  # good for the moment only, and it would keep nodes alive

    def _in_turn(self, ordered: Iterator[Request]) -> Iterator[Request]:
        """The policy's order within each tenant, of whom next comes always the one with least running. A policy by priority is the
        operator's word on who goes before whom, tenants included."""
        if self._policy.by_priority:
            return ordered
        queues: dict[str, list[Request]] = {}
        for request in ordered:
            queues.setdefault(request.tenant, []).append(request)
        return self._usage.take_turns(queues.values())

    def _had_better_wait(self, request: Request, prefills: InBatchPrefixSharing) -> bool:
        """Whether a waiting request should find its prefix in the cache, once the prefill that computes it is done. Not behind a prefill
        whose rest is long beside what it saves, since only whole prefills are inserted."""
        other, shared = prefills.find(request)
        if other is None:
            return False
        shared -= shared % self._config.page_size
        if self._remaining(other) > max(self._config.token_budget, 2 * shared):
            return False
        return prefills.is_worth_waiting(shared, request.num_tokens - self._uncached(request), request.num_tokens)

    def _uncached(self, request: Request) -> int:
        """Tokens of a waiting request that must be computed."""
        tokens = request.all_tokens()
        return max(1, len(tokens) - self._kv_manager.cache.match(tokens, request.namespace).num_tokens)

    def _enter(self, request: Request, reserved: int, now: float) -> int | None:
        """Put a request on the device if its whole prompt and the growth of all fit. -> pages it still needs, None: no room."""
        request.tokens = request.all_tokens()
        cached = self._kv_manager.lock_prefix(request)
        need = self._pages_for(request) - len(cached)
        if len(self._running) and reserved + need > self._kv_manager.num_available:
            self._kv_manager.unlock_prefix(request)
            return None
        self._queue.remove(request)
        self._running.enter(request, cached)
        if request.cached_tokens < 0:
            request.cached_tokens = min(int(self._running.table.arrays.num_computed_tokens[request.slot]), request.prompt_len)
            self.num_cached_tokens += request.cached_tokens
            request.admitted = now
        return need

    def _pages_for(self, request: Request) -> int:
        """Pages for all tokens of a waiting request and some growth."""
        tokens = min(request.num_tokens + self._ahead, request.max_num_tokens)
        return -(-tokens // self._config.page_size)

    def _reserved_pages(self, leaving: Set[Request] = frozenset()) -> int:
        """Pages that running requests will want soon, but for those that are leaving: the rest of their prompts and some growth."""
        a = self._running.table.arrays
        slots = np.array([request.slot for request in self._running.requests if request not in leaving], np.intp)
        tokens = np.minimum(a.num_tokens[slots] + self._ahead, a.max_num_tokens[slots])
        wanted = -(-tokens // self._config.page_size) - a.num_pages[slots]
        return int(np.maximum(wanted, 0).sum())

    # who gives way ------------------------------------------------------------------------------------------------------

    def _preempt_one(self, now: float) -> bool:
        """Retract the policy's victim, or the newest when it names none; False when only the oldest is left."""
        running = self._running.requests
        if len(running) < 2:
            return False
        if self._usage.is_shared:
            running = self._of_largest_tenant(running)
        self.preempt(self._victim(running, now) or running[-1])
        return True

    def _of_largest_tenant(self, running: list[Request]) -> list[Request]:
        """The oldest request, which stays, and those of the tenant that has most running; all where that tenant has the oldest alone."""
        ((largest, _),) = self._usage.num_running.most_common(1)
        found = [running[0], *(request for request in running[1:] if request.tenant == largest)]
        return found if len(found) > 1 else running

    def _victim(self, running: Sequence[Request], now: float) -> Request | None:
        """Whom of these, oldest first, the policy would retract."""
        for request in running:
            self._running.table.flush(request.slot)  # the policy may look at outputs
        return self._policy.victim(running, self._view(now))

    def _preempt(self, now: float) -> None:
        """Retract running requests for the first waiting one, where the policy says so and it does not fit otherwise."""
        candidates = self._candidates(now)
        first = next(candidates, None)
        candidates.close()
        if first is None:
            return
        first.tokens = first.all_tokens()
        cached = self._kv_manager.lock_prefix(first)
        for victim in self._victims_for(first, cached, now):
            self.preempt(victim, is_shortage=False)
        self._kv_manager.unlock_prefix(first)

    def _victims_for(self, first: Request, cached: np.ndarray, now: float) -> list[Request]:
        """Running requests that make room for `first`, whose locked prefix is `cached`, by leaving. None where it fits anyway, and where it
        does not fit even when all leave that may be preempted."""
        victims: set[Request] = set()
        if self._would_fit(first, cached, victims):
            return []
        running = self._running.requests
        left = [request for request in running[1:] if self._policy.may_preempt and self._policy.preempts(first, request, now)]
        left = left or self._owing(first)
        if not left or not self._would_fit(first, cached, set(left)):
            return []
        while not self._would_fit(first, cached, victims):
            victim = self._victim((running[0], *left), now) or left[-1]
            victims.add(victim)
            left.remove(victim)
        return sorted(victims, key=lambda request: -request.index)  # back to the head of the queue, the oldest last

    def _owing(self, first: Request) -> list[Request]:
        """Running requests, oldest first, that other tenants have beyond what they leave to `first`'s: the newest of each, never the oldest
        of all."""
        usage, owing = self._usage, []
        left = {tenant: usage.count_owed(first.tenant, tenant) for tenant in usage.num_running}
        for request in reversed(self._running.requests[1:]):
            if left[request.tenant]:
                left[request.tenant] -= 1
                owing.append(request)
        return owing[::-1]

    def _would_fit(self, first: Request, cached: np.ndarray, leaving: Set[Request]) -> bool:
        """Whether a newcomer fits without the requests that are leaving, once the steps in flight are done."""
        running = self._running
        pages = self._kv_manager.num_available + running.num_deferred_pages + self._num_freed(cached, leaving)
        need = self._pages_for(first) - len(cached)
        slots = running.table.num_free + running.num_deferred_slots + len(leaving)
        return slots > 0 and self._reserved_pages(leaving) + need <= pages

    def _num_freed(self, cached: np.ndarray, leaving: Set[Request]) -> int:
        """Pages that can be had when requests leave: those that no other request holds. `cached` are the pages of another locked prefix."""
        if not leaving:
            return 0
        kv_manager, is_freed = self._kv_manager, np.zeros(self._config.num_pages, np.bool_)
        for request in leaving:
            is_freed[kv_manager.shared_pages(request.slot)] = is_freed[kv_manager.private_pages(request.slot)] = True
        for request in self._running.requests:
            if request not in leaving:
                is_freed[kv_manager.shared_pages(request.slot)] = False
        is_freed[cached] = False
        return int(np.count_nonzero(is_freed))

    def _view(self, now: float) -> SchedulerView:
        return SchedulerView(
            now=now,
            num_running=len(self._running),
            token_budget=self._config.token_budget,
            free_pages=self._kv_manager.allocator.num_free,
            evictable_pages=self._kv_manager.cache.num_evictable,
            page_size=self._config.page_size,
        )

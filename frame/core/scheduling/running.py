"""`RunningSet`: the requests on the device and the steps in flight (vLLM: `Scheduler.running`).

Invariant: pages and slots of a request that leaves while a step in flight has a row of it are freed
only when that step is committed. Used by the scheduler, the planner and the output processor. It
must not know policies or budgets.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.drafter import Drafts
from frame.core.kv_cache.prefix_pins import PrefixPins
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.request import Request, RequestStatus
from frame.core.scheduling.request_slots import RequestTable

_NO_SLOTS = np.empty(0, np.intp)


@dataclass(slots=True)
class StepPlan:
    """The rows of a step. It is false when the step has none."""

    decode_slots: np.ndarray  # intp [n]; one token each
    draft_slots: np.ndarray = field(default_factory=lambda: _NO_SLOTS)  # intp [m]; decodes with drafted tokens
    drafts: Drafts | None = None  # of `draft_slots`; None: there are none
    chunks: list[tuple[Request, int, int]] = field(default_factory=list)  # extend rows: request, first token, number of tokens
    budget: int = 0  # prompt tokens that may still be added
    limit: int = 0  # all prompt tokens that may be added
    is_retry: bool = False  # one request runs alone because a step with it failed
    has_device_drafts: bool = False  # the tokens of `drafts` are on the device
    step: int = 0  # its number

    def __bool__(self) -> bool:
        return bool(self.chunks) or self.decode_slots.size > 0 or self.drafts is not None


@dataclass(slots=True, eq=False)
class StepRecord:
    """A step that was scheduled and is not committed. A row is void if its slot's epoch is no
    longer that of `epochs`."""

    step: int
    slots: np.ndarray  # intp [rows]
    epochs: np.ndarray  # int64 [rows]
    num_computed: np.ndarray  # int32 [rows]; before the step
    num_scheduled: np.ndarray  # int32 [rows]
    samples: np.ndarray  # bool [rows]; whether the row yields a token
    num_decodes: int  # rows [0, num_decodes) are decodes, the others extends
    is_retry: bool = False  # see `StepPlan.is_retry`
    num_drafts: np.ndarray | None = None  # int32 [rows]; see `ScheduledBatch.num_drafts`
    draft_length: int = 0  # most drafted tokens of a row
    is_followed: bool = False  # whether a device drafter runs after it
    limits: np.ndarray | None = None  # see `Speculation.mask_device_drafts`
    num_ordered: int = 0  # tokens that a device drafter drafts for each row that samples
    deferred_pages: list[np.ndarray] = field(default_factory=list)  # freed when the step is committed
    deferred_slots: list[int] = field(default_factory=list)  # recycled when the step is committed


class RunningSet:
    """Adds requests to the device and removes them; keeps them in order of arrival."""

    def __init__(self, table: RequestTable, kv_manager: KVCacheManager) -> None:
        self.table = table
        self.on_remove: Callable[[Request], object] | None = None  # a request leaves the device; the scheduler sets it
        # The prefix cache has these cache keys of a request, whole pages; None: no cache tiers
        self.on_cached: Callable[[Request, np.ndarray], object] | None = None
        self.pins = PrefixPins(kv_manager.cache, kv_manager.page_size, 0, time.monotonic)  # the scheduler sets it
        self.kv_manager = kv_manager
        self.requests: list[Request] = []  # oldest first
        self.extending: dict[int, Request] = {}  # by slot; their prompt is not scheduled to its end
        self.prefilling: dict[int, Request] = {}  # by slot; their prompt is not in the prefix cache yet
        self.num_of_tenant: Counter[str] = Counter()  # running requests
        self.in_flight: deque[StepRecord] = deque()
        self.admits_new = True  # False: only requests that have run before are admitted
        self._setups: list[SlotSetup] = []
        self._renewed: dict[int, SlotSetup] = {}  # by slot; of requests extended by tokens that were not sampled
        self._released: list[int] = []

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_deferred_pages(self) -> int:
        """Pages of the `tokens` group that become free when the steps in flight are committed."""
        return sum(self.kv_manager.count_token_pages(pages) for record in self.in_flight for pages in record.deferred_pages)

    @property
    def num_deferred_slots(self) -> int:
        """Slots that become free when the steps in flight are committed."""
        return sum(len(record.deferred_slots) for record in self.in_flight)

    def add_request(self, request: Request, cached: np.ndarray) -> None:
        """Put a request on the device; `cached` are the pages of its locked prefix, int32. A slot
        must be free."""
        self.table.add_request(request)
        self.kv_manager.start_row(request, cached)
        insort(self.requests, request, key=attrgetter("index"))
        self.num_of_tenant[request.tenant] += 1
        self.extending[request.slot] = self.prefilling[request.slot] = request
        self._setups.append(_setup(request))

    def extend_request(self, request: Request, tokens: list[int]) -> None:
        """Append two or more tokens that a grammar forces. The request's row in flight, which
        samples the first of them, yields no new token when it is committed; the others are computed
        as a chunk of a prompt is."""
        slot, a = request.slot, self.table.arrays
        self.table.flush_tokens(slot)
        request.output.extend(tokens)
        request.unreported += tokens
        request.tokens = request.all_tokens()
        a.num_committed_tokens[slot] += len(tokens)
        a.num_tokens[slot] = a.num_committed_tokens[slot]
        a.can_decode[slot] = False
        self.extending[slot] = request
        self._renewed[slot] = _setup(request)

    def remove_request(self, request: Request, *, keep: bool, state: RequestStatus) -> None:
        """Take a request off the device. `keep`: its computed tokens stay in the prefix cache.
        `state`: its state afterwards."""
        slot = request.slot
        num_computed_tokens = self.count_committed(slot) if keep and not request.next_namespace else 0
        self.table.flush_tokens(slot)
        tokens = request.all_tokens()
        pages = self.kv_manager.release_row(request, tokens, num_computed_tokens)
        self._tell_cached(request, tokens, num_computed_tokens)
        if request.pin is not None and state == RequestStatus.FINISHED:
            self.pins.add_pin(request.pin, request.cache_keys(tokens[:num_computed_tokens]), request.namespace)
        self.table.remove_request(request)
        if self.on_remove is not None:
            self.on_remove(request)
        request.state = state
        if request.next_namespace:
            request.namespace, request.next_namespace = request.next_namespace, ""
        self.requests.remove(request)
        self.num_of_tenant[request.tenant] -= 1
        if not self.num_of_tenant[request.tenant]:
            del self.num_of_tenant[request.tenant]
        self.extending.pop(slot, None)
        self.prefilling.pop(slot, None)
        self._renewed.pop(slot, None)
        self.release_pages(slot, pages)
        record = self._last_step_of(slot)
        if record is None:
            self._recycle(slot)
        else:
            record.deferred_slots.append(slot)

    def cache_prefill(self, request: Request, num_computed: int) -> None:
        """Insert what is computed of a prompt into the prefix cache; see
        `KVCacheManager.cache_prefill`."""
        if request.next_namespace:
            return
        self.release_pages(request.slot, self.kv_manager.cache_prefill(request, num_computed))
        self._tell_cached(request, request.tokens, num_computed)

    def _tell_cached(self, request: Request, tokens: np.ndarray, num_computed: int) -> None:
        if self.on_cached is not None and num_computed >= self.kv_manager.page_size:
            whole = num_computed // self.kv_manager.page_size * self.kv_manager.page_size
            self.on_cached(request, request.cache_keys(tokens[:whole]))

    def release_pages(self, slot: int, pages: np.ndarray) -> None:
        """Free pages that a slot held: now, or when the last step in flight with a row of the slot
        is committed."""
        if not len(pages):
            return
        record = self._last_step_of(slot)
        if record is None:
            self.kv_manager.allocator.free(pages)
        else:
            record.deferred_pages.append(pages)

    def count_committed(self, slot: int) -> int:
        """Tokens of a slot whose K and V committed steps have computed."""
        for record in self.in_flight:
            rows = np.flatnonzero(record.slots == slot)
            if rows.size:
                return int(record.num_computed[rows[0]])
        return int(self.table.arrays.num_computed_tokens[slot])

    def is_in_flight(self, slot: int) -> bool:
        """Whether a step in flight has a row of a slot."""
        return self._last_step_of(slot) is not None

    def begin_commit(self, step: int) -> StepRecord:
        """Remove and return the oldest step in flight. Raises RuntimeError unless it is `step`."""
        record = self.get_oldest(step)
        self.in_flight.popleft()
        return record

    def get_oldest(self, step: int) -> StepRecord:
        """The oldest step in flight. Raises RuntimeError unless it is `step`."""
        if not self.in_flight or self.in_flight[0].step != step:
            expected = self.in_flight[0].step if self.in_flight else "none"
            raise RuntimeError(f"step {step} is committed out of order: the oldest step in flight is {expected}")
        return self.in_flight[0]

    def end_commit(self, record: StepRecord) -> None:
        """Free the pages and slots that were deferred until this step's end."""
        for pages in record.deferred_pages:
            self.kv_manager.allocator.free(pages)
        for slot in record.deferred_slots:
            self._recycle(slot)

    def count_drafts_in_flight(self, slots: np.ndarray) -> np.ndarray:
        """The drafted tokens of these slots in the step in flight, int32 [n]."""
        counts = np.zeros(self.table.num_slots, np.int32)
        for record in self.in_flight:
            if record.num_drafts is not None:
                counts[record.slots] = record.num_drafts
        return counts[slots]

    def take_back(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Of these slots so many tokens are rejected that the steps in flight count as computed."""
        if self.in_flight and counts.any():
            rejected = np.zeros(self.table.num_slots, np.int32)
            rejected[slots] = counts
            for record in self.in_flight:
                record.num_computed = record.num_computed - rejected[record.slots]

    def take_setups(self) -> list[SlotSetup]:
        """Return the slots to set up on the device since the last call."""
        setups = [*self._setups, *self._renewed.values()]
        self._setups, self._renewed = [], {}
        return setups

    def take_released(self) -> list[int]:
        """Return the slots recycled since the last call."""
        released, self._released = self._released, []
        return released

    def _last_step_of(self, slot: int) -> StepRecord | None:
        last = self.table.arrays.last_step[slot]
        return next((record for record in self.in_flight if record.step == last), None)

    def _recycle(self, slot: int) -> None:
        self.table.recycle_slot(slot)
        self._released.append(slot)


def _setup(request: Request) -> SlotSetup:
    rid = request.rid if request.trace else ""
    identity = (request.second_text_start, rid, request.tenant, request.adapter_place, request.adapter_start, request.position_offset)
    return SlotSetup(request.slot, request.params, request.seed, request.prompt_len, request.tokens, *identity)


def list_sampling_slots(slots: np.ndarray, samples: np.ndarray, num_drafts: np.ndarray | None) -> np.ndarray:
    """The slot of each sample of a step."""
    return slots[samples] if num_drafts is None else np.repeat(slots[samples], num_drafts[samples] + 1)

"""`RunningSet`: the requests on the device, the steps in flight, and what must outlive them.

Law: pages and slots of a request that leaves while a step in flight has a row of it are given back only when that step is
committed. Knows no policy and no budget.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from frame.core.interfaces.batch import SlotSetup
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.request import Request, RequestStatus
from frame.core.scheduling.request_slots import RequestTable


@dataclass(slots=True, eq=False)
class InFlight:
    """A step that was built and not committed. `epochs` tell rows whose request has left since.

    `pages` and `left` (slots) wait for the step's end.
    """

    step: int
    slots: np.ndarray  # intp [rows]
    epochs: np.ndarray  # int64 [rows]
    num_computed: np.ndarray  # int32 [rows]; before the step
    num_scheduled: np.ndarray  # int32 [rows]
    samples: np.ndarray  # bool [rows]
    num_decodes: int
    pages: list[np.ndarray] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


class RunningSet:
    """Requests on the device, in order of arrival, and their comings and goings."""

    def __init__(self, table: RequestTable, kv_manager: KVCacheManager) -> None:
        self.table = table
        self.kv_manager = kv_manager
        self.requests: list[Request] = []  # oldest first
        self.extending: dict[int, Request] = {}  # by slot; those whose prompt is not wholly scheduled
        self.prefilling: dict[int, Request] = {}  # by slot; those whose prompt a step computes and the prefix cache lacks so far
        self.num_of_tenant: Counter[str] = Counter()
        self.in_flight: deque[InFlight] = deque()
        self._setups: list[SlotSetup] = []
        self._renewed: dict[int, SlotSetup] = {}  # by slot; of requests that go on from other tokens than those that were drawn
        self._released: list[int] = []

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_deferred_pages(self) -> int:
        """Pages that come back when the steps in flight are committed."""
        return sum(len(pages) for record in self.in_flight for pages in record.pages)

    @property
    def num_deferred_slots(self) -> int:
        return sum(len(record.left) for record in self.in_flight)

    def enter(self, request: Request, cached: np.ndarray) -> None:
        """Put a request on the device; `cached` are the pages of its locked prefix. A slot must be free."""
        self.table.enter(request)
        self.kv_manager.enter(request, cached)
        insort(self.requests, request, key=attrgetter("index"))
        self.num_of_tenant[request.tenant] += 1
        self.extending[request.slot] = self.prefilling[request.slot] = request
        self._setups.append(_setup(request))

    def extend(self, request: Request, tokens: list[int]) -> None:
        """Append two or more tokens that nobody has drawn. The request's one row in flight, which draws the first of them, is passed over
        when it is committed; the others are computed like those of a prompt."""
        slot, a = request.slot, self.table.arrays
        self.table.flush(slot)
        request.output.extend(tokens)
        request.unsent += tokens
        request.tokens = request.all_tokens()
        a.num_committed_tokens[slot] += len(tokens)
        a.num_tokens[slot] = a.num_committed_tokens[slot]
        a.can_decode[slot] = False
        self.extending[slot] = request
        self._renewed[slot] = _setup(request)

    def leave(self, request: Request, *, keep: bool, state: RequestStatus) -> None:
        """Take a request off the device. `keep`: what was computed of it stays in the prefix cache."""
        slot = request.slot
        num_computed_tokens = self.num_settled(slot) if keep else 0
        self.table.flush(slot)
        pages = self.kv_manager.leave(request, request.all_tokens(), num_computed_tokens)
        self.table.leave(request)
        request.state = state
        self.requests.remove(request)
        self.num_of_tenant[request.tenant] -= 1
        if not self.num_of_tenant[request.tenant]:
            del self.num_of_tenant[request.tenant]
        self.extending.pop(slot, None)
        self.prefilling.pop(slot, None)
        self._renewed.pop(slot, None)
        self.give_up(slot, pages)
        record = self._last_step_of(slot)
        if record is None:
            self._recycle(slot)
        else:
            record.left.append(slot)

    def give_up(self, slot: int, pages: np.ndarray) -> None:
        """Free pages that a slot held, now or after the last step in flight that has a row of it."""
        if not len(pages):
            return
        record = self._last_step_of(slot)
        if record is None:
            self.kv_manager.allocator.free(pages)
        else:
            record.pages.append(pages)

    def num_settled(self, slot: int) -> int:
        """Tokens of a slot whose K and V were computed by committed steps."""
        for record in self.in_flight:
            rows = np.flatnonzero(record.slots == slot)
            if rows.size:
                return int(record.num_computed[rows[0]])
        return int(self.table.arrays.num_computed_tokens[slot])

    def is_in_flight(self, slot: int) -> bool:
        """Whether a step in flight has a row of a slot."""
        return self._last_step_of(slot) is not None

    def begin_commit(self, step: int) -> InFlight:
        """The oldest step in flight, which must be `step`; from now on it is not in flight."""
        if not self.in_flight or self.in_flight[0].step != step:
            expected = self.in_flight[0].step if self.in_flight else "none"
            raise RuntimeError(f"step {step} is committed out of order: the oldest step in flight is {expected}")
        return self.in_flight.popleft()

    def end_commit(self, record: InFlight) -> None:
        """Give back what waited for the step."""
        for pages in record.pages:
            self.kv_manager.allocator.free(pages)
        for slot in record.left:
            self._recycle(slot)

    def take_setups(self) -> list[SlotSetup]:
        setups = [*self._setups, *self._renewed.values()]
        self._setups, self._renewed = [], {}
        return setups

    def take_released(self) -> list[int]:
        released, self._released = self._released, []
        return released

    def _last_step_of(self, slot: int) -> InFlight | None:
        last = self.table.arrays.last_step[slot]
        return next((record for record in self.in_flight if record.step == last), None)

    def _recycle(self, slot: int) -> None:
        self.table.recycle(slot)
        self._released.append(slot)


def _setup(request: Request) -> SlotSetup:
    rid = request.rid if request.trace else ""
    return SlotSetup(request.slot, request.params, request.seed, request.prompt_len, request.tokens, request.second_text_start, rid)

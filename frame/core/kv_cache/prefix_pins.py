"""`PrefixPins`: prefixes that sessions keep until a time. Their pages are evicted after all others,
those of the oldest pin first, so that a pin never holds up a request.

Used by the scheduler. Must not know the protocol's names of sessions.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from frame.core.interfaces.cache import PrefixCache, SupportsPins
from frame.core.messages import SessionPin

MAX_CHECKED = 32  # pins of a tenant, whose pages may have been evicted, that one more pin looks at


@dataclass(frozen=True, slots=True)
class _Pin:
    handle: Any
    num_pages: int
    until: float  # seconds of the clock
    last_page: int


class PrefixPins:
    """Each tenant pins at most `max_pages` pages, counted once for each pin: its oldest pins end
    beyond that. A pin without a name ends where a later one keeps its pages for as long, so that a
    conversation counts once. A longer prefix is pinned at its beginning. `clock`: seconds,
    monotonic."""

    def __init__(self, cache: PrefixCache, page_size: int, max_pages: int, clock: Callable[[], float]) -> None:
        self._cache, self._page_size, self._max_pages, self._clock = cache, page_size, max_pages, clock
        self._pins: dict[str, OrderedDict[str, _Pin]] = {}  # by tenant and session, the oldest first
        self._num_pages: dict[str, int] = {}  # by tenant
        self._unnamed: dict[str, dict[int, str]] = {}  # by tenant and last page: sessions without a name
        self._ends: list[tuple[float, str, str]] = []  # a heap of (until, tenant, session); pins may have been renewed
        self._num_pins = 0

    def add_pin(self, pin: SessionPin, cache_keys: np.ndarray, namespace: str) -> None:
        """Pin a cached sequence in place of the session's earlier one."""
        if not isinstance(self._cache, SupportsPins) or not self._max_pages:
            return
        self.end_pin(pin.tenant, pin.session)
        match = self._cache.match(cache_keys[: self._max_pages * self._page_size], namespace)
        count = len(match.pages)
        if not count:
            return
        until, last_page = self._clock() + pin.seconds, int(match.pages[-1])
        if unnamed := self._unnamed.get(pin.tenant):
            for session in [session for page in match.pages.tolist() if (session := unnamed.get(page)) is not None]:
                if self._pins[pin.tenant][session].until <= until:
                    self.end_pin(pin.tenant, session)
        mine: OrderedDict[str, _Pin] = self._pins.get(pin.tenant, OrderedDict())
        if self._num_pages.get(pin.tenant, 0) + count > self._max_pages:  # the pages of the oldest are evicted first
            for session in [session for session, each in islice(mine.items(), MAX_CHECKED) if not self._cache.is_pinned(each.handle)]:
                self.end_pin(pin.tenant, session)
        while self._num_pages.get(pin.tenant, 0) + count > self._max_pages:
            self.end_pin(pin.tenant, next(iter(mine)))
        self._cache.pin(match.handle)
        self._pins.setdefault(pin.tenant, mine)[pin.session] = _Pin(match.handle, count, until, last_page)
        if not pin.is_named:
            self._unnamed.setdefault(pin.tenant, {})[last_page] = pin.session
        self._num_pages[pin.tenant] = self._num_pages.get(pin.tenant, 0) + count
        self._num_pins += 1
        heapq.heappush(self._ends, (until, pin.tenant, pin.session))
        if len(self._ends) > 2 * self._num_pins + 64:
            self._ends = [(each.until, tenant, name) for tenant, pins in self._pins.items() for name, each in pins.items()]
            heapq.heapify(self._ends)

    def end_pin(self, tenant: str, session: str) -> bool:
        """End the pin of a tenant's session. -> whether there was one."""
        mine = self._pins.get(tenant)
        pin = None if mine is None else mine.pop(session, None)
        if mine is None or pin is None:
            return False
        assert isinstance(self._cache, SupportsPins)
        self._cache.unpin(pin.handle)
        self._num_pages[tenant] -= pin.num_pages
        self._num_pins -= 1
        unnamed = self._unnamed.get(tenant, {})
        if unnamed.get(pin.last_page) == session:
            del unnamed[pin.last_page]
        if not mine:
            del self._pins[tenant], self._num_pages[tenant]
            self._unnamed.pop(tenant, None)
        return True

    def end_due(self) -> None:
        """End the pins whose time has passed."""
        while self._ends and self._ends[0][0] <= self._clock():
            until, tenant, session = heapq.heappop(self._ends)
            mine = self._pins.get(tenant)
            pin = None if mine is None else mine.get(session)
            if pin is not None and pin.until <= until:
                self.end_pin(tenant, session)

    def end_all(self) -> None:
        """End all pins."""
        for tenant, session in [(tenant, session) for tenant, pins in self._pins.items() for session in pins]:
            self.end_pin(tenant, session)
        self._ends.clear()

    def describe_load(self) -> dict[str, Any]:
        """Gauges, named as in `Heartbeat`."""
        return {"pins": self._num_pins, "pinned_pages": sum(self._num_pages.values())}

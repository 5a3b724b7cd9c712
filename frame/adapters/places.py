"""`AdapterVersions`: the adapters that every rank has in host memory; `AdapterPlaces`: which of
them are on the device, and which waiting request may start.

Used by rank 0's scheduler, one `AdapterPlaces` each. Must not know a tensor, a rank or a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from frame.core.interfaces.batch import AdapterLoad
from frame.core.messages import Finish
from frame.core.scheduling.request import Request

MAX_IN_PASS = 32  # requests of one adapter that a pass over the waiting requests sees
MAX_ABSENT = 8  # of one adapter that has no place
ABSENT_SHARE = 4  # at most one of so many requests of a pass has an adapter without a place
SCANNED = 8  # times as many requests are looked at to find those
WHOLE_PASSES = 16  # one of so many passes looks at all requests
OPEN_SECONDS = 0.5  # that an adapter keeps its place for further requests, although others wait for one
RESERVED_SECONDS = 1.0  # that a place is kept for the request for which its adapter was copied
MAX_KEYS = 4096  # of an adapter: first tokens that are remembered
_GONE = "the version of the adapter that this request began with is no longer loaded; send the request again"


@dataclass(slots=True)
class AdapterVersion:
    """An adapter in host memory. `keys`: by token id or placeholder's key, the cache key of that
    token as the first one that the adapter changes; no other adapter has had it. `num_requests`:
    those that wait or run."""

    digest: str
    num_pages: int
    invocation: np.ndarray  # int32; see `AdapterConfig.invocation`
    copy_seconds: float  # that a copy to the device takes, about
    num_requests: int = 0
    keys: dict[int, int] = field(default_factory=dict)


class AdapterVersions:
    """The loaded adapters of one engine, by digest."""

    def __init__(self) -> None:
        self.by_digest: dict[str, AdapterVersion] = {}
        self._last_key = 0

    def find_key(self, version: AdapterVersion, token: int) -> int:
        """The cache key of a token as the first one that an adapter changes: negative and even;
        those of placeholders are odd. token: its id, or a placeholder's key."""
        if token not in version.keys:
            self._last_key -= 2
            version.keys[token] = self._last_key
            if len(version.keys) > MAX_KEYS:
                del version.keys[next(iter(version.keys))]
        return version.keys[token]

    def add_version(self, digest: str, num_pages: int, invocation: tuple[int, ...], copy_seconds: float) -> None:
        self.by_digest[digest] = AdapterVersion(digest, num_pages, np.array(invocation, np.int32), copy_seconds)


@dataclass(slots=True)
class _Place:
    digest: str = ""  # of the adapter; "": none
    pages: list[int] = field(default_factory=list)
    num_running: int = 0  # requests that use it
    used_at: float = 0.0  # seconds of the scheduler's clock; later for a place that is reserved
    ready_at: float = 0.0  # the copy is done then, about
    loaded_at: float = 0.0


class AdapterPlaces:
    """Implements `RequestAdapters`."""

    def __init__(self, versions: AdapterVersions, num_places: int, num_pages: int) -> None:
        self._versions = versions
        self._places = [_Place() for _ in range(num_places)]
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._by_digest: dict[str, int] = {}
        self._loads: list[AdapterLoad] = []
        self._closed: set[int] = set()  # places that admit no further request in this pass
        self._now = 0.0
        self._num_copies = 0
        self._num_passes = 0

    def start_request(self, request: Request) -> Finish | None:
        """A request arrives: find where its adapter is active. -> how it ends if its version is
        gone."""
        if not request.adapter:
            return None
        version = self._versions.by_digest.get(request.adapter)
        if version is None:
            return Finish("error", error=_GONE, code="invalid_request", param="model")
        keys = request.content_keys(request.prompt)
        start = _find_last(keys, version.invocation) if len(version.invocation) else 0
        if start < 0:  # as PEFT: the adapter is not active without its invocation
            request.adapter = ""
            return None
        request.adapter_start, request.adapter_key = start, self._versions.find_key(version, int(keys[start]))
        version.num_requests += 1
        return None

    def finish_request(self, request: Request) -> None:
        """The request is forgotten."""
        version = self._versions.by_digest.get(request.adapter)
        if version is not None:
            version.num_requests -= 1

    def begin_pass(self, queue: Iterable[Request], count: int, now: float) -> list[Request]:
        """Waiting requests are looked at from the first one on. -> the first `count` of them, with
        few of each adapter, and few whose adapter has no place, as others may wait behind them."""
        self._now = now
        self._closed.clear()
        self._num_passes += 1
        taken, window, num_absent = Counter[str](), list[Request](), 0
        for request in islice(queue, count * SCANNED if self._num_passes % WHOLE_PASSES else None):
            if len(window) == count:
                break
            if request.adapter:
                is_absent = request.adapter not in self._by_digest
                maximum = MAX_ABSENT if is_absent else MAX_IN_PASS
                if taken[request.adapter] >= maximum or (is_absent and num_absent * ABSENT_SHARE >= count):
                    continue
                taken[request.adapter] += 1
                num_absent += is_absent
            window.append(request)
        return window

    def acquire(self, request: Request, *, is_idle: bool) -> bool:
        """Whether a request may start now; then it holds its adapter's place until `release`.
        is_idle: no other request runs, so that it starts although the copy takes a while."""
        if not request.adapter:
            return True
        number = self._by_digest.get(request.adapter)
        if number is None:
            number = self._load(request.adapter)
            if number is None:
                self._close_place()
                return False
        place = self._places[number]
        if number in self._closed or (self._now < place.ready_at and not is_idle):
            return False
        place.num_running += 1
        request.adapter_place = number
        return True

    def release(self, request: Request) -> None:
        """The request leaves the device, or was not put there after `acquire`."""
        if request.adapter_place >= 0:
            place = self._places[request.adapter_place]
            place.num_running -= 1
            place.used_at = self._now
            request.adapter_place = -1

    def take_loads(self) -> list[AdapterLoad]:
        """Return the copies that the next step begins with."""
        loads, self._loads = self._loads, []
        return loads

    def repeat_loads(self, loads: Sequence[AdapterLoad]) -> None:
        """A step failed, so that the device may lack these copies: make them again."""
        self._loads += [load for load in loads if self._by_digest.get(load.digest) == load.place]

    def is_on_device(self, request: Request) -> bool:
        """Whether a request could start now as far as its adapter is concerned."""
        return not request.adapter or request.adapter in self._by_digest

    def choose_victims(self, first: Request, eligible: Sequence[Request]) -> list[Request]:
        """See `RequestAdapters.choose_victims`. The place with the fewest requests is emptied."""
        pages = self._versions.by_digest[first.adapter].num_pages
        idle, available = self._find_idle()
        if idle and available >= pages:
            return []
        by_place: dict[int, list[Request]] = {}
        for request in eligible:
            by_place.setdefault(request.adapter_place, []).append(request)
        by_place.pop(-1, None)
        complete = [
            users
            for number, users in by_place.items()
            if len(users) == (place := self._places[number]).num_running
            and self._now - place.loaded_at >= OPEN_SECONDS
            and available + len(place.pages) >= pages
        ]
        return min(complete, key=len, default=[])

    def describe_load(self) -> dict[str, Any]:
        """Gauges and counters, named as in `Heartbeat`."""
        return {
            "adapters_on_device": len(self._by_digest),
            "adapters_running": sum(place.num_running > 0 for place in self._places),
            "adapter_copies": self._num_copies,
        }

    def forget(self, digest: str) -> None:
        """An adapter leaves host memory, and no request uses it: free its place."""
        number = self._by_digest.pop(digest, None)
        if number is not None:
            self._free_pages += self._places[number].pages
            self._places[number] = _Place()
            self._loads = [load for load in self._loads if load.digest != digest]

    def _load(self, digest: str) -> int | None:
        """Copy an adapter to a place; None: there is none, or there are too few pages, even without
        the adapters that no request uses."""
        version = self._versions.by_digest[digest]
        idle, available = self._find_idle()
        if not idle or available < version.num_pages:
            return None
        idle.sort(key=lambda number: self._places[number].used_at)
        number = next((number for number in idle if not self._places[number].digest), idle[0])
        for victim in (number, *(other for other in idle if other != number)):
            if victim == number or len(self._free_pages) < version.num_pages:
                self.forget(self._places[victim].digest)
        place = self._places[number]
        place.digest, place.pages = digest, [self._free_pages.pop() for _ in range(version.num_pages)]
        place.loaded_at, place.ready_at = self._now, self._now + version.copy_seconds
        place.used_at = place.ready_at + RESERVED_SECONDS
        self._by_digest[digest] = number
        self._closed.discard(number)
        self._loads.append(AdapterLoad(number, digest, place.pages))
        self._num_copies += 1
        return number

    def _find_idle(self) -> tuple[list[int], int]:
        """The places that no request uses or was promised; the pages that are free without them."""
        idle = [number for number, place in enumerate(self._places) if not place.num_running and place.used_at <= self._now]
        return idle, len(self._free_pages) + sum(len(self._places[number].pages) for number in idle)

    def _close_place(self) -> None:
        """Let the place whose adapter is there longest run empty: the requests after this one in
        the queue do not prolong its use."""
        opened = {number: place.loaded_at for number, place in enumerate(self._places) if number not in self._closed}
        if opened and self._now - min(opened.values()) >= OPEN_SECONDS:
            self._closed.add(min(opened, key=lambda number: opened[number]))


def _find_last(prompt: np.ndarray, tokens: np.ndarray) -> int:
    """The index of the last occurrence of `tokens` in a prompt; -1: there is none."""
    if len(tokens) > len(prompt):
        return -1
    windows = np.lib.stride_tricks.sliding_window_view(prompt, len(tokens))
    matches = np.flatnonzero((windows == tokens).all(axis=1))
    return int(matches[-1]) if len(matches) else -1

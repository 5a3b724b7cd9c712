"""Stored responses and conversations, in memory. Bounded in number, bytes and age, as a whole and for each key. Used by the routes of
the Responses API. Knows no HTTP and no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from frame.entrypoints.http.protocol.bodies import LEAST_BODY, problem_of

OVERHEAD = 512  # bytes of an entry besides its texts
EVENT_OVERHEAD = 64  # bytes of an event besides its text


class EventLog:
    """The events of one response, for any number of readers. An event's place is its sequence number."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self.is_over = False
        self.is_lost = False  # it took more room than its key may have
        self._events: list[bytes] = []
        self._readers: set[LogReader] = set()

    def add(self, events: bytes) -> None:
        """Append whole server-sent events."""
        if not self.is_lost:
            new = [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
            self._events += new
            self.size += len(events) + EVENT_OVERHEAD * len(new)
        self._wake()

    def close(self) -> None:
        """No more events come."""
        self.is_over = True
        self._wake()

    def drop(self) -> None:
        """Free the memory; readers are told that events are missing."""
        self.is_lost, self.size = True, 0
        self._events.clear()
        self._wake()

    def open_reader(self, place: int) -> LogReader:
        """A reader from the event `place` on; it must be closed."""
        reader = LogReader(self, place)
        self._readers.add(reader)
        return reader

    def close_reader(self, reader: LogReader) -> None:
        self._readers.discard(reader)

    def events_from(self, place: int) -> list[bytes]:
        return self._events[place:]

    def _wake(self) -> None:
        for reader in self._readers:
            reader.news.set()


class LogReader:
    """One reader of an `EventLog`. `news` is set when there is something to look at; `hang_up` ends the reading."""

    def __init__(self, log: EventLog, place: int) -> None:
        self.news = asyncio.Event()
        self._log = log
        self._place = place
        self.is_gone = False

    def hang_up(self) -> None:
        self.is_gone = True
        self.news.set()

    async def read(self) -> bytes | None:
        """The events since the last call, as soon as there are any; None at the end. `log.is_lost` says whether it is the real end."""
        while True:
            self.news.clear()
            if self.is_gone or self._log.is_lost:
                return None
            if found := self._log.events_from(self._place):
                self._place += len(found)
                return b"".join(found)
            if self._log.is_over:
                return None
            await self.news.wait()


@dataclass(slots=True, eq=False)
class Stored:
    """`body`: the response or conversation as JSON text. `items`: all items up to and with it, as a JSON list, of which the first
    `num_input` are a response's input."""

    tenant: str
    body: bytes
    items: bytes
    num_input: int
    created: float  # seconds, monotonic
    log: EventLog | None = None

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + OVERHEAD + (0 if self.log is None else self.log.size)

    def conversation(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return found


class Shelf(OrderedDict[str, Stored]):
    """What one tenant stores, oldest first."""

    num_bytes = 0


class ResponseStore:
    """By tenant and name: what belongs to another key is as if it were not there. `ttl` in seconds. `share`: the part of all room that
    one key may fill; its own oldest entry makes room for its next. When all keys together need more than there is, the key that holds
    the most loses its oldest entry, so that a key which stores much never evicts one which stores little. The items of one entry are
    bounded as a request's body is, by `max_items_bytes` and in their parts, because requests decode them."""

    def __init__(
        self, max_entries: int = 0, max_bytes: int = 0, ttl: float = 0.0, share: float = 1.0, max_items_bytes: int = LEAST_BODY
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._share = share
        self._max_items_bytes = max_items_bytes
        self._shelves: dict[str, Shelf] = {}
        self._count = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_on(self) -> bool:
        return self._max_entries > 0

    def room_of(self, tenant: str) -> tuple[int, int]:
        """(entries, bytes) that a tenant may fill; without keys there is one tenant, with all room."""
        share = self._share if tenant else 1.0
        return max(1, int(self._max_entries * share)), int(self._max_bytes * share)

    def put(self, name: str, tenant: str, body: bytes, items: bytes, num_input: int = 0, log: EventLog | None = None) -> bool:
        """Store an entry, in place of one of that name. False when it does not fit, and is not stored."""
        self._drop(name, tenant, log)
        stored = Stored(tenant, body, items, num_input, time.monotonic(), log)
        if not self.is_on or stored.size > self.room_of(tenant)[1] or not self.fits(tenant, body, items):
            return False
        shelf = self._shelves.setdefault(tenant, Shelf())
        shelf[name] = stored
        self._count += 1
        self._charge(shelf, stored.size)
        self._make_room(tenant, shelf)
        return True

    def fits(self, tenant: str, body: bytes, items: bytes) -> bool:
        """Whether an entry fits into all room of its tenant, and its items into what a request may bring."""
        if len(body) + len(items) + OVERHEAD > self.room_of(tenant)[1] or len(items) > self._max_items_bytes:
            return False
        return problem_of(items) is None

    def append_items(self, name: str, tenant: str, items: list[dict[str, Any]]) -> bool:
        """Append to an entry. False, and nothing is changed, when it is gone or would be too large."""
        stored = self.get(name, tenant)
        if stored is None:
            return False
        data = msgspec.json.encode([*stored.conversation(), *items])
        return self.fits(tenant, stored.body, data) and self.put(name, tenant, stored.body, data)

    def add_events(self, name: str, tenant: str, log: EventLog, events: bytes) -> None:
        """Append to the log of a stored response. A log that would fill more than its tenant's room is dropped."""
        shelf = self._shelves.get(tenant)
        stored = shelf.get(name) if shelf is not None else None
        if shelf is None or stored is None or stored.log is not log:
            log.drop()  # nothing counts its bytes
            return
        before = log.size
        log.add(events)
        self._charge(shelf, log.size - before)
        if stored.size > self.room_of(tenant)[1]:
            self._charge(shelf, -log.size)
            log.drop()
        stored.created = time.monotonic()
        shelf.move_to_end(name)  # its own events do not evict it
        self._make_room(tenant, shelf)

    def get(self, name: str, tenant: str) -> Stored | None:
        """The entry, unless it is another's, too old or gone."""
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return None
        self._drop_old(tenant, shelf)
        return shelf.get(name)

    def delete(self, name: str, tenant: str) -> bool:
        """Whether there was one."""
        found = self.get(name, tenant) is not None
        self._drop(name, tenant)
        return found

    def _charge(self, shelf: Shelf, size: int) -> None:
        shelf.num_bytes += size
        self.num_bytes += size

    def _make_room(self, tenant: str, shelf: Shelf) -> None:
        most, most_bytes = self.room_of(tenant)
        while len(shelf) > most or shelf.num_bytes > most_bytes:
            self._drop(next(iter(shelf)), tenant)
        if self._is_over():
            for other, others in list(self._shelves.items()):
                self._drop_old(other, others)
        while self._is_over():
            other, others = max(self._shelves.items(), key=lambda entry: self._weight(entry[1]))
            self._drop(next(iter(others)), other)

    def _is_over(self) -> bool:
        return self._count > self._max_entries or self.num_bytes > self._max_bytes

    def _weight(self, shelf: Shelf) -> float:
        return max(len(shelf) / self._max_entries, shelf.num_bytes / self._max_bytes)

    def _drop_old(self, tenant: str, shelf: Shelf) -> None:
        limit = time.monotonic() - self._ttl
        while shelf and next(iter(shelf.values())).created <= limit:
            self._drop(next(iter(shelf)), tenant)

    def _drop(self, name: str, tenant: str, kept_log: EventLog | None = None) -> None:
        """Forget an entry, and the events that it still collects unless they are `kept_log`."""
        shelf = self._shelves.get(tenant)
        stored = shelf.pop(name, None) if shelf is not None else None
        if shelf is None or stored is None:
            return
        self._charge(shelf, -stored.size)
        if stored.log is not None and stored.log is not kept_log and not stored.log.is_over:
            stored.log.drop()
        self._count -= 1
        if not shelf:
            del self._shelves[tenant]

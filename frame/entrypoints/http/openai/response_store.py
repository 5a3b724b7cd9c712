"""Stores responses and conversations in memory, and in files if there is a folder for them, bounded
in number, bytes and age, in total and per tenant. Used by the routes of the Responses API. Must not
depend on HTTP or the engine."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec

from frame.entrypoints.http.openai.response_files import ResponseFiles, StoredFile
from frame.entrypoints.http.protocol.bodies import MIN_BODY, problem_of

OVERHEAD = 512  # bytes of an entry besides its body and items
EVENT_OVERHEAD = 64  # bytes of an event besides its text
SWEEP = 60.0  # seconds between two looks for expired entries of all tenants


class EventLog:
    """The events of one response for any number of readers, by sequence number."""

    def __init__(self) -> None:
        self.size = 0  # bytes
        self.is_over = False
        # Dropped: it exceeded the bytes of its tenant, or its response was deleted
        self.is_lost = False
        self._events: list[bytes] = []
        self._changed = asyncio.Event()  # set, and replaced, at each change

    def add(self, events: bytes) -> None:
        """Append whole server-sent events."""
        if not self.is_lost:
            new = [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
            self._events += new
            self.size += len(events) + EVENT_OVERHEAD * len(new)
        self.wake()

    def close(self) -> None:
        """Mark the log as complete."""
        self.is_over = True
        self.wake()

    def drop(self) -> None:
        """Free the memory. Readers end, and `is_lost` tells them that events are missing."""
        self.is_lost, self.size = True, 0
        self._events.clear()
        self.wake()

    async def read(self, start: int, is_gone: Callable[[], bool] = lambda: False) -> list[bytes]:
        """Wait for events from index `start` on and return them; empty at the end, where the log is
        lost, or when the reader `is_gone`, which is asked again at each `wake`."""
        while not (is_gone() or self.is_over or self.is_lost or len(self._events) > start):
            await self._changed.wait()
        return [] if is_gone() else self._events[start:]

    def wake(self) -> None:
        """Have the readers look again."""
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass(slots=True, eq=False)
class StoredEntry:
    """One stored response or conversation."""

    tenant: str
    body: bytes  # the response or conversation object, as JSON
    items: bytes  # all items of the conversation so far, as a JSON list
    num_input: int  # how many of the items, from the start, are a response's input
    created: float  # seconds, monotonic
    log: EventLog | None = None  # of a streamed background response
    is_running: bool = False  # a response that this server generates

    @property
    def size(self) -> int:
        """Bytes that count for the tenant."""
        return len(self.body) + len(self.items) + OVERHEAD + (0 if self.log is None else self.log.size)

    def decode_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items


class TenantEntries(OrderedDict[str, StoredEntry]):
    """The entries of one tenant by name, oldest first."""

    num_bytes = 0


class ResponseStore:
    """Entries by tenant and name. A tenant cannot see the entries of another one.

    `max_entries`, `max_bytes`: bounds of all entries; 0 entries turn the store off. `ttl`: seconds.
    `share`: the part of both bounds that one tenant may fill (0 to 1). A new entry evicts the
    oldest ones of its own tenant, running responses last. When all tenants together exceed the
    bounds, the tenant that holds the most loses its oldest entry, so a large user never evicts a
    small one. The items of one entry are bounded as a request body is, by `max_items_bytes` and by
    their number of JSON values, because requests decode them. `files`: what outlives the server.
    """

    def __init__(
        self,
        max_entries: int = 0,
        max_bytes: int = 0,
        ttl: float = 0.0,
        share: float = 1.0,
        max_items_bytes: int = MIN_BODY,
        files: ResponseFiles | None = None,
    ) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._share = share
        self._max_items_bytes = max_items_bytes
        self._tenants: dict[str, TenantEntries] = {}
        self._cancelled: set[str] = set()  # names of responses that are cancelled and still run
        self._count = 0
        self.num_bytes = 0
        self._files = files
        self._swept = time.monotonic()
        for stored in () if files is None else files.load_all():
            self._take_file(stored)

    def __len__(self) -> int:
        return self._count

    @property
    def is_on(self) -> bool:
        return self._max_entries > 0

    def quota_of(self, tenant: str) -> tuple[int, int]:
        """(entries, bytes) that a tenant may fill; without keys one tenant may fill all."""
        share = self._share if tenant else 1.0
        return max(1, int(self._max_entries * share)), int(self._max_bytes * share)

    def put(
        self,
        name: str,
        tenant: str,
        body: bytes,
        items: bytes,
        num_input: int = 0,
        log: EventLog | None = None,
        *,
        is_running: bool = False,
    ) -> bool:
        """Store or replace an entry. Returns False if it does not fit and is not stored."""
        self._drop(name, tenant, log, keeps_file=True)  # other servers see it until it is replaced
        self._sweep()
        stored = StoredEntry(tenant, body, items, num_input, time.monotonic(), log, is_running)
        if not self.is_on or stored.size > self.quota_of(tenant)[1] or not self.fits(tenant, body, items):
            if self._files is not None:
                self._files.remove(name, tenant)
            return False
        entries = self._tenants.setdefault(tenant, TenantEntries())
        entries[name] = stored
        self._count += 1
        self._add_bytes(entries, stored.size)
        if self._files is not None:
            self._files.save(name, tenant, body, items, num_input)
        self._evict(tenant, entries)
        return True

    def _take_file(self, stored_file: StoredFile) -> None:
        """Store an entry that this server or another one has written."""
        assert self._files is not None
        self._files.note(stored_file)
        file = stored_file[0]
        age = max(0.0, time.time() - file.created)
        stored = StoredEntry(file.tenant, bytes(file.body), bytes(file.items), file.num_input, time.monotonic() - age)
        if age >= self._ttl:
            self._files.remove(file.name, file.tenant)
            return
        if not self.is_on or not self.fits(file.tenant, stored.body, stored.items):  # it fitted the server that wrote it
            self._files.forget(file.name, file.tenant)
            return
        entries = self._tenants.setdefault(file.tenant, TenantEntries())
        entries[file.name] = stored
        self._count += 1
        self._add_bytes(entries, stored.size)
        self._evict(file.tenant, entries)

    async def find(self, name: str, tenant: str) -> StoredEntry | None:
        """`get`, after taking over what another server has done to the entry. A thread reads its
        file."""
        if self._files is not None and not self._runs(stored := self._peek(name, tenant)):
            file = await asyncio.to_thread(self._files.check, name, tenant)
            # Nothing has changed the entry meanwhile: one taken over and deleted is pending.
            if self._peek(name, tenant) is stored and not self._files.is_pending(name, tenant):
                self._take_change(name, tenant, file)
        return self.get(name, tenant)

    def _peek(self, name: str, tenant: str) -> StoredEntry | None:
        entries = self._tenants.get(tenant)
        return None if entries is None else entries.get(name)

    def _runs(self, stored: StoredEntry | None) -> bool:
        """Whether an entry is that of a response that streams here."""
        return stored is not None and stored.log is not None and not stored.log.is_over

    def _take_change(self, name: str, tenant: str, file: StoredFile | bool) -> None:
        """Take over the result of `ResponseFiles.check`."""
        assert self._files is not None
        if file is True:
            return
        self._drop(name, tenant, keeps_file=True)
        if isinstance(file, bool):
            self._files.forget(name, tenant)
        else:
            self._take_file(file)

    def fits(self, tenant: str, body: bytes, items: bytes) -> bool:
        """Whether an entry fits the tenant's bytes, and its items a request body."""
        if len(body) + len(items) + OVERHEAD > self.quota_of(tenant)[1] or len(items) > self._max_items_bytes:
            return False
        return problem_of(items) is None

    def cancel(self, name: str, tenant: str, body: bytes) -> None:
        """Store the body of a response that is cancelled and still runs; it stays cancelled."""
        self._cancelled.add(name)
        if (stored := self.get(name, tenant)) is not None:
            self.put(name, tenant, body, stored.items, stored.num_input, stored.log)

    def is_cancelled(self, name: str) -> bool:
        """Whether a running response is cancelled."""
        return name in self._cancelled

    def forget_cancelled(self, name: str) -> None:
        """Note that a response, cancelled or not, does not run any more."""
        self._cancelled.discard(name)

    def append_items(self, name: str, tenant: str, items: list[dict[str, Any]]) -> bool:
        """Append items; False, without a change, if the entry is gone or too large. Looks at the
        file itself: in a wait for a thread, another request could append to the same version."""
        if self._files is not None:
            self._take_change(name, tenant, self._files.check(name, tenant))
        stored = self.get(name, tenant)
        if stored is None:
            return False
        data = msgspec.json.encode([*stored.decode_items(), *items])
        return self.fits(tenant, stored.body, data) and self.put(name, tenant, stored.body, data)

    def add_events(self, name: str, tenant: str, log: EventLog, events: bytes) -> None:
        """Append to a stored response's log, which is dropped beyond the tenant's bytes."""
        entries = self._tenants.get(tenant)
        stored = entries.get(name) if entries is not None else None
        if entries is None or stored is None or stored.log is not log:
            log.drop()  # no entry counts its bytes
            return
        before = log.size
        log.add(events)
        self._add_bytes(entries, log.size - before)
        if stored.size > self.quota_of(tenant)[1]:
            self._add_bytes(entries, -log.size)
            log.drop()
        stored.created = time.monotonic()
        entries.move_to_end(name)  # its own events do not evict it
        self._evict(tenant, entries)

    def get(self, name: str, tenant: str) -> StoredEntry | None:
        """The entry of this tenant and name in memory; None if there is none or it has expired."""
        entries = self._tenants.get(tenant)
        if entries is None:
            return None
        self._drop_expired(tenant, entries)
        stored = entries.get(name)
        if stored is not None and stored.created <= time.monotonic() - self._ttl:  # it came from another server, so its place is wrong
            self._drop(name, tenant)
            return None
        return stored

    def close(self) -> None:
        """Write what is not written yet."""
        if self._files is not None:
            self._files.close()

    def delete(self, name: str, tenant: str) -> bool:
        """Delete an entry. Returns whether it existed."""
        existed = self.get(name, tenant) is not None
        self._drop(name, tenant)
        return existed

    async def delete_file(self, name: str, tenant: str) -> bool:
        """Delete an entry and its file. Returns False, without a change, if the disk refuses."""
        if self._files is not None and not await asyncio.to_thread(self._files.delete, name, tenant):
            return False
        self.delete(name, tenant)
        return True

    def _add_bytes(self, entries: TenantEntries, size: int) -> None:
        entries.num_bytes += size
        self.num_bytes += size

    def _evict(self, tenant: str, entries: TenantEntries) -> None:
        """Drop entries until the quota of the tenant and the bounds of the store hold."""
        max_entries, max_bytes = self.quota_of(tenant)
        while len(entries) > max_entries or entries.num_bytes > max_bytes:
            self._drop(self._choose_victim(entries), tenant)
        if self._exceeds_bounds():
            for other, others in list(self._tenants.items()):
                self._drop_expired(other, others)
        while self._exceeds_bounds():
            other, others = max(self._tenants.items(), key=lambda entry: self._fill_ratio(entry[1]))
            self._drop(self._choose_victim(others), other)

    def _choose_victim(self, entries: TenantEntries) -> str:
        """The oldest entry that does not run, apart from the newest one; else the oldest one."""
        older = islice(entries.items(), len(entries) - 1)
        return next((name for name, stored in older if not stored.is_running), next(iter(entries)))

    def _exceeds_bounds(self) -> bool:
        return self._count > self._max_entries or self.num_bytes > self._max_bytes

    def _fill_ratio(self, entries: TenantEntries) -> float:
        """The part of the bounds, in entries or bytes, that these entries fill."""
        return max(len(entries) / self._max_entries, entries.num_bytes / self._max_bytes)

    def _sweep(self) -> None:
        """Drop expired entries, also those of tenants that do not return."""
        now = time.monotonic()
        if now - self._swept >= SWEEP:
            self._swept = now
            for tenant, entries in list(self._tenants.items()):
                self._drop_expired(tenant, entries)

    def _drop_expired(self, tenant: str, entries: TenantEntries) -> None:
        limit = time.monotonic() - self._ttl
        while entries and next(iter(entries.values())).created <= limit:
            self._drop(next(iter(entries)), tenant)

    def _drop(self, name: str, tenant: str, log_to_keep: EventLog | None = None, *, keeps_file: bool = False) -> None:
        """Remove an entry and its unfinished log, unless the log is `log_to_keep`."""
        entries = self._tenants.get(tenant)
        stored = entries.pop(name, None) if entries is not None else None
        if entries is None or stored is None:
            return
        self._add_bytes(entries, -stored.size)
        if self._files is not None and not keeps_file:
            self._files.remove(name, tenant)
        if stored.log is not None and stored.log is not log_to_keep and not stored.log.is_over:
            stored.log.drop()
        self._count -= 1
        if not entries:
            del self._tenants[tenant]

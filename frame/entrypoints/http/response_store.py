"""Responses that are kept for later: bounded in number, bytes and age, the oldest go first. Knows no HTTP and no engine."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

OVERHEAD = 512  # bytes of an entry besides its two texts


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as JSON text, and the conversation up to and with it as a JSON list of items."""

    tenant: str
    body: bytes
    items: bytes
    created: float

    @property
    def size(self) -> int:
        return len(self.body) + len(self.items) + OVERHEAD

    def conversation(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return found


class ResponseStore:
    """By name and tenant: a response that belongs to another key is as if it were not there. `ttl` in seconds."""

    def __init__(self, max_entries: int = 0, max_bytes: int = 0, ttl: float = 0.0) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._ttl = ttl
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_on(self) -> bool:
        return self._max_entries > 0

    def put(self, name: str, tenant: str, body: bytes, items: bytes) -> None:
        """Keep a response, in place of one of that name; one that is larger than all room is not kept."""
        self._drop(name)
        kept = Kept(tenant, body, items, time.monotonic())
        if not self.is_on or kept.size > self._max_bytes:
            return
        self._kept[name] = kept
        self.num_bytes += kept.size
        while len(self._kept) > self._max_entries or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, name: str, tenant: str) -> Kept | None:
        """The response, unless it is another's, too old or gone."""
        self._drop_old()
        kept = self._kept.get(name)
        return kept if kept is not None and kept.tenant == tenant else None

    def delete(self, name: str, tenant: str) -> bool:
        """Whether there was one."""
        if self.get(name, tenant) is None:
            return False
        self._drop(name)
        return True

    def _drop_old(self) -> None:
        limit = time.monotonic() - self._ttl
        while self._kept:
            name, oldest = next(iter(self._kept.items()))
            if oldest.created > limit:
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        kept = self._kept.pop(name, None)
        if kept is not None:
            self.num_bytes -= kept.size

"""`OpenSessions`: the sessions of one server: how many there may be, and when they end.

Half of the server's connections may be sessions, and an owner (a key's tenant, or an address) may
have as many as it leaves free. One task looks at all of them. Used by the route. Must not know an
event.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from frame.entrypoints.http.errors import RETRY_AFTER, ApiError

MAX_SECONDS = 3600.0  # of a session
IDLE_SECONDS = 600.0  # without an event of the client, and nothing in progress
LOOK = 0.2  # seconds between two looks at all sessions
GOING_AWAY = 1001  # close code


class OpenSession(Protocol):
    """What `OpenSessions` needs of a session. Times: seconds of `time.monotonic`."""

    opened_at: float
    last_event_at: float

    @property
    def is_busy(self) -> bool: ...

    def close(self, code: int, reason: str) -> None: ...


class OpenSessions:
    """max_sessions: at once. is_draining: whether the server takes no more requests."""

    def __init__(self, max_sessions: int, is_draining: Callable[[], bool]) -> None:
        self._max = max_sessions
        self._is_draining = is_draining
        self._sessions: set[OpenSession] = set()
        self._by_owner: Counter[str] = Counter()
        self._watching: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def check_place(self, owner: str) -> None:
        """Raise ApiError 503 or 429 where no session can be opened."""
        count, owned = len(self._sessions) + 1, self._by_owner[owner] + 1
        if count > self._max:
            sentence = f"{self._max} realtime sessions are open, half of server.max_connections; try again later"
            raise ApiError(503, sentence, code="too_many_sessions", retry_after=RETRY_AFTER)
        if owned > max(1, self._max - count + 1):
            sentence = f"{owned - 1} realtime sessions of one client are open, its share of {self._max}; close some"
            raise ApiError(429, sentence, code="too_many_sessions_of_client", retry_after=RETRY_AFTER)

    def add(self, session: OpenSession, owner: str) -> None:
        self._sessions.add(session)
        self._by_owner[owner] += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    def remove(self, session: OpenSession, owner: str) -> None:
        self._sessions.discard(session)
        self._by_owner[owner] -= 1
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    async def _watch(self) -> None:
        """Close sessions whose time is over, and idle ones of a server that stops."""
        while self._sessions:
            now, is_draining = time.monotonic(), self._is_draining()
            for session in list(self._sessions):
                if now - session.opened_at > MAX_SECONDS:
                    session.close(GOING_AWAY, f"a session lasts {MAX_SECONDS:g} s; open another one")
                elif session.is_busy:
                    continue
                elif is_draining:
                    session.close(GOING_AWAY, "the server is shutting down")
                elif now - session.last_event_at > IDLE_SECONDS:
                    session.close(GOING_AWAY, f"the session had no event for {IDLE_SECONDS:g} s; open another one")
            await asyncio.sleep(LOOK)

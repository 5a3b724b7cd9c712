"""`HalfClosableProtocol`: uvicorn's HTTP connection for clients that shut their sending side when
the request is out, and still listen.

A client that is gone looks the same until something is sent to it. So until the answer begins,
interim responses go out: clients ignore them, and a socket that nobody owns any more refuses them,
which ends the request. Knows no route.
"""

from __future__ import annotations

import asyncio
from typing import Any

from frame.entrypoints.http.protocol.offers import PlainProtocol

INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
FIRST_PROBE, LONGEST_PROBE = 0.02, 1.0  # seconds between two interim responses; doubles


class HalfClosableProtocol(PlainProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._probe: asyncio.TimerHandle | None = None
        self._is_half_closed = False

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for writing: for a whole request of HTTP/1.1 that is
        not answered yet."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        self._ask(FIRST_PROBE)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_asking()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and not self.pipeline and self.cycle.response_complete:
            self._stop_asking()
            self.transport.close()

    def _ask(self, delay: float) -> None:
        """Is anybody there? The answer to one question is heard with the next."""
        self._probe = None
        if self.transport.is_closing() or self.cycle.response_started:  # what is sent from now on asks too
            return
        self.transport.write(INTERIM)
        self._probe = self.loop.call_later(delay, self._ask, min(2 * delay, LONGEST_PROBE))

    def _stop_asking(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

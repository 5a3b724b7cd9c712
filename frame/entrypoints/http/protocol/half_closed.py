"""`HalfClosableProtocol`: uvicorn's HTTP connection for clients that shut down their sending side
after the request and read the response, such as `nc -N`.

A client that closed its socket looks the same until something is sent to it. So until the response
begins, interim responses are sent: clients ignore them, and a closed socket answers with a reset,
which ends the request. Must not depend on a route.
"""

from __future__ import annotations

import asyncio
from typing import Any

from frame.entrypoints.http.protocol.upgrade_refusal import UpgradeRefusingProtocol

INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"
FIRST_PROBE, LONGEST_PROBE = 0.02, 1.0  # seconds between two interim responses; doubles


class HalfClosableProtocol(UpgradeRefusingProtocol):
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
        self._send_probe(FIRST_PROBE)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_probes()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_half_closed and not self.pipeline and self.cycle.response_complete:
            self._stop_probes()
            self.transport.close()

    def _send_probe(self, delay: float) -> None:
        """Send an interim response; a closed socket's reset arrives before the next one."""
        self._probe = None
        if self.transport.is_closing() or self.cycle.response_started:  # the response itself is a probe from now on
            return
        self.transport.write(INTERIM)
        self._probe = self.loop.call_later(delay, self._send_probe, min(2 * delay, LONGEST_PROBE))

    def _stop_probes(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

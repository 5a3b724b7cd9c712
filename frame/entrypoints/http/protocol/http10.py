"""`CloseDelimited`: responses to HTTP/1.0 requests. HTTP/1.0 has no chunks: the end of the
connection ends a body of unknown length (RFC 9112, section 6.3).

Used by `GuardedProtocol`. Must not depend on a route.
"""

from __future__ import annotations

from typing import Any


class CloseDelimited:
    """The `send` of uvicorn's cycle of one HTTP/1.0 request, after whose response uvicorn closes
    the connection."""

    def __init__(self, cycle: Any) -> None:
        self._cycle, self._send = cycle, cycle.send
        self._is_unknown = False  # the length of the body
        cycle.waiting_for_100_continue = False  # HTTP/1.0 has no status 100

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._is_unknown = not any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if self._is_unknown:
                self._cycle.chunked_encoding = False
        elif self._is_unknown:
            self._cycle.expected_content_length = len(message.get("body", b""))  # uvicorn compares it with the bytes sent
        await self._send(message)

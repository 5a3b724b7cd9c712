"""Answers on the server's socket while the model loads: `/health/live` 200, everything else 503, from one thread. Knows no engine.

Connections that it does not get to stay in the socket's queue for the real server.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from types import TracebackType
from typing import Self

from frame.entrypoints.http.errors import ApiError

PATIENCE = 1.0  # seconds for a whole connection: a slow client must not hold up the start
LONGEST_HEAD = 16 * 1024
RETRY_AFTER = 2  # seconds
LIVE = b"/health/live"
BACKLOG = 2048


class StartingServer:
    """Between `with` and its end the socket belongs to this object."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="starting", daemon=True)

    def __enter__(self) -> Self:
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._wake.send(b"x")
        self._thread.join()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        while True:
            readable, _, _ = select.select([self._listener, self._woken], [], [])
            if self._woken in readable:
                return
            with contextlib.suppress(OSError):  # whatever one client does, the next is served
                connection, _ = self._listener.accept()
                with connection:
                    _serve(connection, time.monotonic() + PATIENCE)


def _serve(connection: socket.socket, until: float) -> None:
    """Answer, and be done at `until` (seconds, monotonic). Raises OSError, TimeoutError among them."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < LONGEST_HEAD:
        part = _read(connection, until)
        if not part:
            return
        head += part
    words = head.split(b" ", 2)
    is_live = len(words) == 3 and words[1].partition(b"?")[0] == LIVE
    body = b"{}" if is_live else ApiError(503, "the server is starting; the model is not loaded yet").body()
    status = b"200 OK" if is_live else b"503 Service Unavailable\r\nretry-after: %d" % RETRY_AFTER
    connection.sendall(
        b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body)
    )
    connection.shutdown(socket.SHUT_WR)
    while _read(connection, until):  # what is left of a body, lest the kernel resets the connection before the answer is read
        pass


def _read(connection: socket.socket, until: float) -> bytes:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
    return connection.recv(65536)

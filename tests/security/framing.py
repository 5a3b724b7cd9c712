"""A client without a key whose bytes are mostly HTTP framing: `python -m tests.security.framing
HOST PORT PATTERN CONNECTIONS MEGABYTES_A_SECOND`, until it is killed. Prints a line when the first
part is on its way.

`PATTERNS`: what each connection sends, first once and then again and again.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
MISSING = b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n"
TINY = b"a:\r\n" * 120
PATTERNS: dict[str, tuple[bytes, bytes]] = {
    "chunks of one byte": (CHUNKED, b"1\r\nx\r\n" * 10_000),
    "chunks of six bytes": (CHUNKED, b"6\r\nxxxxxx\r\n" * 6_000),
    "chunk extensions": (CHUNKED, b"1;a=b\r\nx\r\n" * 5_000),
    "empty lines in chunks": (CHUNKED, b"1000\r\n" + b"\r\n\r\n" * 1024 + b"\r\n"),
    "small chunks after large ones": (CHUNKED, b"4000\r\n" + b"x" * 16384 + b"\r\n" + b"6\r\nxxxxxx\r\n" * 1_600),
    "trailers": (b"", (CHUNKED + b"0\r\n" + TINY + b"\r\n") * 50),
    "requests": (b"", MISSING * 2_000),
    "tiny headers": (b"", MISSING.replace(b"\r\n\r\n", b"\r\n" + TINY + b"\r\n") * 100),
    "empty lines": (b"", b"\r\n" * 20_000),
}  # fmt: skip


SENDING = threading.Event()


def send_forever(address: tuple[str, int], pattern: str, rate: float) -> None:
    """`rate`: bytes a second. Connects again when the server closes the connection."""
    head, body = PATTERNS[pattern]
    while True:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=10) as connection:
            threading.Thread(target=read_all, args=(connection,), daemon=True).start()
            connection.sendall(head)
            started, sent = time.monotonic(), 0
            while True:
                connection.sendall(body)
                sent += len(body)
                SENDING.set()
                time.sleep(max(0.0, sent / rate - (time.monotonic() - started)))
        time.sleep(0.001)


def read_all(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


def main(host: str, port: str, pattern: str, connections: str, megabytes: str) -> None:
    count = int(connections)
    for _ in range(count):
        threading.Thread(target=send_forever, args=((host, int(port)), pattern, float(megabytes) * 1e6 / count), daemon=True).start()
    SENDING.wait()
    print("sending", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A TCP connection between two hosts that share a secret, and the sockets of a folder that it
carries.

The first message of the end that connects shows that it knows the secret, then both ends prove it
for this connection. Every frame has a code (HMAC-SHA256) over its number and content. Contents are
not encrypted. Used by the launcher `rendezvous` and by the tier `nixl`. Must not know a rank or
what its sockets carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import os
import secrets
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from frame.core.errors import ConfigurationError

KEY_VARIABLE = "FRAME_DIST_KEY"
SHORTEST_KEY = 16  # characters
SILENCE = 10.0  # seconds without a frame until the other host counts as lost
BEAT = 1.0  # seconds between two frames
HANDSHAKE = 3.0  # seconds
LARGEST = 64 << 20  # bytes of a frame
CHUNK = 1 << 18  # bytes of a socket that are read at once

_HELLO = b"frame-link-2"
_NONCE, _CODE = 32, 16
_HEAD = struct.Struct(">IBI")  # bytes of the content, kind, channel
# kinds of frames
BEATING, OPEN, DATA, CLOSE, START, STARTED, FAILED, INPUT, ERRORS, EXIT, SIGNAL, BYE, STOPPED = range(13)


class LinkError(OSError):
    """The other host is not who it should be, sent what is no frame, or is gone."""


def read_key(setting: str = "parallel.nnodes", holders: str = "host") -> bytes:
    """The secret that all hosts share. setting: that needs it. Raises ConfigurationError."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < SHORTEST_KEY:
        raise ConfigurationError(
            f"{setting} needs a secret of at least {SHORTEST_KEY} characters in {KEY_VARIABLE}, the same on every {holders};"
            f" export {KEY_VARIABLE}=$(openssl rand -hex 32)"
        )
    return key.encode()


class Link:
    """One end of an authenticated connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: tuple[bytes, bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._send_key, self._receive_key = keys
        self._sent = self._received = 0

    @property
    def local_host(self) -> str:
        """The address of this end."""
        return str(self._writer.get_extra_info("sockname")[0])

    def post(self, kind: int, channel: int = 0, content: bytes = b"") -> None:
        """Send a frame; it is buffered. Called in the loop's thread."""
        head = _HEAD.pack(len(content), kind, channel)
        code = _code(self._send_key, struct.pack(">Q", self._sent), head, content)
        self._sent += 1
        self._writer.write(b"".join((head, code, content)))

    async def drain(self) -> None:
        """Wait until the buffer is small."""
        await self._writer.drain()

    async def receive(self) -> tuple[int, int, bytes]:
        """(kind, channel, content) of the next frame that is no heartbeat. Raises LinkError."""
        while True:
            try:
                async with asyncio.timeout(SILENCE):
                    head = await self._reader.readexactly(_HEAD.size)
                    size, kind, channel = _HEAD.unpack(head)
                    if size > LARGEST:
                        raise LinkError("a frame is too large")
                    code = await self._reader.readexactly(_CODE)
                    content = await self._reader.readexactly(size)
            except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
                raise LinkError(f"the connection is lost: {type(error).__name__} {error}".rstrip()) from None
            expected = _code(self._receive_key, struct.pack(">Q", self._received), head, content)
            self._received += 1
            if not hmac.compare_digest(code, expected):
                raise LinkError("a frame does not have the code of the shared secret")
            if kind != BEATING:
                return kind, channel, content

    async def beat(self) -> None:
        """Send heartbeats until cancelled."""
        while True:
            self.post(BEATING)
            await asyncio.sleep(BEAT)

    def close(self) -> None:
        self._writer.close()


class Places:
    """At most `capacity` connections that have not proved the secret. When all places are taken, a
    new connection takes that of the oldest one from the address that has the most."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._addresses: dict[asyncio.StreamWriter, str] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, writer: asyncio.StreamWriter) -> None:
        """Take a place; closes the connection that loses it."""
        if len(self._addresses) >= self._capacity:
            counts = Counter(self._addresses.values())
            largest = max(counts.values())
            loser = next(each for each, address in self._addresses.items() if counts[address] == largest)
            del self._addresses[loser]
            loser.transport.abort()
        self._addresses[writer] = str((writer.get_extra_info("peername") or ("",))[0])

    def discard(self, writer: asyncio.StreamWriter) -> None:
        """Free the place of a connection, if it has one."""
        self._addresses.pop(writer, None)


async def authenticate(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    secret: bytes,
    *,
    is_listener: bool,
    when_known: Callable[[], None] | None = None,
) -> Link:
    """Prove the secret to the other end, and have it proved. `when_known`: called by a listener
    after a first message that only a host with the secret can send first; another may repeat it.
    Raises LinkError, and the connection is then closed."""
    nonce, role = secrets.token_bytes(_NONCE), b"listener" if is_listener else b"node"
    other_role = b"node" if is_listener else b"listener"
    try:
        async with asyncio.timeout(HANDSHAKE):
            hello = _HELLO + nonce
            if not is_listener:
                writer.write(hello + _proof(secret, b"hello", nonce))
            other_hello = await reader.readexactly(len(hello))
            other = other_hello[len(_HELLO) :]
            nonces = (nonce, other) if is_listener else (other, nonce)
            if is_listener:
                await _check(reader, _proof(secret, b"hello", other))
                if when_known is not None:
                    when_known()
                writer.write(hello)
            else:  # the end that connects proves first
                writer.write(_proof(secret, role, *nonces))
            await _check(reader, _proof(secret, other_role, *nonces))
            if not other_hello.startswith(_HELLO):
                raise LinkError("the other host has another version of frame")
            if is_listener:
                writer.write(_proof(secret, role, *nonces))
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
        writer.transport.abort()
        raise LinkError(f"the other host does not prove {KEY_VARIABLE}: {type(error).__name__}") from None
    except LinkError:
        writer.transport.abort()
        raise
    keys = _proof(secret, b"key " + role, *nonces), _proof(secret, b"key " + other_role, *nonces)
    return Link(reader, writer, keys)


async def _check(reader: asyncio.StreamReader, expected: bytes) -> None:
    if not hmac.compare_digest(await reader.readexactly(len(expected)), expected):
        raise LinkError(f"the other host does not have the same {KEY_VARIABLE}")


class SocketTunnel:
    """Unix sockets of a folder that a link carries: connections to `listen`ed names are opened on
    the other host, in its folder. `first`: number of the first connection, even on one host and odd
    on the other."""

    def __init__(self, link: Link, folder: Path, first: int) -> None:
        self._link, self._folder, self._next = link, folder, first
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []

    async def listen(self, name: str) -> None:
        """Take connections to the socket `name` of this host's folder."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel, self._next = self._next, self._next + 2
            self._writers[channel] = writer
            self._link.post(OPEN, channel, name.encode())
            await self._pump(channel, reader)

        self._servers.append(await asyncio.start_unix_server(accept, self._folder / name))

    async def handle(self, kind: int, channel: int, content: bytes, is_allowed: Callable[[str], bool]) -> None:
        """A frame of the kinds OPEN, DATA and CLOSE. `is_allowed`: names that the other host may
        open."""
        if kind == OPEN:
            name = content.decode("ascii", "replace")
            if not is_allowed(name):
                raise LinkError(f"the other host opens the socket {name[:40]!r}")
            try:
                reader, writer = await asyncio.open_unix_connection(self._folder / name)
            except OSError:  # not bound yet: the client of the socket tries again
                self._link.post(CLOSE, channel)
                return
            self._writers[channel] = writer
            task = asyncio.create_task(self._pump(channel, reader))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif (writer := self._writers.get(channel)) is not None:  # type: ignore[assignment]
            if kind == DATA:
                writer.write(content)
            else:
                self._writers.pop(channel).close()

    async def _pump(self, channel: int, reader: asyncio.StreamReader) -> None:
        """What a socket sends, to the other host."""
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                self._link.post(DATA, channel, data)
                await self._link.drain()
        if (writer := self._writers.pop(channel, None)) is not None:
            writer.close()
            self._link.post(CLOSE, channel)

    def close(self) -> None:
        """Close all sockets."""
        for server in self._servers:
            server.close()
        for writer in self._writers.values():
            writer.close()
        for task in self._tasks:
            task.cancel()


def _code(key: bytes, *messages: bytes) -> bytes:
    code = hmac.new(key, digestmod=hashlib.sha256)
    for message in messages:
        code.update(message)
    return code.digest()[:_CODE]


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.new(secret, b"|".join((role, *nonces)), hashlib.sha256).digest()

"""`MessageReader`: reads the messages of calls, bounded in number, bytes, time and fields.
`OpenReader`: the same for calls that need no key.

grpcio does not show a message before it is complete, and holds its bytes until then. So few
messages are read at once; what is not read waits in the client, which may send 64 KiB ahead. Must
not know a method.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from frame.entrypoints.engine_client.quotas import FairSemaphore
from frame.entrypoints.grpc.wire import check_fields, malformed
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import Bodies

MIN_READS = 4  # messages of a key that are read at once
MAX_OPEN_READS = 32  # of all clients without a key
OPEN_TIMEOUT = 5.0  # seconds for such a message
MAX_OPEN_BYTES = 4096  # of such a message
INLINE_BYTES = 4096  # of a message that is decoded on the event loop
NO_MESSAGE = "the call has no message; send one"


class MessageReader:
    """`bodies`: the pool that HTTP's bodies are in, too. `max_bytes`: of a message. `timeout`:
    seconds for a message. `num_keys`: the clients that share the server."""

    def __init__(self, bodies: Bodies, max_bytes: int, timeout: float, num_keys: int) -> None:
        self.max_sessions = max(2 * MIN_READS, bodies.maximum * 3 // (4 * max_bytes))  # calls that read messages all the time
        count = max(MIN_READS, bodies.maximum // (4 * max_bytes))
        self._bodies = bodies
        self._timeout = timeout
        self._reads = FairSemaphore(count)
        of_key = max(MIN_READS, count // max(1, num_keys))
        self._reads_of: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(of_key))  # by tenant
        self._decoding = FairSemaphore(1)

    async def read_only(self, context: Any, tenant: str, kind: Any) -> tuple[Any, int]:
        """(the message of a call that has one, the bytes of the pool that it holds). Raises
        ApiError."""
        async with self._reads_of[tenant], self._reads.hold_slot(tenant):
            try:
                async with asyncio.timeout(self._timeout):
                    data = await context.read()
            except TimeoutError:
                raise ApiError(408, f"the message did not come within {self._timeout:g} s; send the request again") from None
        if data is grpc.aio.EOF:
            raise ApiError(400, NO_MESSAGE)
        return await self.decode(data, tenant, kind)

    async def decode(self, data: bytes, tenant: str, kind: Any) -> tuple[Any, int]:
        """(the message, the bytes of the pool that it holds). Raises ApiError."""
        size, maximum = len(data), self._bodies.max_values
        self._bodies.take(size, tenant)
        try:
            if size <= INLINE_BYTES:
                return _decode(kind, data, maximum), size
            async with self._decoding.hold_slot(tenant):  # one at a time, so that others run between them
                return await asyncio.to_thread(_decode, kind, data, maximum), size
        except BaseException:
            self._bodies.give_back(size, tenant)
            raise

    def release(self, size: int, tenant: str) -> None:
        """Give the bytes of a tenant's message back to the pool."""
        self._bodies.give_back(size, tenant)


class OpenReader:
    """Reads small messages of clients without a key. Where too many are awaited, the oldest one's
    call ends: ordinary messages come at once."""

    def __init__(self) -> None:
        self._reads: dict[asyncio.Future[Any], None] = {}  # oldest first

    async def read(self, context: Any, kind: Any) -> Any:
        """The message, or None where it did not come. Raises ApiError."""
        if len(self._reads) >= MAX_OPEN_READS:
            next(iter(self._reads)).cancel()
        read = asyncio.ensure_future(context.read())
        self._reads[read] = None
        try:
            await asyncio.wait({read}, timeout=OPEN_TIMEOUT)
            if not read.done() or read.cancelled():
                raise ApiError(408, f"the message did not come within {OPEN_TIMEOUT:g} s; send it with the call")
        finally:
            del self._reads[read]
            read.cancel()
        data = read.result()
        if data is grpc.aio.EOF:
            raise ApiError(400, NO_MESSAGE)
        if len(data) > MAX_OPEN_BYTES:
            raise ApiError(413, f"the message has {len(data)} bytes; it may have {MAX_OPEN_BYTES}")
        return _decode(kind, data, MAX_OPEN_BYTES)


def _decode(kind: Any, data: bytes, max_values: int) -> Any:
    check_fields(kind, data, max_values)
    try:
        return kind.FromString(data)
    except DecodeError:
        raise malformed(kind) from None

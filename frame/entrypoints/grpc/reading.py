"""`MessageReader`: reads the messages of calls, bounded in number, bytes, time and fields.
`OpenReader`: the same for calls that need no key. `check_fields` counts the fields on a message's
bytes before they are decoded: an empty message or text takes two bytes on the wire and some hundred
as an object of Python.

grpcio does not show a message before it is complete, and holds its bytes until then. So few
messages are read at once; what is not read waits in the client, which may send 64 KiB ahead. Must
not know a method.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import grpc
import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from frame.entrypoints.engine_client.quotas import FairSemaphore
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import MAX_NODES, Bodies

MIN_READS = 4  # messages of a key that are read at once
MAX_OPEN_READS = 32  # of all clients without a key
OPEN_TIMEOUT = 5.0  # seconds for such a message
MAX_OPEN_BYTES = 4096  # of such a message
INLINE_BYTES = 4096  # of a message that is decoded on the event loop
NO_MESSAGE = "the call has no message; send one"
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5  # wire types
_MAX_VARINT = 10  # bytes
# Bytes of an element of a packed list, by its type; others have a variable length
_WIDTHS = {
    FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FIXED64: 8, FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_SFIXED32: 4,
}  # fmt: skip
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)

Fields = dict[int, Any]  # tag of a field with a length -> `Fields` of a message, or the width of an element (0: variable)


class MessageReader:
    """`bodies`: the pool that HTTP's bodies are in, too. `max_bytes`: of a message. `timeout`:
    seconds for a message. `num_keys`: the clients that share the server."""

    def __init__(self, bodies: Bodies, max_bytes: int, timeout: float, num_keys: int) -> None:
        self.max_sessions = max(2 * MIN_READS, bodies.maximum * 3 // (4 * max_bytes))  # calls that read messages all the time
        count = max(MIN_READS, bodies.maximum // (4 * max_bytes))
        self._bodies = bodies
        self._timeout = timeout
        self._reads = FairSemaphore(count)
        self._max_reads_of = max(MIN_READS, count // max(1, num_keys))
        self._reads_of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant with calls
        self._decoding = FairSemaphore(1)

    async def read_only(self, context: Any, tenant: str, kind: Any) -> tuple[Any, int]:
        """(the message of a call that has one, the bytes of the pool that it holds). Raises
        ApiError."""
        own = self._reads_of.setdefault(tenant, asyncio.Semaphore(self._max_reads_of))
        async with own, self._reads.hold_slot(tenant):
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
                await self._bodies.turns.take_turn(tenant, size)
                return _decode(kind, data, maximum), size
            async with self._decoding.hold_slot(tenant):  # one at a time, so that others run between them
                message = await asyncio.to_thread(_decode, kind, data, maximum)
            await self._bodies.turns.take_turn(tenant, size)  # the caller converts the message
            return message, size
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


def check_fields(kind: Any, data: bytes, max_values: int) -> None:
    """Raise ApiError 400 for a message of class `kind` with more than `MAX_NODES` fields, those of
    its messages included, or more than `max_values` elements of packed lists. Takes up to 20
    ms."""
    try:
        _Counter(data, max_values).count(_fields_of(kind.DESCRIPTOR), 0, len(data))
    except (IndexError, ValueError):
        raise malformed(kind) from None


def malformed(kind: Any) -> ApiError:
    return ApiError(400, f"the bytes are not a valid {kind.DESCRIPTOR.full_name} message; send what frame.proto describes")


class _Counter:
    """Counts what is left of both bounds. Raises IndexError or ValueError for bytes that are no
    message."""

    def __init__(self, data: bytes, max_values: int) -> None:
        self._data = data
        self._max_values = max_values
        self._fields_left = MAX_NODES
        self._values = max_values

    def count(self, fields: Fields, at: int, end: int) -> None:
        """Count the fields from `at` to `end`."""
        data = self._data
        while at < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise ApiError(400, f"the message holds more than {MAX_NODES} fields and list entries; send less at once")
            tag, at = data[at], at + 1
            if tag > 127:
                tag, at = self._read_varint(at - 1)
            kind = tag & 7
            if kind == _LENGTH:
                size, at = data[at], at + 1
                if size > 127:
                    size, at = self._read_varint(at - 1)
                if at + size > end:
                    raise ValueError("the field is longer than its message")
                if size and (inner := fields.get(tag)) is not None:
                    if isinstance(inner, dict):
                        self.count(inner, at, at + size)
                    else:
                        self._count_values(at, size, inner)
                at += size
            elif kind == _VARINT:
                at = self._read_varint(at)[1]
            elif kind in (_FIXED64, _FIXED32):
                at += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError("groups are not used")
        if at != end:
            raise ValueError("the last field is longer than its message")

    def _count_values(self, at: int, size: int, width: int) -> None:
        self._values -= size // width if width else int(np.count_nonzero(np.frombuffer(self._data, np.uint8, size, at) < 128))
        if self._values < 0:
            raise ApiError(400, f"the message holds more than {self._max_values} values; send less at once")

    def _read_varint(self, at: int) -> tuple[int, int]:
        """(the number that begins at `at`, where it ends)."""
        byte = self._data[at]
        if byte < 128:
            return byte, at + 1
        number = byte & 127
        for index in range(1, _MAX_VARINT):
            byte = self._data[at + index]
            number |= (byte & 127) << 7 * index
            if byte < 128:
                return number, at + index + 1
        raise ValueError("a number has more than 10 bytes")


@lru_cache(maxsize=256)  # more than frame.proto and the protocols of health and reflection have
def _fields_of(descriptor: Descriptor) -> Fields:
    """The fields of a message that may have a length, texts aside. frame.proto has no message that
    contains itself."""
    fields: Fields = {}
    for field in descriptor.fields:
        if field.message_type is not None:
            fields[field.number << 3 | _LENGTH] = _fields_of(field.message_type)
        elif field.type not in _TEXTS:
            fields[field.number << 3 | _LENGTH] = _WIDTHS.get(field.type, 0)
    return fields

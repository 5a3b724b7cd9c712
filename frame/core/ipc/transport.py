"""How messages move between processes and threads: in-process queues, or ZMQ over ipc:// sockets in a private directory.

Also the codec that carries a `ScheduledBatch` to the other ranks (MessagePack with an ndarray hook). Knows no scheduler, no HTTP and
no meaning of a message; nothing is ever pickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import zmq

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.runner import ProfileRequest
from frame.core.messages import AnyMessage, Message, decode, encode

log = logging.getLogger(__name__)

NOT_OURS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign bytes raises
LONGEST_SOCKET = "frame-12345678/tokenizer-63-out"  # the longest path below the folder of temporary files
FLUSH_MS = 2000  # how long a closing socket may still deliver what was sent


class Transport(Protocol):
    """One end of a two-way message stream. `send` never blocks for long; `receive` is called by one thread only."""

    def receive(self, timeout: float | None = 0.0) -> list[AnyMessage]:
        """Everything that has arrived, in order. Waits up to `timeout` seconds for the first message (None: for ever)."""
        ...

    def send(self, message: Message) -> None:
        """Queue one message for the other end."""
        ...

    def send_all(self, messages: Sequence[Message]) -> None:
        """Queue several; the other end may see them all at once."""
        ...

    def close(self) -> None:
        """Release sockets; what was sent is still delivered."""
        ...


class InProcessTransport:
    """One end of a pair of queues between two threads. Messages travel by reference: both ends treat them as frozen.

    With a `sink` the peer's messages are handed to it at once, in the peer's thread, instead of being queued.
    To send no message wakes the other end ahead of one that comes in a moment: who has slept for long takes a while to wake.
    """

    def __init__(self, sink: Callable[[AnyMessage], None] | None = None) -> None:
        self._inbox: deque[AnyMessage] = deque()
        self._arrived = threading.Event()
        self._sink = sink
        self._peer: InProcessTransport | None = None
        self._is_closed = False

    @classmethod
    def pair(cls, sink: Callable[[AnyMessage], None] | None = None) -> tuple[InProcessTransport, InProcessTransport]:
        """(this end, the other end); `sink` takes what the other end sends to this one."""
        first, second = cls(sink), cls()
        first._peer, second._peer = second, first
        return first, second

    def receive(self, timeout: float | None = 0.0) -> list[AnyMessage]:
        inbox = self._inbox
        while timeout != 0.0 and not inbox and not self._is_closed and self._arrived.wait(timeout):
            self._arrived.clear()  # before the inbox is looked at: a message that comes now sets it again
        messages = []
        while inbox:
            messages.append(inbox.popleft())
        return messages

    def send(self, message: Message) -> None:
        self.send_all((message,))

    def send_all(self, messages: Sequence[Message]) -> None:
        if self._peer is not None:
            self._peer.accept(messages)  # type: ignore[arg-type]

    def accept(self, messages: Sequence[AnyMessage]) -> None:
        """Take what the peer sends; in the peer's thread."""
        if self._sink is not None:
            for message in messages:
                self._sink(message)
        else:
            self._inbox.extend(messages)
            self._arrived.set()

    def close(self) -> None:
        self._is_closed = True
        self._arrived.set()


class ZmqTransport:
    """A PULL socket, bound to the inbox, and one PUSH socket an address that is sent to.

    With `sources`, addresses of other ends' outboxes, the PULL socket connects to these instead: libzmq ends a process that has no
    descriptor for a connection it accepts, and only tries again where it connects. With `is_outbox` the socket of `default` is bound.
    `routes` maps message types to addresses, `default` takes the rest (None: such messages are dropped). Messages to an address
    where nobody listens yet wait in memory until somebody does.
    """

    def __init__(
        self,
        inbox: str | None,
        default: str | None,
        routes: Mapping[type[Message], str] | None = None,
        *,
        sources: Sequence[str] = (),
        is_outbox: bool = False,
    ) -> None:
        self._context = zmq.Context(io_threads=1)
        self._pull = _pull(self._context, inbox, sources)
        pushes = {address: _push(self._context, address) for address in (routes or {}).values()}
        if default and default not in pushes:
            pushes[default] = _push(self._context, default, is_outbox)
        self._pushes = pushes
        self._default = pushes[default] if default else None
        self._routes = {kind: pushes[address] for kind, address in (routes or {}).items()}
        self._patience = -1
        self._lock = threading.Lock()  # sockets are not thread-safe; senders may be several threads

    @property
    def fd(self) -> int:
        """Becomes readable when messages arrive; edge-triggered, and `receive` takes all there is."""
        return int(self._pull.getsockopt(zmq.FD))

    def receive(self, timeout: float | None = 0.0) -> list[AnyMessage]:
        pull = self._pull
        messages: list[AnyMessage] = []
        if timeout != 0.0:  # a blocking receive costs less than a poller
            patience = -1 if timeout is None else max(1, int(timeout * 1000))
            if patience != self._patience:
                pull.setsockopt(zmq.RCVTIMEO, patience)
                self._patience = patience
            try:
                self._take(pull.recv(), messages)
            except zmq.Again:
                return []
        while int(pull.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # asking costs less than an exception at the end
            self._take(pull.recv(zmq.NOBLOCK), messages)
        return messages

    @staticmethod
    def _take(data: bytes, messages: list[AnyMessage]) -> None:
        """Decode what arrived. What is no message of ours is dropped: one wrong sender must not end a process that serves others."""
        try:
            messages.append(decode(data))
        except NOT_OURS as error:
            log.warning("%d bytes that arrived are no message, and are dropped: %s", len(data), error)

    def send(self, message: Message) -> None:
        with self._lock:
            socket = self._routes.get(type(message), self._default)
            if socket is not None:
                socket.send(encode(message))

    def send_all(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.send(message)

    def renew(self, address: str) -> None:
        """Somebody else will listen at `address`: drop what was not delivered there, and connect anew. Raises zmq.ZMQError, and changes
        nothing then."""
        with self._lock:
            old = self._pushes.get(address)
            if old is None:
                return
            new = self._pushes[address] = _push(self._context, address)
            old.close(linger=0)
            self._default = new if self._default is old else self._default
            self._routes = {kind: new if socket is old else socket for kind, socket in self._routes.items()}

    def close(self) -> None:
        self._pull.close(linger=0)
        for socket in self._pushes.values():
            socket.close()
        self._context.term()


class ZmqSender:
    """A PUSH socket alone, to one address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context(io_threads=1)
        self._socket = _push(self._context, address)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def renew(self) -> None:
        """Somebody else will listen: drop what was not delivered, and connect anew. Raises zmq.ZMQError, and changes nothing then."""
        new = _push(self._context, self._address)
        self._socket.close(linger=0)
        self._socket = new

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _push(context: zmq.Context[zmq.Socket[bytes]], address: str, is_bound: bool = False) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PUSH)
    try:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, FLUSH_MS)
        socket.bind(address) if is_bound else socket.connect(address)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def _pull(context: zmq.Context[zmq.Socket[bytes]], address: str | None, sources: Sequence[str] = ()) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    if address is not None:
        socket.bind(address)
    for source in sources:
        socket.connect(source)
    return socket


# ScheduledBatch to the other ranks ---------------------------------------------------------------------------------


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, np.ascontiguousarray(value).data.cast("B") if value.size else b"")
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot cross to another rank")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot come from another rank")
    dtype, shape, data = value
    parsed = np.dtype(dtype)
    if parsed.hasobject:
        raise TypeError(f"dtype {dtype} is not plain data")
    return np.frombuffer(data, dtype=parsed).reshape(shape).copy()


_batch_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_batch_decoder = msgspec.msgpack.Decoder(ScheduledBatch, dec_hook=_decode_array)


def encode_batch(batch: ScheduledBatch) -> bytes:
    """The batch as MessagePack; an array is (dtype, shape, raw bytes)."""
    return _batch_encoder.encode(batch)


def decode_batch(data: bytes) -> ScheduledBatch:
    """The batch that `data` holds, with arrays of its own. Raises msgspec.ValidationError."""
    return _batch_decoder.decode(data)


class Profile(msgspec.Struct, frozen=True, tag=True):
    """An order to the followers: start recording, or (None) stop."""

    request: ProfileRequest | None


class Traced(msgspec.Struct, frozen=True, tag=True):
    """Word to the followers that a request has ended whose spans go below `trace`, a W3C traceparent."""

    rid: str
    trace: str


class SwitchBackend(msgspec.Struct, frozen=True, tag=True):
    """An order to the followers: `ModelRunner.switch_backend`."""


class OrderReply(msgspec.Struct, frozen=True):
    """A follower's answer to order `number`: `error` is a sentence, empty when the order was carried out."""

    rank: int
    number: int
    error: str = ""


Order = Profile | Traced | SwitchBackend
BATCH, ORDER = b"batch", b"order"  # the second frame of what rank 0 sends; the first is the data, the third an order's number
REPLY_TIMEOUT = 30.0  # seconds that a follower may take for an order that is answered
_order_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_reply_decoder = msgspec.msgpack.Decoder(OrderReply)


class BatchSender:
    """Rank 0's side: the same bytes to every follower (ranks 1 and on), in order. A single empty frame means stop. Followers answer at
    the address `replies`."""

    def __init__(self, addresses: list[str], replies: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._sockets = [_push(self._context, address) for address in addresses]
        self._replies = _pull(self._context, replies)
        self._number = 0

    def send(self, batch: ScheduledBatch) -> None:
        self._send_all(encode_batch(batch), BATCH)

    def send_order(self, order: Order) -> None:
        """What else the followers are to know, between the batches."""
        self._number += 1
        self._send_all(_order_encoder.encode(order), ORDER, str(self._number).encode())

    def ask(self, order: Order, timeout: float = REPLY_TIMEOUT) -> list[str]:
        """Send an order and wait until every follower has carried it out. -> what failed, a sentence a rank."""
        self.send_order(order)
        silent, problems, until = set(range(1, len(self._sockets) + 1)), [], time.monotonic() + timeout
        while silent and self._replies.poll(max(0, int(1000 * (until - time.monotonic())))):
            data = self._replies.recv()
            try:
                reply = _reply_decoder.decode(data)
            except NOT_OURS as error:
                log.warning("%d bytes that arrived are no reply, and are dropped: %s", len(data), error)
                continue
            if reply.number == self._number and reply.rank in silent:
                silent.remove(reply.rank)
                problems += [f"rank {reply.rank}: {reply.error}"] if reply.error else []
        return problems + [f"rank {rank} did not answer within {timeout:g} s" for rank in sorted(silent)]

    def close(self) -> None:
        """Tell the followers to stop."""
        self._send_all(b"")
        for socket in self._sockets:
            socket.close()
        self._replies.close(linger=0)
        self._context.term()

    def _send_all(self, *frames: bytes) -> None:
        for socket in self._sockets:
            socket.send_multipart(frames)


class BatchReceiver:
    """The side of follower `rank`."""

    def __init__(self, address: str, rank: int, replies: str) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = _pull(self._context, address)
        self._replies = _push(self._context, replies)
        self._rank = rank
        self._number = 0  # of the last order

    def receive(self) -> ScheduledBatch | Order | None:
        """Block for the next batch or order; None when rank 0 stops.

        Bytes that do not look like rank 0's are dropped. A batch or an order of rank 0 that cannot be decoded raises RuntimeError: rank 0
        would wait in a collective operation for this rank, so the process must end.
        """
        while True:
            data, *rest = self._socket.recv_multipart()
            if not data and not rest:
                return None
            try:
                if rest == [BATCH]:
                    return decode_batch(data)
                if len(rest) == 2 and rest[0] == ORDER:
                    self._number = int(rest[1])
                    return _order_decoder.decode(data)
            except (*NOT_OURS, ValueError, TypeError) as error:
                raise RuntimeError(f"what rank 0 sent cannot be decoded, and this rank cannot go on without it: {error}") from error
            log.warning("%d bytes that arrived are no batch, and are dropped", len(data))

    def reply(self, error: str = "") -> None:
        """Tell rank 0 that the last order was carried out, or why not."""
        self._replies.send(msgspec.msgpack.encode(OrderReply(self._rank, self._number, error)))

    def close(self) -> None:
        self._socket.close(linger=0)
        self._replies.close()
        self._context.term()


# addresses ---------------------------------------------------------------------------------------------------------


class SocketDirectory:
    """A 0700 directory that holds one deployment's ipc:// sockets; removed at the end. Whoever makes it holds a lock on it, for which
    systemd-tmpfiles leaves it alone. Raises OSError."""

    def __init__(self, path: str | None = None) -> None:
        self.path = _make_directory() if path is None else Path(path)
        self._owned = path is None
        self._lock: int | None = None
        self._check()

    def restore(self) -> None:
        """Make the directory again, with the same name, if a cleaner removed it. Raises OSError, also when it is somebody else's now."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700, parents=True)
            self._release()
        self._check()

    def address(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        """Delete the sockets and the directory, if this object made it."""
        self._release()
        if self._owned:
            shutil.rmtree(self.path, ignore_errors=True)

    def _check(self) -> None:
        found = self.path.stat()
        if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != os.getuid():
            raise PermissionError(f"{self.path} must belong to this user alone (mode 0700); sockets in it would be open to others")
        if self._owned and self._lock is None:
            with contextlib.suppress(OSError):  # a file system without locks
                self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make_directory() -> Path:
    """A new directory where temporary files go, or, if that name is too long for sockets, in $XDG_RUNTIME_DIR or /tmp."""
    bases = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]  # noqa: S108 - made with mkdtemp
    for base in filter(None, bases):
        if len(os.fsencode(f"{base}/{LONGEST_SOCKET}")) <= zmq.IPC_PATH_MAX_LEN and Path(base).is_dir():
            return Path(tempfile.mkdtemp(prefix="frame-", dir=base))
    raise OSError(f"{bases[0]} is too long a name for a folder of sockets, and there is no /tmp")

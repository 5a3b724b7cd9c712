"""Transports of messages between processes and threads: in-process queues, or ZMQ over ipc://
sockets in a private directory.

Nothing is pickled. It must not know the scheduler, HTTP or the meaning of a message.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import zmq

from frame.core.messages import AnyMessage, Message, decode, encode

log = logging.getLogger(__name__)

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding arbitrary bytes may raise
MAX_RECEIVED = 1 << 20  # bytes of messages after which `receive` returns before it has all of them
FLUSH_MS = 2000  # how long a closing socket may still deliver sent messages


class Transport(Protocol):
    """One end of a two-way message stream. `send` does not block for long; `receive` is called by
    one thread only."""

    def receive(self, timeout: float | None = 0.0) -> list[AnyMessage]:
        """Return messages that have arrived, in order: all, or the first ones where they are large.
        Waits up to `timeout` seconds for the first one (None: without limit)."""
        ...

    def send(self, message: Message) -> None:
        """Queue one message for the other end."""
        ...

    def send_all(self, messages: Sequence[Message]) -> None:
        """Queue several messages; the other end may receive them together."""
        ...

    def close(self) -> None:
        """Release the sockets; messages already sent are still delivered."""
        ...


class InProcessTransport:
    """One end of a pair of queues between two threads. Messages are passed by reference: neither
    end may change them.

    With a `sink`, the peer's messages are passed to it at once, in the peer's thread, instead of
    being queued. Sending an empty list of messages wakes the other end in advance: a thread that
    has slept for long takes a while to wake.
    """

    def __init__(self, sink: Callable[[AnyMessage], None] | None = None) -> None:
        self._inbox: deque[AnyMessage] = deque()
        self._arrived = threading.Event()
        self._sink = sink
        self._peer: InProcessTransport | None = None
        self._is_closed = False

    @classmethod
    def pair(cls, sink: Callable[[AnyMessage], None] | None = None) -> tuple[InProcessTransport, InProcessTransport]:
        """Make (this end, the other end); `sink` is called with what the other end sends here."""
        first, second = cls(sink), cls()
        first._peer, second._peer = second, first
        return first, second

    def receive(self, timeout: float | None = 0.0) -> list[AnyMessage]:
        inbox = self._inbox
        while timeout != 0.0 and not inbox and not self._is_closed and self._arrived.wait(timeout):
            self._arrived.clear()  # before the inbox is read: a message that arrives now sets it again
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
        """Deliver the peer's messages; called in the peer's thread."""
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
    """A PULL socket bound to the inbox, and a PUSH socket for each address that is sent to.

    `routes` maps message types to addresses; other messages go to `default` (None: they are
    dropped). Messages to an address without a listener wait in memory. With `sources`, addresses of
    other ends' outboxes, the PULL socket connects to these instead of binding: libzmq aborts a
    process that has no file descriptor left for a connection that it accepts, but retries where it
    connects. With `is_outbox` the socket of `default` is bound.
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
        self._pull = open_pull(self._context, inbox, sources)
        pushes = {address: open_push(self._context, address) for address in (routes or {}).values()}
        if default and default not in pushes:
            pushes[default] = open_push(self._context, default, is_outbox)
        self._pushes = pushes
        self._default = pushes[default] if default else None
        self._routes = {kind: pushes[address] for kind, address in (routes or {}).items()}
        self._timeout_ms = -1
        self._lock = threading.Lock()  # sockets are not thread-safe; senders may be several threads

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when messages arrive; edge-triggered: `receive` must
        be called until it is empty."""
        return int(self._pull.getsockopt(zmq.FD))

    def receive(self, timeout: float | None = 0.0) -> list[AnyMessage]:
        pull = self._pull
        messages: list[AnyMessage] = []
        if timeout != 0.0:  # a blocking receive costs less than a poller
            timeout_ms = -1 if timeout is None else max(1, int(timeout * 1000))
            if timeout_ms != self._timeout_ms:
                pull.setsockopt(zmq.RCVTIMEO, timeout_ms)
                self._timeout_ms = timeout_ms
            try:
                self._append_decoded(pull.recv(), messages)
            except zmq.Again:
                return []
        size = 0
        while size < MAX_RECEIVED and int(pull.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # costs less than an exception at the end
            data = pull.recv(zmq.NOBLOCK)
            self._append_decoded(data, messages)
            size += len(data) if messages else 0
        return messages

    @staticmethod
    def _append_decoded(data: bytes, messages: list[AnyMessage]) -> None:
        """Decode one message. Bytes that are no message are dropped: a faulty sender must not end a
        process that serves others."""
        try:
            messages.append(decode(data))
        except DECODE_ERRORS as error:
            log.warning("dropped %d received bytes that are no message: %s", len(data), error)

    def send(self, message: Message) -> None:
        with self._lock:
            socket = self._routes.get(type(message), self._default)
            if socket is not None:
                socket.send(encode(message))

    def send_all(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.send(message)

    def reconnect(self, address: str) -> None:
        """Connect to a new listener at `address`, and drop messages that were not delivered to the
        old one. Raises zmq.ZMQError, without any change."""
        with self._lock:
            old = self._pushes.get(address)
            if old is None:
                return
            new = self._pushes[address] = open_push(self._context, address)
            old.close(linger=0)
            self._default = new if self._default is old else self._default
            self._routes = {kind: new if socket is old else socket for kind, socket in self._routes.items()}

    def close(self) -> None:
        self._pull.close(linger=0)
        for socket in self._pushes.values():
            socket.close()
        self._context.term()


class ZmqSender:
    """A PUSH socket to one address."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = zmq.Context(io_threads=1)
        self._socket = open_push(self._context, address)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def reconnect(self) -> None:
        """Connect to a new listener, and drop messages that were not delivered to the old one.
        Raises zmq.ZMQError, without any change."""
        new = open_push(self._context, self._address)
        self._socket.close(linger=0)
        self._socket = new

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def open_push(context: zmq.Context[zmq.Socket[bytes]], address: str, is_bound: bool = False) -> zmq.Socket[bytes]:
    """A socket that sends; `is_bound`: it listens at the address. Raises zmq.ZMQError."""
    socket = context.socket(zmq.PUSH)
    try:
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, FLUSH_MS)
        socket.bind(address) if is_bound else socket.connect(address)
    except BaseException:
        socket.close(linger=0)
        raise
    return socket


def open_pull(context: zmq.Context[zmq.Socket[bytes]], address: str | None, sources: Sequence[str] = ()) -> zmq.Socket[bytes]:
    """A socket that listens at the address, and receives from listening `sources`."""
    socket = context.socket(zmq.PULL)
    socket.set_hwm(0)
    if address is not None:
        socket.bind(address)
    for source in sources:
        socket.connect(source)
    return socket

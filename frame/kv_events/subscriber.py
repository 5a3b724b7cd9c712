"""`EventReader`: one thread that reads the KV events of servers, and keeps what their caches hold.

A `Subscription` is the caches of one server. It is live while its index is what the events told:
without a gap that no replay has filled, and while the server sends what can be read. A server that
sends something else, or more than a share of this thread, is left alone for a while. Used by the
router, whose event loop reads the indexes while the thread writes them. Must not know a prompt or
how replicas are chosen.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from frame.kv_events.publisher import END, MEDIUM_GPU, offset_endpoint

log = logging.getLogger(__name__)

TICK = 0.05  # seconds between two looks at the sockets
MAX_MESSAGE = 2 << 20  # bytes; ZMQ ends the connection of a server that sends more
MAX_WAITING = 16  # messages that ZMQ keeps for each socket
TURN = 0.1  # seconds of this thread that the messages of a cache get at once
MAX_BLOCKS = 1 << 22  # blocks of all servers together, about 500 MB; those beyond a server's part are not known
SHARE, BURST = 0.05, 2.0  # of this thread's time, that a server may take; seconds that it may take at once
REPLAY_TIME = 10.0  # seconds until the next message of a replay
FIRST_PAUSE, MAX_PAUSE = 1.0, 300.0  # seconds until a server that failed is tried again
GPU, OTHER = 1, 2  # bits of an index: the media that hold a block


class _Event(msgspec.Struct, gc=False):
    block_hashes: list[int]
    medium: str | None = None


class _Stored(_Event, tag="BlockStored"):
    pass


class _Removed(_Event, tag="BlockRemoved"):
    pass


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


_decoder = msgspec.msgpack.Decoder(_Batch)


class EventsError(Exception):
    """A server sends what is no series of events."""


class CacheIndex:
    """The blocks of one cache: `blocks` has the media of each by its hash."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.next = 0  # number of the next batch

    def apply(self, number: int, data: bytes, limit: int) -> None:
        """The events of the next batch. Blocks beyond `limit` are not kept. Raises EventsError."""
        try:
            batch = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EventsError(f"batch {number} is invalid: {error}") from None
        blocks = self.blocks
        for event in batch.events:
            if isinstance(event, _Cleared):
                self.clear()
                blocks = self.blocks
                continue
            medium = GPU if event.medium in (MEDIUM_GPU, None) else OTHER
            if isinstance(event, _Stored):
                for name in event.block_hashes:
                    if name in blocks or len(blocks) < limit:
                        blocks[name] = blocks.get(name, 0) | medium
                continue
            for name in event.block_hashes:
                left = blocks.get(name, 0) & ~medium
                if left:
                    blocks[name] = left
                else:
                    blocks.pop(name, None)
        self.next = number + 1

    def clear(self) -> None:
        self.blocks = {}  # a dict that was cleared would keep its size


class Subscription:
    """The caches of one server, with an endpoint each. `replay_endpoint`: "" without one."""

    def __init__(self, endpoint: str, replay_endpoint: str, num_caches: int) -> None:
        self.name = endpoint
        self._readers = [
            CacheReader(offset_endpoint(endpoint, rank), offset_endpoint(replay_endpoint, rank) if replay_endpoint else "")
            for rank in range(num_caches)
        ]
        self._spent, self._counted = 0.0, time.monotonic()
        self._num_failures, self._paused_until = 0, 0.0
        self.is_closed = False

    @property
    def is_live(self) -> bool:
        """Whether `indexes` are what the caches hold."""
        return not self.is_closed and all(each.is_live for each in self._readers)

    @property
    def indexes(self) -> list[dict[int, int]]:
        """The blocks of each cache."""
        return [each.index.blocks for each in self._readers]

    def turn(self, context: zmq.Context[zmq.Socket[bytes]], now: float, limit: int) -> None:
        """Read what has come."""
        if now < self._paused_until:
            return
        began = time.thread_time()
        try:
            for each in self._readers:
                each.turn(context, now, limit)
            self._spent = max(0.0, self._spent - SHARE * (now - self._counted)) + time.thread_time() - began
            self._counted = now
            if self._spent > BURST:
                self._spent = 0.0
                raise EventsError("it sends more events than are read")
        except Exception as error:  # noqa: BLE001 - others are read whatever one sends
            self._num_failures = 0 if now > self._paused_until + MAX_PAUSE else self._num_failures
            pause = min(MAX_PAUSE, FIRST_PAUSE * 4**self._num_failures)
            self._num_failures += 1
            self._paused_until = now + pause
            (log.warning if self._num_failures == 1 else log.debug)("KV events of %s are not read for %g s: %s", self.name, pause, error)
            self.release()

    def release(self) -> None:
        """Close the sockets, and forget what the caches hold."""
        for each in self._readers:
            each.close()


class CacheReader:
    """The events of one cache. After a connection is made, and after a gap, it asks for a replay;
    live messages wait meanwhile. Without a replay endpoint the index then begins empty: it holds
    too little, never too much."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._endpoint, self._replay_endpoint = endpoint, replay_endpoint
        self.index = CacheIndex()
        self.is_live = False
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None
        self._deadline = 0.0  # of the replay
        self._asked = 0  # its first number
        self._may_repeat = False  # whether live messages may be those of the replay

    def turn(self, context: zmq.Context[zmq.Socket[bytes]], now: float, limit: int) -> None:
        """Read what has come. Raises EventsError, ZMQError."""
        if self._socket is None or self._monitor is None:
            self._open(context)
            return
        until = time.thread_time() + TURN
        while _has_message(self._monitor):
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_DISCONNECTED:
                self.close()  # messages of the lost connection may wait in the socket
                return
            self._synchronize(context, now, 0)
        while time.thread_time() < until:
            source = self._socket if self._replay is None else self._replay
            if not _has_message(source):
                if self._replay is not None and now > self._deadline:
                    self._end_replay(is_whole=False)
                return
            frames = source.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != 8:
                raise EventsError(f"a message has {len(frames)} frames without a number")
            if self._replay is not None:
                self._take_replayed(frames[-2], frames[-1], now, limit)
            else:
                self._take(context, int.from_bytes(frames[-2], "big"), frames[-1], now, limit)

    def close(self) -> None:
        """Close the sockets; the content is unknown."""
        self.is_live = False
        self.index.clear()
        if self._socket is not None:
            self._socket.disable_monitor()
        for socket in (self._socket, self._monitor, self._replay):
            if socket is not None:
                socket.close(0)
        self._socket = self._monitor = self._replay = None

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = _open_socket(context, zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._socket.connect(self._endpoint)

    def _synchronize(self, context: zmq.Context[zmq.Socket[bytes]], now: float, first: int) -> None:
        """Ask for all batches from a number on."""
        if not first:
            self.index.clear()
        self._asked = self.index.next = first
        if not self._replay_endpoint:
            self._end_replay(is_whole=False)
            return
        if self._replay is not None:
            self._replay.close(0)
        self._replay, self._deadline = _open_socket(context, zmq.DEALER), now + REPLAY_TIME
        self._replay.connect(self._replay_endpoint)
        self._replay.send(first.to_bytes(8, "big"), zmq.NOBLOCK)

    def _take_replayed(self, name: bytes, data: bytes, now: float, limit: int) -> None:
        if name == END:
            self._end_replay(is_whole=self.index.next > self._asked)
            return
        number, index = int.from_bytes(name, "big"), self.index
        if number > index.next and index.next == self._asked:  # earlier ones are not kept any more
            index.clear()
        elif number != index.next:
            raise EventsError(f"batch {number} was sent in place of {index.next}")
        index.apply(number, data, limit)
        self._deadline = now + REPLAY_TIME

    def _end_replay(self, *, is_whole: bool) -> None:
        """Live messages follow. Not `is_whole`: any number may be the next one."""
        if self._replay is not None:
            self._replay.close(0)
            self._replay = None
        if not is_whole:
            self.index.clear()
            self.index.next = -1
        self.is_live, self._may_repeat = True, is_whole

    def _take(self, context: zmq.Context[zmq.Socket[bytes]], number: int, data: bytes, now: float, limit: int) -> None:
        """A live message."""
        index = self.index
        if number < index.next and self._may_repeat:
            return
        if number and index.next >= 0 and number != index.next:
            if number < index.next:
                if self._monitor is not None and _has_message(self._monitor):
                    return  # the connection was lost
                raise EventsError(f"batch {number} came after {index.next - 1}")
            self._synchronize(context, now, index.next)
            if self._replay is not None:
                return  # it is repeated
        if not number:  # the publisher has begun again
            index.clear()
        self._may_repeat = False
        index.apply(number, data, limit)


class EventReader:
    """Reads the events of many servers. Its thread begins with the first one."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def subscribe(self, endpoint: str, replay_endpoint: str, num_caches: int) -> Subscription:
        """Follow the caches of a server."""
        subscription = Subscription(endpoint, replay_endpoint, num_caches)
        with self._lock:
            self._subscriptions.add(subscription)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-event-reader", daemon=True)
            self._thread.start()
        return subscription

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 1 << 14)
        try:
            while not self._closed.wait(TICK):
                try:
                    self._turn(context)
                except Exception:  # the thread must live on
                    log.exception("KV events could not be read")
        finally:
            context.destroy(linger=0)

    def _turn(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with self._lock:
            subscriptions = list(self._subscriptions)
        limit = MAX_BLOCKS // max(1, sum(len(each.indexes) for each in subscriptions))
        for each in subscriptions:
            if each.is_closed:
                each.release()
                with self._lock:
                    self._subscriptions.discard(each)
                continue
            each.turn(context, time.monotonic(), limit)


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    return bool(socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[arg-type, operator]


def _open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    for option, value in (
        (zmq.RCVHWM, MAX_WAITING), (zmq.MAXMSGSIZE, MAX_MESSAGE), (zmq.LINGER, 0), (zmq.IPV6, 1), (zmq.RECONNECT_IVL, 200),
        (zmq.RECONNECT_IVL_MAX, 5000), (zmq.HEARTBEAT_IVL, 10_000), (zmq.HEARTBEAT_TIMEOUT, 30_000),
    ):  # fmt: skip
        socket.setsockopt(option, value)
    return socket

"""Events of the prefix cache on ZMQ, in the format of vLLM (`vllm/distributed/kv_events.py`): the
structures, and `KVEventPublisher`, which sends them and repeats them after a gap.

A message has three frames: the topic, a sequence number (8 bytes, big-endian, from 0 at each
start) and an `EventBatch` as MessagePack. A request for a replay is a first number; the reply is
every kept batch from it on, and then the number -1. Used by `frame.kv_events.cache_events`,
whose thread owns the sockets. Must not know a cache.
"""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq

from frame.core.errors import ConfigurationError

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
MAX_KEPT_BYTES = 64 << 20  # of the batches that are kept for replays
MAX_REQUEST = 256  # bytes of a request for a replay
MEDIUM_GPU = "GPU"  # vLLM's name of the device, whichever it is


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of some steps, in order. ts: Unix time in seconds."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Consecutive blocks of one sequence are in the cache. `extra_keys`: for each block, what
    besides its tokens and its parent tells it from others."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks have left the cache."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """The cache is empty. The first event of each start."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Where events go. `rank`: of the cache among those of the server; it is added to ports."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000  # batches that are kept for replays
    hwm: int = 100_000  # messages that wait for a subscriber
    layout: Literal["map", "array"] = "map"
    rank: int = 0


def offset_endpoint(endpoint: str, rank: int) -> str:
    """The endpoint of a rank, as vLLM has it: its port is higher by the rank."""
    base, colon, port = endpoint.rpartition(":")
    if not rank:
        return endpoint
    return f"{base}{colon}{int(port) + rank}" if endpoint.startswith("tcp:") else f"{endpoint}_dp{rank}"


def is_bound(endpoint: str) -> bool:
    """Whether the publisher binds an endpoint; else it connects to it, as vLLM decides too."""
    return "*" in endpoint or "::" in endpoint or re.match(r"ipc:|inproc:|tcp://(127\.|localhost:)", endpoint) is not None


def as_array(event: Event) -> list[Any]:
    """An event as vLLM before 0.24 wrote it: without the names of the fields."""
    return [type(event).__name__, *msgspec.structs.astuple(event)]


class KVEventPublisher:
    """Raises ConfigurationError where an address cannot be used. After the construction, one thread
    calls all methods."""

    def __init__(self, settings: EventSettings) -> None:
        self._settings = settings
        self._topic = settings.topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._socket = self._open(zmq.PUB, "cache.events_endpoint", settings.endpoint, binds=is_bound(settings.endpoint))
            if settings.replay_endpoint is not None:
                self._replay = self._open(zmq.ROUTER, "cache.events_replay_endpoint", settings.replay_endpoint, binds=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _open(self, kind: int, key: str, endpoint: str, *, binds: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(self._settings.hwm)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST)  # of what is received
        address = offset_endpoint(endpoint, self._settings.rank)
        try:
            (socket.bind if binds else socket.connect)(address)
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigurationError(f"{key} {address} cannot be used ({error}); choose another address") from error
        return socket

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch."""
        is_map = self._settings.layout == "map"
        batch = EventBatch(time.time(), list(events) if is_map else list(map(as_array, events)), self._settings.rank)
        data, number = self._encoder.encode(batch), self._next
        self._next += 1
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), data))
        self._kept.append((number, data))
        self._kept_bytes += len(data)
        while len(self._kept) > self._settings.buffer_steps or self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def answer_replays(self) -> None:
        """Answer the requests for replays that have arrived."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) < 2 or len(frames[-1]) != 8:
                log.debug("a request for a replay of KV events is malformed")
                continue
            *route, first = frames
            start = int.from_bytes(first, "big")
            for number, data in self._kept:
                if number >= start:
                    self._replay.send_multipart((*route, number.to_bytes(8, "big"), data))
            self._replay.send_multipart((*route, END, b""))

    def close(self) -> None:
        self._context.destroy(linger=1000)

"""KV events against a subscriber that is written from vLLM's structures: its index equals the tree
of the prefix cache after many random events, after a gap, and after a restart."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from frame.core.errors import ConfigurationError
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.request_slots import RequestTable
from frame.kv_events.cache_events import CacheEvents, hash_block, hash_root
from frame.kv_events.publisher import EventSettings, KVEventPublisher, as_array, is_bound, offset_endpoint
from frame.plugins.eviction_guard import GuardedEvictionPolicy
from frame.plugins.eviction_policies.lru import Lru
from frame.plugins.prefix_caches.radix import RadixCache
from frame.testing.page_allocators import make_allocator

PAGE, PAGES = 4, 200


# vLLM's structures, of its main branch (maps in an array) -----------------------------------------


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


class KVEventBatch(VllmBatch):
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class Index:
    """What a router learns: block hash -> the tokens from the root, with the salt."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Any, ...]] = {}
        self.next = 0
        self.num_events = 0

    def receive(self, number: int, payload: bytes) -> None:
        assert number == self.next
        self.next += 1
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        assert batch.data_parallel_rank == 0 and abs(batch.ts - time.time()) < 60
        for event in batch.events:
            self.num_events += 1
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                assert event.medium == "GPU"
                for name in event.block_hashes:
                    del self.blocks[name]  # a KeyError: it was never stored, or removed twice
            else:
                assert (event.block_size, event.medium) == (PAGE, "GPU")
                assert len(event.token_ids) == PAGE * len(event.block_hashes)
                path = () if event.parent_block_hash is None else self.blocks[event.parent_block_hash]
                for place, name in enumerate(event.block_hashes):
                    extra = event.extra_keys[place] if event.extra_keys else None
                    path = (*path, (tuple(event.token_ids[place * PAGE : (place + 1) * PAGE]), extra))
                    assert name not in self.blocks
                    self.blocks[name] = path


class Rig:
    """A manager whose cache is published."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.endpoints = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
        policy = GuardedEvictionPolicy(Lru(None))
        self.cache = RadixCache(PrefixCacheContext(PAGE, PAGES, policy))
        self.manager = KVCacheManager(RequestTable(4, 16), self.cache, make_allocator(PAGES), PAGE)
        max_waiting = settings.pop("max_waiting", 100_000)
        self.publisher = KVEventPublisher(EventSettings(*self.endpoints, topic="kv@pod@model", **settings))
        self.events = self.manager.events = CacheEvents(self.publisher, self.manager.num_token_pages, PAGE, max_waiting)

    def insert(self, tokens: list[int], space: str = "") -> None:
        """As a request does that computed all its pages anew, or shares those that are cached."""
        keys = np.array(tokens, np.int32)
        match = self.cache.match(keys, space)
        self.cache.lock(match.handle)
        shared = len(match.pages) if random.random() < 0.7 else 0
        pages = self.manager.allocate_pages(len(keys) // PAGE - shared)
        if pages is not None:
            row = np.concatenate((match.pages[:shared], pages))
            inserted = self.manager.insert_prefix(keys, row, space, 0)
            duplicates = row[shared : inserted.num_cached // PAGE]
            self.manager.allocator.free(duplicates)
        self.cache.unlock(match.handle)

    def tree(self) -> set[tuple[Any, ...]]:
        """The paths of all cached blocks."""
        found = set()
        for space, root in self.cache._roots.items():
            stack = [(root, ())]
            while stack:
                node, path = stack.pop()
                for page in node.key.reshape(-1, PAGE).tolist():
                    path = (*path, (tuple(page), self.salt(space) if not path else None))
                    found.add(path)
                stack.extend((child, path) for child in node.children.values())
        return found

    @staticmethod
    def salt(space: str) -> Any:
        from hashlib import blake2b

        return (f"space-{blake2b(space.encode(), digest_size=16).hexdigest()}",) if space else None


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def subscribe(context: zmq.Context, rig: Rig) -> zmq.Socket:
    socket = context.socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, "kv@")
    socket.connect(rig.endpoints[0])
    return socket


def replay(context: zmq.Context, rig: Rig, index: Index) -> None:
    """As vLLM's example of a subscriber fills a gap, with a DEALER."""
    socket = context.socket(zmq.DEALER)
    socket.connect(rig.endpoints[1])
    socket.send_multipart((b"", index.next.to_bytes(8, "big")))
    while True:
        assert socket.poll(10_000)
        empty, number, payload = socket.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            break
        index.receive(int.from_bytes(number, "big"), payload)
    socket.close(linger=0)


@pytest.mark.slow
def test_the_index_equals_the_tree(tmp_path: Path, context: zmq.Context) -> None:
    rig, index = Rig(tmp_path), Index()
    socket = subscribe(context, rig)
    random.seed(0)
    gaps = changes = 0

    def read() -> None:
        nonlocal gaps
        while socket.poll(100):
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv@pod@model"
            place = int.from_bytes(number, "big")
            if place > index.next or (place == index.next and random.random() < 0.2):  # the first ones, and some that are lost
                gaps += 1
                replay(context, rig, index)
            if place == index.next:
                index.receive(place, payload)

    for turn in range(30):
        for _ in range(250):
            changes += 1
            start = random.choice((1, 1000, 2000))
            length = random.randrange(PAGE, 12 * PAGE)
            tokens = [start + i if random.random() < 0.97 else random.randrange(5000, 9000) for i in range(length)]
            rig.insert(tokens, random.choice(("", "", "tenant:salt", "other:")))
        if turn % 10 == 9:
            rig.manager.allocator.free(rig.manager.evict_prefixes())
        read()
        time.sleep(0.06)
        read()
        assert set(index.blocks.values()) == rig.tree()
    assert index.num_events > 3000 and gaps > 3
    rig.events.close()


def test_a_restart_begins_with_an_empty_cache(tmp_path: Path, context: zmq.Context) -> None:
    rig, index = Rig(tmp_path), Index()
    rig.insert([1, 2, 3, 4, 5, 6, 7, 8])
    replay_until(context, rig, index, 2)
    rig.events.close()
    rig = Rig(tmp_path)
    rig.insert([9, 9, 9, 9])
    index.next = 0  # a number that goes back is a restart
    replay_until(context, rig, index, 1)
    assert set(index.blocks.values()) == rig.tree() == {(((9, 9, 9, 9), None),)}
    rig.events.close()


def replay_until(context: zmq.Context, rig: Rig, index: Index, count: int) -> None:
    deadline = time.monotonic() + 10
    while len(index.blocks) != count and time.monotonic() < deadline:
        replay(context, rig, index)
        time.sleep(0.02)
    assert len(index.blocks) == count


def test_media_adapters_and_weights_have_keys_of_their_own(tmp_path: Path, context: zmq.Context) -> None:
    rig, index = Rig(tmp_path), Index()
    rig.insert([1, -3, -3, 4, 5, 6, 7, 8], "\x001")  # an item, and other weights
    rig.insert([-4, 2, 3, 4], "own:salt\x001")
    replay_until(context, rig, index, 3)
    paths = sorted(index.blocks.values(), key=len)
    assert paths[-1] == (((1, 0, 0, 4), ("key-3",)), ((5, 6, 7, 8), None))
    assert (((0, 2, 3, 4), (*rig.salt("own:salt"), "key-4")),) in paths
    rig.events.close()


@pytest.mark.parametrize("is_shared", [True, False])
def test_too_many_changes_are_forgotten_not_wrong(
    tmp_path: Path, context: zmq.Context, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    """`is_shared`: the child shares its parent's cached page, or its request computed one anew."""
    monkeypatch.setattr(random, "random", lambda: 0.0 if is_shared else 1.0)
    rig, index = Rig(tmp_path, max_waiting=3), Index()
    rig.insert([1, 2, 3, 4])
    replay_until(context, rig, index, 1)
    original, stuck = rig.publisher.publish, [True]

    def publish(events: Any) -> None:
        while stuck[0]:
            time.sleep(0.01)
        original(events)

    monkeypatch.setattr(rig.publisher, "publish", publish)
    for first in range(10, 200, 10):
        rig.insert([first] * PAGE)
    stuck[0] = False
    time.sleep(0.2)
    rig.insert([1, 2, 3, 4, 5, 5, 5, 5])  # a child of a block that subscribers forget
    rig.insert([7] * PAGE)
    deadline = time.monotonic() + 10
    while (((7,) * PAGE, None),) not in index.blocks.values() and time.monotonic() < deadline:
        replay(context, rig, index)
    assert set(index.blocks.values()) < rig.tree()
    rig.manager.allocator.free(rig.manager.evict_prefixes())
    replay_until(context, rig, index, 0)
    rig.events.close()


def test_replays_are_bounded_and_survive_nonsense(tmp_path: Path, context: zmq.Context) -> None:
    rig = Rig(tmp_path, buffer_steps=2)
    for first in range(8):
        rig.insert([first] * PAGE)
        time.sleep(0.02)
    socket = context.socket(zmq.DEALER)
    socket.connect(rig.endpoints[1])
    for frames in ((b"",), (b"", b"x"), (b"", b"", b"", b""), (b"", b"\xff" * 8)):
        socket.send_multipart(frames)
    socket.send_multipart((b"", bytes(8)))
    numbers = []
    while len(numbers) < 4:
        assert socket.poll(10_000)
        numbers.append(int.from_bytes(socket.recv_multipart()[1], "big", signed=True))
    last = numbers[-2]
    assert numbers == [-1, last - 1, last, -1]
    rig.events.close()


def test_the_layout_of_earlier_versions(tmp_path: Path, context: zmq.Context) -> None:
    """AIBrix reads events as arrays."""
    rig = Rig(tmp_path, layout="array")
    rig.insert([1, 2, 3, 4])
    time.sleep(0.3)
    socket = context.socket(zmq.DEALER)
    socket.connect(rig.endpoints[1])
    socket.send_multipart((b"", bytes(8)))
    events = []
    while socket.poll(10_000) and (payload := socket.recv_multipart()[2]):
        _, sent, _ = msgspec.msgpack.decode(payload)
        events += sent
    name = hash_block(hash_root(""), np.array([1, 2, 3, 4], np.int32))
    assert events == [["AllBlocksCleared"], ["BlockStored", [name], None, [1, 2, 3, 4], PAGE, None, "GPU", None, None]]
    rig.events.close()
    assert as_array.__doc__


def test_addresses(tmp_path: Path) -> None:
    bound = ("tcp://*:5557", "tcp://[::]:1", "ipc:///run/x", "tcp://127.0.0.1:5557", "tcp://localhost:1")
    assert all(map(is_bound, bound)) and not is_bound("tcp://indexer:5557") and not is_bound("tcp://10.0.0.1:5557")
    assert offset_endpoint("tcp://*:5557", 3) == "tcp://*:5560" and offset_endpoint("ipc:///x", 1) == "ipc:///x_dp1"
    with pytest.raises(ConfigurationError, match=r"cache.events_endpoint ipc:///no/such/folder/x cannot be used \(No such file"):
        KVEventPublisher(EventSettings("ipc:///no/such/folder/x"))

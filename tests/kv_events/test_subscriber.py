"""`EventReader` against a real publisher, with gaps and restarts, and against servers that send
what is no series of events."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from frame.kv_events import subscriber
from frame.kv_events.cache_events import hash_block, hash_root
from frame.kv_events.publisher import END, BlockRemoved, BlockStored, EventBatch
from frame.kv_events.subscriber import GPU, OTHER, EventReader, Subscription
from tests.kv_events.test_cache_events import PAGE, Rig


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[EventReader]:
    monkeypatch.setattr(subscriber, "TICK", 0.01)
    reader = EventReader()
    yield reader
    reader.close()


def wait(is_true: Callable[[], Any], what: Callable[[], object] = lambda: "") -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def follow(reader: EventReader, rig: Rig, *, has_replays: bool = True) -> Subscription:
    followed = reader.subscribe(rig.endpoints[0], rig.endpoints[1] if has_replays else "", 1)
    wait(lambda: followed.is_live)
    return followed


def has_block(followed: Subscription, name: int) -> bool:
    return name in followed.indexes[0]


def hash_tree(rig: Rig) -> set[int]:
    """The hashes of all cached blocks."""
    found = set[int]()
    for space, root in rig.cache._roots.items():
        stack = [(root, hash_root(space))]
        while stack:
            node, parent = stack.pop()
            for block in node.key.reshape(-1, PAGE):
                parent = hash_block(parent, np.ascontiguousarray(block))
                found.add(parent)
            stack.extend((child, parent) for child in node.children.values())
    return found


@pytest.mark.slow
def test_the_index_equals_the_tree(tmp_path: Path, reader: EventReader) -> None:
    """Where every fifth message is lost. Where more are than can be repeated, it has less."""
    random.seed(1)
    rig = Rig(tmp_path)
    followed, sent, lost = follow(reader, rig), rig.publisher._socket, 0
    share = 0.2

    class Lossy:
        def send_multipart(self, frames: Sequence[bytes]) -> None:
            nonlocal lost
            lost += (is_lost := random.random() < share)
            if not is_lost:
                sent.send_multipart(frames)

    for turn in range(24):
        share, is_too_much = (1.0, True) if turn % 6 == 5 else (0.2, False)
        rig.publisher._settings = replace(rig.publisher._settings, buffer_steps=5 if is_too_much else 10_000)
        rig.publisher._socket = Lossy()  # type: ignore[assignment]
        for number in range(250):
            start = random.choice((1, 1000, 2000))
            tokens = [start + i if random.random() < 0.97 else random.randrange(5000, 9000) for i in range(random.randrange(4, 48))]
            rig.insert(tokens, random.choice(("", "", "tenant:salt", "other:")))
            if number % 20 == 0:
                time.sleep(0.02)  # several batches
        wait(rig.events._changes.empty)
        time.sleep(0.05)
        rig.publisher._socket = sent
        rig.insert([turn + 20_000] * PAGE)  # so that the last gap is seen
        name = hash_block(hash_root(""), np.full(PAGE, turn + 20_000, np.int32))
        wait(partial(has_block, followed, name))
        if is_too_much:
            assert set(followed.indexes[0]) < hash_tree(rig)
            rig.manager.allocator.free(rig.manager.evict_prefixes())
            wait(lambda: not followed.indexes[0])
        held, tree = set(followed.indexes[0]), hash_tree(rig)
        assert held == tree, (turn, len(held - tree), len(tree - held))
    assert lost > 100 and followed.is_live
    rig.events.close()


def test_a_late_subscriber_knows_what_came_before(tmp_path: Path, reader: EventReader) -> None:
    rig = Rig(tmp_path)
    for first in range(9):
        rig.insert([first] * PAGE)
    followed = follow(reader, rig)
    wait(lambda: set(followed.indexes[0]) == hash_tree(rig))
    few = follow(reader, rig, has_replays=False)
    rig.insert([77] * PAGE)
    wait(lambda: len(few.indexes[0]) == 1 and len(followed.indexes[0]) == 10)
    assert few.is_live
    rig.events.close()


@pytest.mark.parametrize("further", [0, 30])
def test_a_restart_at_the_same_address(tmp_path: Path, reader: EventReader, further: int) -> None:
    """Also where the second process has sent more batches than the first one."""
    rig = Rig(tmp_path)
    followed = follow(reader, rig)
    for first in range(5):
        rig.insert([first] * PAGE)
        time.sleep(0.02)
    wait(lambda: len(followed.indexes[0]) == 5)
    rig.events.close()
    wait(lambda: not followed.is_live and not followed.indexes[0])  # it is lost: what it held is no use
    rig = Rig(tmp_path)
    for first in range(100, 101 + further):
        rig.insert([first] * PAGE)
        time.sleep(0.01)
    wait(lambda: followed.is_live and set(followed.indexes[0]) == hash_tree(rig), lambda: len(followed.indexes[0]))
    rig.events.close()


class Raw:
    """A server that sends whatever it is told."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.socket, self.replays = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.endpoints = [f"ipc://{folder}/raw", f"ipc://{folder}/raw-replay"]
        self.socket.bind(self.endpoints[0])
        self.replays.bind(self.endpoints[1])
        self.numbers = iter(range(1 << 30))

    def follow(self, reader: EventReader, *replies: Sequence[bytes]) -> Subscription:
        followed = reader.subscribe(*self.endpoints, 1)
        self.reply(*replies)
        return followed

    def reply(self, *replies: Sequence[bytes]) -> None:
        assert self.replays.poll(10_000)
        name, _ = self.replays.recv_multipart()
        for frames in (*replies, (END, b"")):
            self.replays.send_multipart((name, *frames))

    def send(self, *events: Any, number: int | None = None) -> None:
        self.socket.send_multipart((b"", (next(self.numbers) if number is None else number).to_bytes(8), batch(*events)))

    def close(self) -> None:
        self.context.destroy(linger=0)


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode(EventBatch(0.0, list(events)))


def stored(*names: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(list(names), None, [], 16, None, medium, None)


@pytest.fixture
def raw(tmp_path: Path) -> Iterator[Raw]:
    raw = Raw(tmp_path)
    yield raw
    raw.close()


def name_batch(number: int) -> bytes:
    return number.to_bytes(8)


@pytest.mark.parametrize(
    "frames",
    [
        (b"", name_batch(1), b"garbage"),
        (b"", name_batch(1), b"\xdc\xff\xff" * 500_000),
        (b"", name_batch(1), b"\x91" * 100_000),  # nested
        (b"", name_batch(1), batch({"type": "BlockStored", "block_hashes": "x"})),
        (b"", name_batch(1), batch({"type": "Exploit"})),
        (b"", name_batch(1), batch(["BlockStored", [1], None])),
        (b"", b"", batch()),
        (b"alone",),
        (b"", name_batch(0), batch(), b"more"),
        (b"", (2**64 - 1).to_bytes(8), batch()),
        (b"", name_batch(1), b"\0" * (subscriber.MAX_MESSAGE + 1)),
    ],
)
def test_garbage_ends_one_subscription_alone(tmp_path: Path, reader: EventReader, raw: Raw, frames: Sequence[bytes]) -> None:
    rig = Rig(tmp_path)
    good, bad = follow(reader, rig), raw.follow(reader, (name_batch(0), batch(stored(1, 2))))
    wait(lambda: bad.is_live and len(bad.indexes[0]) == 2)
    raw.socket.send_multipart(frames)
    if len(frames) == 3 and frames[1] == b"\xff" * 8:  # a gap, which no replay fills
        raw.reply()
    wait(lambda: not bad.indexes[0])
    rig.insert([1] * PAGE)
    wait(lambda: len(good.indexes[0]) == 1)
    assert good.is_live
    rig.events.close()


def test_wrong_sequence_numbers(reader: EventReader, raw: Raw) -> None:
    followed = raw.follow(reader, *((name_batch(number), batch(stored(number + 1))) for number in range(3)))
    wait(lambda: followed.is_live)
    raw.send(stored(9), number=1)  # a part of the replay
    raw.send(stored(4), number=3)
    wait(lambda: set(followed.indexes[0]) == {1, 2, 3, 4})
    raw.send(stored(9), number=2)
    wait(lambda: not followed.is_live and not followed.indexes[0])
    raw.reply((name_batch(0), batch(stored(5))), (name_batch(2), batch(stored(6))))  # it is tried again; one batch is missing
    wait(lambda: followed._num_failures == 2)
    assert not followed.indexes[0]


def test_a_flood_is_left_alone(tmp_path: Path, reader: EventReader, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "BURST", 0.05)
    rig = Rig(tmp_path)
    good, bad = follow(reader, rig), raw.follow(reader)
    wait(lambda: bad.is_live)
    is_open, data = threading.Event(), batch(stored(*range(1, 10_000)), BlockRemoved(list(range(1, 10_000)), "GPU"))

    def flood() -> None:
        for number in range(1 << 20):
            if is_open.wait(0.002):
                return
            raw.socket.send_multipart((b"", number.to_bytes(8), data))

    flooding = threading.Thread(target=flood, daemon=True)
    flooding.start()
    wait(lambda: bad._num_failures and bad._readers[0]._socket is None)
    is_open.set()
    flooding.join()
    assert not bad.is_live and not bad.indexes[0]
    rig.insert([1] * PAGE)
    wait(lambda: good.is_live and len(good.indexes[0]) == 1)
    rig.events.close()


def test_memory_is_bounded(reader: EventReader, raw: Raw, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriber, "MAX_BLOCKS", 1000)
    followed = raw.follow(reader)
    wait(lambda: followed.is_live)
    for number in range(50):
        raw.send(stored(*range(100 * number, 100 * number + 100)))
    wait(lambda: followed._readers[0].index.next == 50)
    assert set(followed.indexes[0]) == set(range(1000))
    raw.send(BlockRemoved(list(range(500)), "GPU"), stored(7000))
    wait(lambda: followed._readers[0].index.next == 51)
    assert set(followed.indexes[0]) == {*range(500, 1000), 7000}


def test_tiers_and_closing(reader: EventReader, raw: Raw) -> None:
    followed = raw.follow(reader)
    raw.send(stored(1, 2), stored(2, 3, medium="CPU"), stored(3, medium="DISK"), BlockRemoved([2], "GPU"), BlockRemoved([9], "CPU"))
    wait(lambda: followed.indexes[0] == {1: GPU, 2: OTHER, 3: OTHER}, lambda: followed.indexes)
    raw.send({"type": "AllBlocksCleared"})
    wait(lambda: not followed.indexes[0])
    followed.is_closed = True
    assert not followed.is_live
    wait(lambda: not reader._subscriptions)
    assert followed._readers[0]._socket is None

"""KV events of cache tiers: what a subscriber of vLLM's structures knows of each medium is what the
tiers hold, after random requests, evictions, flushes and lost changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest

from frame.core.interfaces.kv_tier import KVTierResult
from frame.core.interfaces.sampling_params import SamplingParams
from frame.kv_events.cache_events import CacheEvents, EventBuilder, TierBlocks, hash_block, hash_root
from frame.kv_events.publisher import AllBlocksCleared, BlockRemoved, BlockStored, Event
from frame.kv_tiers.block_keys import BlockKeys
from frame.kv_tiers.tier_set import WritePolicy
from tests.core.scheduling.small_rig import config, policy
from tests.kv_tiers.tier_rig import MemoryTier, TierRig

PAGE = 4


class ListingTier(MemoryTier):
    """Tells which blocks left it."""

    def poll(self) -> list[KVTierResult]:
        committed = {key for job in self._committed for key in self.stores[job][0]} if not self.is_held else set()
        before = set(self.blocks)
        results = super().poll()
        self.__dict__.setdefault("removed", []).extend(sorted((before | committed) - set(self.blocks)))
        return results

    def list_removed(self) -> list[bytes]:
        removed = self.__dict__.setdefault("removed", [])
        self.__dict__["removed"] = []
        return list(removed)

    def clear(self) -> None:
        self.__dict__.setdefault("removed", []).extend(self.blocks)
        self.blocks.clear()


class ListingRig(TierRig):
    tier_class = ListingTier


class Subscriber:
    """Blocks by medium; fails for an event that does not follow from those before."""

    def __init__(self) -> None:
        self.media: dict[str, dict[int, list[int]]] = {"GPU": {}, "CPU": {}, "DISK": {}}
        self.num_unknown = 0  # blocks without tokens

    def publish(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for blocks in self.media.values():
                    blocks.clear()
                continue
            blocks = self.media[event.medium or ""]
            if isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del blocks[name]
                continue
            assert isinstance(event, BlockStored)
            for place, name in enumerate(event.block_hashes):
                assert name not in blocks
                blocks[name] = event.token_ids[place * PAGE : (place + 1) * PAGE]
            if event.token_ids:
                assert (event.block_size, len(event.token_ids)) == (PAGE, PAGE * len(event.block_hashes))
            else:
                self.num_unknown += len(event.block_hashes)
                assert (event.parent_block_hash, event.block_size) == (None, 0)


class DirectEvents(CacheEvents):
    """Makes events at once, on the calling thread."""

    subscriber: Subscriber
    is_lost = False

    def _put(self, change: Callable[[], Iterator[Event]]) -> None:
        if self.is_lost:
            self._has_lost = True
            return
        if self._has_lost:
            self._has_lost = False
            self.subscriber.publish(list(self._builder.forget()))
        self.subscriber.publish(list(change()))


class Publisher:
    def publish(self, events: list[Event]) -> None: ...
    def answer_replays(self) -> None: ...
    def close(self) -> None: ...


def watch(rig: TierRig) -> DirectEvents:
    kv_manager = rig.scheduler._running.kv_manager
    events = DirectEvents(cast("Any", Publisher()), kv_manager.num_token_pages, PAGE, 1000)
    events.subscriber = Subscriber()
    kv_manager.events = events
    return events


class Blocks:
    """The event's hash and the tokens of each block of prompts, by the key of tiers."""

    def __init__(self, rig: TierRig) -> None:
        self.rig, self.known = rig, dict[bytes, tuple[int, list[int]]]()

    def add(self, tokens: list[int], namespace: str = "") -> None:
        chain = BlockKeys(self.rig.controller._keys.make_root(namespace), PAGE)
        array = np.array(tokens, np.int32)
        chain.extend(array)
        value = hash_root(namespace)
        for key, block in zip(chain.keys, array[: len(chain.keys) * PAGE].reshape(-1, PAGE), strict=True):
            value = hash_block(value, block)
            self.known[key] = value, block.tolist()


def check(rig: TierRig, events: DirectEvents, blocks: Blocks, *, is_exact: bool = True) -> None:
    """The subscriber knows what tiers hold, and nothing else; the tokens, where it was told."""
    for request in rig.requests.values():
        blocks.add([*request.message.token_ids, *request.got], request.message.namespace)
    known = events.subscriber.media["CPU" if rig._in_memory else "DISK"]
    held = {blocks.known[key][0]: blocks.known[key][1] for tier in rig.tiers for key in tier.blocks if key in blocks.known}
    assert known.keys() <= held.keys()
    if is_exact:
        assert known.keys() == held.keys()
    assert all(tokens in ([], held[name]) for name, tokens in known.items())


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("sizes", [(5,), (6, 40)])
def test_subscribers_know_what_tiers_hold(write_policy: WritePolicy, sizes: tuple[int, ...]) -> None:
    draw = random.Random(3)
    rig = ListingRig(config(page_size=PAGE, num_pages=33, max_running=2), policy(), sizes=sizes, write_policy=write_policy,
                     in_memory=len(sizes) == 1)  # fmt: skip
    events, blocks = watch(rig), Blocks(rig)
    for turn in range(120):
        stem = [draw.randrange(3)] * draw.randrange(1, 16)
        prompt = [*stem, *(draw.randrange(40) for _ in range(draw.randrange(1, 12)))]
        rig.add(prompt, SamplingParams(max_tokens=draw.randrange(1, 6), temperature=0.0, ignore_eos=True), namespace=draw.choice(["", "t"]))
        rig.run_until(lambda: rig.scheduler.is_idle and not rig.controller.is_busy)
        check(rig, events, blocks)
        if turn % 7 == 0 and write_policy != "write_back":
            removed = rig.scheduler._running.kv_manager.evict_prefixes()
            rig.scheduler._running.kv_manager.allocator.free(removed)
        if turn % 50 == 39:
            rig.controller.invalidate_blocks()
            assert not events.subscriber.media["CPU"]
            assert not events.subscriber.media["DISK"]
    assert max(len(tier.blocks) for tier in rig.tiers) > 4
    assert bool(events.subscriber.num_unknown) == (write_policy == "write_back")
    assert rig.load["tiers"][0]["stored_tokens"] > 100


def test_what_is_lost_is_forgotten() -> None:
    """Subscribers know too little afterwards, never too much, and later blocks again."""
    rig = ListingRig(config(page_size=PAGE, num_pages=33, max_running=2), policy(), sizes=(40,))
    events, blocks = watch(rig), Blocks(rig)

    def run(first: int) -> None:
        rig.add([first] * 9, SamplingParams(max_tokens=1, temperature=0.0))
        rig.run_until(lambda: rig.scheduler.is_idle and not rig.controller.is_busy)

    run(1)
    check(rig, events, blocks)
    events.is_lost = True
    run(2)
    rig.tiers[0].blocks.popitem(last=False)
    events.is_lost = False
    run(3)
    check(rig, events, blocks, is_exact=False)
    assert len(events.subscriber.media["DISK"]) == 2
    run(1)  # a block that the tier holds, which a request has read
    check(rig, events, blocks, is_exact=False)
    assert len(events.subscriber.media["DISK"]) > 2


def test_a_tier_that_does_not_tell_is_not_announced() -> None:
    rig = TierRig(config(page_size=PAGE, num_pages=33, max_running=2), policy())
    events = watch(rig)
    rig.add([1] * 9, SamplingParams(max_tokens=1, temperature=0.0))
    rig.run_until(lambda: rig.scheduler.is_idle and not rig.controller.is_busy)
    assert rig.tiers[0].blocks
    assert events.subscriber.media["GPU"]
    assert not events.subscriber.media["DISK"]


def test_a_block_in_two_tiers_of_a_medium_leaves_with_the_last() -> None:
    listing, keys = EventBuilder(8, PAGE).tiers, np.arange(8, dtype=np.int32)
    first, second = ((number, "CPU") for number in range(2))
    (stored,) = listing.store(TierBlocks(first, [b"a", b"b"], keys, ""))
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.parent_block_hash, stored.medium) == (keys.tolist(), None, "CPU")
    assert list(listing.store(TierBlocks(second, [b"b"], keys, ""))) == []
    assert list(listing.remove(first, [b"b", b"unknown"])) == []
    assert list(listing.remove(second, [b"b"])) == [BlockRemoved(stored.block_hashes[1:], "CPU")]
    (again,) = listing.store(TierBlocks(first, [b"a", b"b"], keys, ""))
    assert isinstance(again, BlockStored)
    assert (again.block_hashes, again.parent_block_hash, again.token_ids) == (stored.block_hashes[1:], stored.block_hashes[0], [4, 5, 6, 7])

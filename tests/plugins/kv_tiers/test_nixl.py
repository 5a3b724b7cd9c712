"""The tier `nixl`: blocks that a prefill server keeps and a decode server reads, with the real
library between two tiers of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.kv_tier import KVTierContext, KVTierResult, KVTransfer, TransferSettings
from frame.core.interfaces.platform import HOST, Platform, PlatformContext
from frame.plugins.kv_tiers import NixlTierOptions, buffers
from frame.testing.kv_tier.rig import make_block, make_keys
from tests.entrypoints.serving import free_port
from tests.plugins.fake_platform import FakePlatform

pytest.importorskip("nixl_cu13")

from frame.plugins.kv_tiers import nixl
from frame.plugins.kv_tiers.nixl import NixlTier
from frame.plugins.kv_tiers.threaded_tier import BlockError

BLOCK_BYTES, NUM_BLOCKS = 4096, 32
PATIENCE = 20.0
PLATFORMS: list[Platform] = []


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


@pytest.fixture(autouse=True, params=["host", "device"])
def platform(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where the tiers of a test have their blocks; the memory of a device is the host's."""
    PLATFORMS.append(HOST if request.param == "host" else FakePlatform(PlatformContext()))
    yield
    PLATFORMS.pop()


def settings(mode: Literal["prefill", "decode"], port: int, **changes: Any) -> TransferSettings:
    values = {"secret": b"s" * 32, "properties": {"the page size": "16"}, **changes}
    return TransferSettings(mode, "127.0.0.1", port, **values)


class Pair:
    """A prefill server's tier and a decode server's, each driven as its engine does."""

    def __init__(self, stack: ExitStack, decode: dict[str, Any], lease_seconds: float = 30.0, **changes: Any) -> None:
        self.port, self._job, self._stack = free_port(), 0, stack
        size = (NUM_BLOCKS + 0.5) * BLOCK_BYTES / buffers.GIB
        self.options = NixlTierOptions(size_gib=size, device_size_gib=size, lease_seconds=lease_seconds, max_leases=4)
        self.prefill = self.make("prefill", **changes)
        self.decode = self.make("decode", **{**changes, **decode})

    def make(self, mode: Literal["prefill", "decode"], **changes: Any) -> NixlTier:
        platform = changes.pop("platform", PLATFORMS[-1])
        context = KVTierContext(BLOCK_BYTES, "model", allocate, transfer=settings(mode, self.port, **changes), platform=platform)
        tier = NixlTier(context, self.options)
        self._stack.callback(tier.close)
        return tier

    def next_job(self) -> int:
        self._job += 1
        return self._job

    def begin_store(self, keys: Sequence[bytes]) -> int:
        job = self.next_job()
        wait_until(lambda: self.prefill._pool.num_free + len(self.prefill._index) >= NUM_BLOCKS)
        stored = self.prefill.store(job, keys)
        assert stored is not None
        for key, buffer in zip(keys, stored, strict=True):
            if buffer is not None:
                buffer.copy_(torch.from_numpy(make_block(key, BLOCK_BYTES)))
        return job

    def store(self, keys: Sequence[bytes]) -> None:
        job = self.begin_store(keys)
        self.prefill.finish(job)
        wait_for(self.prefill, job)

    def offer(self, lease: str, keys: Sequence[bytes], tenant: str = "") -> KVTransfer:
        """The blocks are kept for a peer. -> what the decode server expects."""
        self.prefill.open_transfer(KVTransfer(lease, num_blocks=len(keys), tenant=tenant), keys)
        return KVTransfer(lease, "127.0.0.1", self.port, len(keys))

    def begin_load(self, keys: Sequence[bytes]) -> tuple[int, Sequence[torch.Tensor]]:
        job = self.next_job()
        wait_until(lambda: self.decode.poll() == [] and self.decode._pool.num_free >= len(keys))
        loaded = self.decode.load(job, keys)
        assert loaded is not None
        return job, loaded

    def load(self, keys: Sequence[bytes]) -> KVTierResult:
        """Load blocks; those that arrive are those of the keys."""
        job, loaded = self.begin_load(keys)
        result = wait_for(self.decode, job)
        for key, buffer in zip(keys[: result.num_blocks], loaded, strict=False):
            assert np.array_equal(buffer.numpy(), make_block(key, BLOCK_BYTES))
        self.decode.finish(job)
        return result

    def poll_until(self, is_done: Callable[[], bool]) -> None:
        def look() -> bool:
            assert self.prefill.poll() == []
            return is_done()

        wait_until(look)


def wait_until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.002)


def wait_for(tier: NixlTier, job: int) -> KVTierResult:
    results: list[KVTierResult] = []
    wait_until(lambda: bool(results.extend(tier.poll()) or results))
    (result,) = results
    assert result.job == job
    return result


@contextmanager
def open_pair(decode: dict[str, Any] | None = None, **changes: Any) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, decode or {}, **changes)


def test_a_decode_server_reads_what_a_prefill_server_keeps() -> None:
    keys = make_keys(8)
    with open_pair() as pair:
        pair.store(keys)
        transfer = pair.offer("one", keys)
        assert pair.decode.match(keys) == 0
        pair.decode.open_transfer(transfer, keys)
        assert pair.decode.match(keys) == 8
        assert pair.decode.match([*keys[:3], *make_keys(2, "other")]) == 3
        assert pair.load(keys[:3]) == KVTierResult(pair._job, 3)
        assert pair.load(keys[3:]) == KVTierResult(pair._job, 5)
        assert pair.prefill.num_transfers == pair.decode.num_transfers == 1
        assert pair.prefill.describe_transfers()["leased_blocks"] == 8
        pair.decode.close_transfer("one")
        assert pair.decode.match(keys) == 0
        pair.poll_until(lambda: pair.prefill.num_transfers == 0)
        assert pair.prefill.describe_transfers()["leased_blocks"] == 0
        assert pair.prefill.match(keys) == 8, "they stay for other prompts"
        counts = pair.decode.describe_transfers()
        assert (counts["transfers"], counts["transfer_bytes"], counts["transfer_failures"]) == (2, 8 * BLOCK_BYTES, 0)


def test_a_lease_may_be_asked_for_before_its_blocks_are_stored() -> None:
    keys = make_keys(4)
    with open_pair() as pair:
        store = pair.begin_store(keys)
        pair.decode.open_transfer(pair.offer("one", keys), keys)
        job, _ = pair.begin_load(keys)
        time.sleep(0.05)
        assert pair.decode.poll() == []
        pair.prefill.finish(store)
        wait_for(pair.prefill, store)
        assert wait_for(pair.decode, job).num_blocks == 4
        pair.decode.finish(job)


def test_a_peer_does_not_wait_for_the_engine_of_the_prefill_server() -> None:
    """Once the buffers are full, its threads do the rest; the result of the store comes later."""
    keys = make_keys(4)
    with open_pair() as pair:
        store = pair.begin_store(keys)
        pair.decode.open_transfer(pair.offer("one", keys), keys)
        pair.prefill.note_copied(store)
        assert pair.load(keys).num_blocks == 4
        assert (pair.prefill.poll(), pair.prefill.match(keys)) == ([], 0)
        pair.prefill.finish(store)
        assert wait_for(pair.prefill, store) == KVTierResult(store, 4)
        assert pair.prefill.match(keys) == 4
        seconds = {**pair.prefill.describe_transfers(), "insert_seconds": 0.0, **pair.decode.describe_transfers()}
        assert all(seconds[f"{phase}_seconds"] > 0 for phase in ("acquire", "read", "check", "insert"))
        assert pair.prefill.describe_transfers()["store_seconds"] > 0


def test_blocks_that_a_lease_keeps_while_they_are_stored_are_not_evicted() -> None:
    keys, others = make_keys(8), make_keys(3 * NUM_BLOCKS, "other")
    with open_pair() as pair:
        store = pair.begin_store(keys)
        transfer = pair.offer("one", keys)
        pair.prefill.finish(store)
        wait_for(pair.prefill, store)
        for start in range(0, len(others), 8):
            pair.store(others[start : start + 8])
        assert pair.prefill.match(keys) == 8
        pair.decode.open_transfer(transfer, keys)
        assert pair.load(keys).num_blocks == 8
        pair.prefill.close_transfers()
        for start in range(0, len(others), 8):
            pair.store(others[start : start + 8])
        assert pair.prefill.match(keys) == 0


@pytest.mark.parametrize("is_closed_first", [False, True])
def test_the_buffers_of_a_store_that_is_cancelled_are_free_once(is_closed_first: bool) -> None:
    keys = make_keys(4)
    with open_pair() as pair:
        store = pair.begin_store(keys)
        pair.decode.open_transfer(pair.offer("one", keys), keys)
        if is_closed_first:
            pair.prefill.close_transfer("one")
        pair.prefill.finish(store, commit=False)
        assert pair.prefill._pool.num_free == NUM_BLOCKS - 4 * (not is_closed_first)
        assert pair.load(keys).num_blocks == 0
        pair.prefill.close_transfer("one")
        assert pair.prefill._pool.num_free == NUM_BLOCKS


def test_buffers_of_a_failed_read_are_not_used_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something may still write to them: a peer is gone in the middle of a read."""
    keys = make_keys(4)
    with open_pair() as pair:
        pair.store(keys)
        pair.decode.open_transfer(pair.offer("one", keys), keys)

        def fail(*_arguments: Any) -> None:
            raise BlockError("the peer is gone")

        monkeypatch.setattr(nixl, "QUARANTINE_SECONDS", 0.3)
        monkeypatch.setattr(pair.decode._agent, "read", fail)
        began = time.monotonic()
        assert "is gone" in pair.load(keys).error
        while pair.decode._pool.num_free == NUM_BLOCKS - 4:
            pair.decode.poll()
            time.sleep(0.01)
        assert time.monotonic() - began >= 0.3
        assert pair.decode._pool.num_free == NUM_BLOCKS


def test_a_long_prompt_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_PIECE_BYTES", 3 * BLOCK_BYTES)
    keys = make_keys(8)
    with open_pair() as pair:
        pair.store(keys)
        pair.decode.open_transfer(pair.offer("one", keys), keys)
        assert pair.load(keys).num_blocks == 8
        assert pair.decode.describe_transfers()["transfer_bytes"] == 8 * BLOCK_BYTES
        transfer = pair.offer("two", keys)
        pair.prefill._leases["two"].pinned[4].buffer[7] += 1
        pair.decode.close_transfer("one")
        pair.decode.open_transfer(transfer, keys)
        assert pair.load(keys).num_blocks == 4
        assert pair.decode.describe_transfers()["transfer_bytes"] == 12 * BLOCK_BYTES


def test_neighbours_on_both_sides_are_read_at_once() -> None:
    runs = nixl.list_runs([100, 110, 120, 130, 50], [900, 910, 930, 940, 950], 10)
    assert runs.T.tolist() == [[100, 900, 20], [120, 930, 20], [50, 950, 10]]
    assert nixl.list_runs([100], [900], 10).T.tolist() == [[100, 900, 10]]
    keys = make_keys(8)
    with open_pair() as pair:
        pair.store(keys)
        pair.decode.open_transfer(pair.offer("one", keys), keys)
        job, loaded = pair.begin_load(keys)
        wait_for(pair.decode, job)
        sides = [block.buffer for block in pair.prefill._leases["one"].pinned], loaded
        runs = nixl.list_runs(*([buffer.data_ptr() for buffer in side] for side in sides), BLOCK_BYTES)
        pair.decode.finish(job)
        assert runs.shape[1] == 1 or PLATFORMS[-1] is HOST


def test_a_lease_is_read_once() -> None:
    keys = make_keys(4)
    with open_pair() as pair:
        pair.store(keys)
        transfer = pair.offer("one", keys)
        for count, error in ((4, ""), (0, "was used already")):
            pair.decode.open_transfer(transfer, keys)
            result = pair.load(keys)
            assert result.num_blocks == count
            assert error in result.error
            pair.decode.close_transfer("one")


def test_blocks_of_a_lease_are_not_evicted() -> None:
    keys, others = make_keys(8), make_keys(3 * NUM_BLOCKS, "other")
    with open_pair() as pair:
        pair.store(keys)
        transfer = pair.offer("one", keys)
        for start in range(0, len(others), 8):
            pair.store(others[start : start + 8])
        pair.decode.open_transfer(transfer, keys)
        assert pair.load(keys).num_blocks == 8
        pair.decode.close_transfer("one")
        pair.poll_until(lambda: pair.prefill.num_transfers == 0)
        for start in range(0, len(others), 8):
            pair.store(others[start : start + 8])
        assert pair.prefill.match(keys) == 0


def test_a_lease_that_was_not_read_expires() -> None:
    keys = make_keys(4)
    with open_pair(lease_seconds=0.2) as pair:
        pair.store(keys)
        transfer = pair.offer("one", keys)
        pair.poll_until(lambda: pair.prefill.num_transfers == 0)
        counts = pair.prefill.describe_transfers()
        assert (counts["expired_leases"], counts["leased_blocks"]) == (1, 0)
        pair.decode.open_transfer(transfer, keys)
        assert "has expired" in pair.load(keys).error


def test_leases_are_bounded() -> None:
    keys = make_keys(5)
    with open_pair() as pair:
        pair.store(keys)
        for number, key in enumerate(keys):
            pair.offer(f"{number}", [key])
        counts = pair.prefill.describe_transfers()
        assert (counts["leases"], counts["refused_leases"], counts["leased_blocks"]) == (4, 1, 4)
        assert list(pair.prefill._leases) == ["1", "2", "3", "4"], "the oldest has ended"
        pair.prefill.close_transfers()
        assert pair.prefill.describe_transfers()["leased_blocks"] == 0


def test_one_tenant_does_not_take_the_leases_of_others() -> None:
    keys = make_keys(4)
    with open_pair() as pair:
        pair.store(keys)
        for number in range(6):
            pair.offer(f"a{number}", keys[:1], "a")
        transfer = pair.offer("b0", keys, "b")
        assert list(pair.prefill._leases) == ["a3", "a4", "a5", "b0"]
        pair.decode.open_transfer(transfer, keys)
        assert pair.load(keys) == KVTierResult(pair._job, 4)
        pair.offer("c0", keys, "c")
        pair.offer("b1", keys, "b")
        assert list(pair.prefill._leases) == ["a5", "b0", "c0", "b1"]
        pair.offer("b2", keys, "b")
        assert list(pair.prefill._leases) == ["a5", "b0", "c0", "b2"], "its own, and not the one that is being read"


def test_one_tenant_does_not_take_the_room_of_others() -> None:
    """The blocks of its oldest leases are released, where another tenant's find no room."""
    keys, further = make_keys(NUM_BLOCKS), make_keys(8, "other")
    with open_pair() as pair:
        pair.store(keys)
        for start in (0, 16, 24):
            pair.offer(f"a{start}", keys[start : start + (16 if start == 0 else 8)], "a")
        assert pair.prefill.count_room(is_store=True) == 0
        pair.offer("a", further, "a")
        assert pair.prefill.count_room(is_store=True) == 0, "its own later prompts are not kept instead"
        pair.prefill.close_transfer("a")
        transfer = pair.offer("b", further, "b")
        assert list(pair.prefill._leases) == ["a16", "a24", "b"]
        pair.store(further)
        pair.decode.open_transfer(transfer, further)
        assert pair.load(further) == KVTierResult(pair._job, 8)


def test_a_block_that_changes_is_not_served() -> None:
    """As it is when a lease ends while its blocks are read."""
    keys = make_keys(4)
    with open_pair() as pair:
        pair.store(keys)
        transfer = pair.offer("one", keys)
        pair.prefill._leases["one"].pinned[2].buffer[7] += 1
        pair.decode.open_transfer(transfer, keys)
        result = pair.load(keys)
        assert result.num_blocks == 2
        assert "has changed" in result.error


def test_a_lease_keeps_what_is_stored_and_tells_how_much_room_there_is() -> None:
    """Its leading blocks are not evicted for its later ones, and a decode server does not begin
    loads in vain."""
    keys, others = make_keys(NUM_BLOCKS + 8), make_keys(NUM_BLOCKS - 8, "other")
    with open_pair() as pair:
        assert pair.prefill.count_room(is_store=False) is pair.decode.count_room(is_store=True) is None
        pair.store(keys[:8])
        pair.store(others)
        assert pair.prefill.count_room(is_store=True) == NUM_BLOCKS
        transfer = pair.offer("one", keys)
        assert pair.prefill.count_room(is_store=True) == NUM_BLOCKS - 8
        pair.store(keys[8:NUM_BLOCKS])
        assert pair.prefill.count_room(is_store=True) == 0
        pair.decode.open_transfer(transfer, keys)
        assert pair.decode.match(keys) == NUM_BLOCKS // 2
        job, _ = pair.begin_load(keys[:16])
        assert pair.decode.count_room(is_store=False) == NUM_BLOCKS - 16
        assert wait_for(pair.decode, job).num_blocks == 16
        pair.decode.finish(job)
        assert pair.decode.count_room(is_store=False) == NUM_BLOCKS
        result = pair.load(keys[16:])
        assert (result.num_blocks, "no room" in result.error) == (NUM_BLOCKS - 16, True)


def test_blocks_for_which_there_was_no_room_are_missing() -> None:
    keys = make_keys(6)
    with open_pair() as pair:
        pair.store(keys[:4])
        pair.decode.open_transfer(pair.offer("one", keys), keys)
        result = pair.load(keys)
        assert result.num_blocks == 4
        assert "no room" in result.error


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"properties": {"the page size": "32"}}, "the page size is 16 on the prefill server and 32 on the decode server"),
        ({"secret": b"t" * 32}, "FRAME_DIST_KEY"),
        ({"platform": None}, "the memory of transferred blocks"),
    ],
    ids=["properties", "secret", "memory"],
)
def test_a_peer_with_other_properties_or_another_secret_is_refused(changed: dict[str, Any], sentence: str) -> None:
    keys = make_keys(2)
    if "platform" in changed and PLATFORMS[-1] is HOST:
        changed = {"platform": FakePlatform(PlatformContext())}
    with open_pair(changed) as pair:
        pair.store(keys)
        pair.decode.open_transfer(pair.offer("one", keys), keys)
        result = pair.load(keys)
        assert result.num_blocks == 0
        assert sentence in result.error


def test_a_prefill_server_that_restarts_at_its_address() -> None:
    keys = make_keys(4)
    with open_pair() as pair:
        pair.store(keys)
        first, second = pair.offer("one", keys[:2]), pair.offer("two", keys[2:])
        pair.decode.open_transfer(first, keys[:2])
        assert pair.load(keys[:2]).num_blocks == 2
        pair.prefill.close()
        pair.decode.open_transfer(second, keys[2:])
        assert pair.load(keys[2:]).num_blocks == 0
        pair.prefill = pair.make("prefill")
        pair.store(keys)
        transfer = pair.offer("three", keys)
        time.sleep(1.1)  # no connection is tried for a second
        pair.decode.open_transfer(transfer, keys)
        assert pair.load(keys).num_blocks == 4


def test_an_abandoned_load_gives_its_buffers_back() -> None:
    keys = make_keys(4)
    with open_pair() as pair:
        pair.store(keys)
        transfer = pair.offer("one", keys)
        for _ in range(3 * NUM_BLOCKS):
            pair.decode.open_transfer(transfer, keys)
            job, _ = pair.begin_load(keys)
            pair.decode.finish(job)
            pair.decode.close_transfer("one")

        def is_free() -> bool:
            assert pair.decode.poll() == []
            return pair.decode._pool.num_free == NUM_BLOCKS and not pair.decode.num_transfers

        wait_until(is_free)
        pair.poll_until(lambda: pair.prefill.num_transfers == 0)


def test_a_decode_server_stores_nothing() -> None:
    keys = make_keys(4)
    with open_pair() as pair:
        assert pair.decode.store(1, keys) == [None] * 4
        pair.decode.finish(1, commit=False)
        assert pair.decode.store(1, keys) == [None] * 4
        pair.decode.finish(1)
        assert wait_for(pair.decode, 1) == KVTierResult(1, 4)
        assert pair.decode.match(keys) == 0


def test_memory_that_is_registered_later_is_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "PIECE_BYTES", 4 * BLOCK_BYTES)
    keys = make_keys(24)
    with open_pair() as pair:
        pair.store(keys)
        transfers = [pair.offer(f"{start}", keys[start : start + 8]) for start in (0, 8, 16)]
        for start, transfer in zip((0, 8, 16), transfers, strict=True):
            pair.prefill._agent.register(allocate(BLOCK_BYTES))
            pair.decode.open_transfer(transfer, keys[start : start + 8])
            assert pair.load(keys[start : start + 8]).num_blocks == 8


def test_an_address_that_is_taken_is_refused() -> None:
    with open_pair() as pair, pytest.raises(ConfigurationError, match=r"change disaggregation\.host or disaggregation\.port"):
        context = KVTierContext(BLOCK_BYTES, "model", allocate, transfer=settings("prefill", pair.port))
        NixlTier(replace(context), pair.options)

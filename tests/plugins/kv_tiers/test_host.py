"""The tier `host`: memory that is allocated in the background, sizes, and blocks that change in
memory."""

from __future__ import annotations

import threading

import pytest
import torch

from frame.core.errors import ConfigurationError
from frame.core.interfaces.kv_tier import KVTierContext
from frame.plugins.kv_tiers import HostTierOptions, buffers
from frame.plugins.kv_tiers.host import HostTier
from frame.testing.kv_tier.rig import Rig, make_keys
from tests.plugins.kv_tiers.tier_rig import subject


def test_a_start_does_not_wait_for_memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store finds room as soon as there is a piece, and uses all pieces in the end."""
    monkeypatch.setattr(buffers, "PIECE_BYTES", 4 * 4096)
    permits = threading.Semaphore(0)
    allocate = Rig._allocate

    def wait(self: Rig, num_bytes: int) -> torch.Tensor:
        permits.acquire()
        return allocate(self, num_bytes)

    monkeypatch.setattr(Rig, "_allocate", wait)
    rig, keys = Rig(subject("host"), tmp_path_factory.mktemp("host"), 16), make_keys(16)
    assert rig.tier.store(1, keys[:1]) is None
    permits.release()
    rig.store(keys[:4])
    assert rig.tier.store(2, keys[:5]) is None or rig.tier.match(keys[:4]) < 4, "there are four buffers"
    permits.release(3)
    rig.wait_until(lambda: rig.num_bytes == 16 * 4096, "not all pieces are allocated")
    rig.tier.close()


def test_memory_that_cannot_be_allocated_leaves_a_smaller_tier(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(buffers, "PIECE_BYTES", 4 * 4096)
    pieces = iter([torch.zeros(4 * 4096, dtype=torch.uint8)])

    def allocate(_num_bytes: int) -> torch.Tensor:
        piece = next(pieces, None)
        if piece is None:
            raise RuntimeError("out of memory")
        return piece

    pool = buffers.BufferPool(KVTierContext(4096, "model", allocate), 16)
    pool._thread.join()
    assert pool.num_free == 4
    assert "memory for 4 of 16 blocks: out of memory" in caplog.text
    pool.close(1.0)


@pytest.mark.parametrize(
    ("size", "message"), [(1e-6, "holds no block of 4,096 bytes; set it to at least 0.001"), (1e5, "GiB of host memory are")]
)
def test_sizes_that_cannot_be_are_refused(size: float, message: str) -> None:
    context = KVTierContext(4096, "model", lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8))
    with pytest.raises(ConfigurationError, match=message):
        HostTier(context, HostTierOptions(size_gib=size))


@pytest.mark.parametrize("position", [0, 4095])
def test_a_flipped_bit_in_memory_fails_the_load(tmp_path_factory: pytest.TempPathFactory, position: int) -> None:
    rig, keys = Rig(subject("host"), tmp_path_factory.mktemp("host"), 4), make_keys(3)
    job, stored = rig.begin_store(keys)
    rig.tier.finish(job)
    rig.wait_for([job])
    assert stored[1] is not None
    stored[1][position] ^= 1
    assert rig.load(keys) == 1
    assert rig.tier.match(keys) == 1, "the block that failed is not matched again"
    for _ in range(3):  # its buffer serves again
        rig.store(make_keys(4, "more"))
        rig.store(keys)
        rig.load_all(keys)
    rig.tier.close()

"""Drives one KV cache tier as its caller does, and checks each result. Used by the suite of the
kind `kv_tier` and by the tests of tiers. Must not know a plugin by name."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from frame.core.interfaces.kv_tier import KVTier, KVTierCapabilities, KVTierContext, KVTierResult
from frame.testing.conformance import SkipCheck, Subject

B = TypeVar("B")  # a buffer, or None for a block that needs none

NUM_BLOCKS = 16  # the quota of most checks
PATIENCE = 5.0  # seconds for a job, or for memory that is allocated in the background


def make_keys(count: int, seed: str = "") -> list[bytes]:
    """Keys as block chains have them, 32 bytes each."""
    return [blake2b(f"{seed}{number}".encode(), digest_size=32).digest() for number in range(count)]


def make_block(key: bytes, num_bytes: int) -> np.ndarray:
    """The contents that the suite stores for a key, uint8 [num_bytes]."""
    seed = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def change_blocks(memory: bytearray | np.ndarray, contents: Iterable[bytes], place: int) -> None:
    """Change the byte of a place in each block that the memory holds as it is; where it holds none
    so, the byte at the same part of the memory."""
    held, size = bytes(memory), 0
    starts = []
    for content in contents:
        size, start = len(content), held.find(content)
        if start >= 0:
            starts.append(start)
    for at in [start + place for start in starts] or [place * (len(held) - 1) // max(1, size - 1)]:
        memory[at] ^= 0x10


class KeptBytes:
    """Memory that outlives an engine. A copy is what an engine that is killed now leaves."""

    def __init__(self, bytes_: np.ndarray | None = None) -> None:
        self.bytes = bytes_

    def copy(self) -> KeptBytes:
        return KeptBytes(None if self.bytes is None else self.bytes.copy())

    def map(self, num_bytes: int) -> np.ndarray:
        if self.bytes is None or len(self.bytes) < num_bytes:
            kept, self.bytes = self.bytes, np.zeros(num_bytes, np.uint8)
            if kept is not None:
                self.bytes[: len(kept)] = kept
        return self.bytes[:num_bytes]


class Rig:
    """A tier in a folder, its next job number, and the memory that it has allocated."""

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        num_blocks: int = 16,
        block_bytes: int = 4096,
        identity: str = "model",
        kept: KeptBytes | None = None,
    ) -> None:
        self.block_bytes, self.num_bytes = block_bytes, 0  # allocated by the tier
        self.memory: list[weakref.ref[np.ndarray]] = []
        self.kept = kept or KeptBytes()
        context = KVTierContext(block_bytes, identity, self._allocate, map_kept=None if kept is None else kept.map)
        make_options = getattr(subject.target, "make_conformance_options", None)
        self.has_quota = make_options is not None
        capabilities = subject.record.capabilities
        self.capabilities = capabilities if isinstance(capabilities, KVTierCapabilities) else KVTierCapabilities()
        self.is_persistent = self.capabilities.persistent
        options = subject.options if make_options is None else make_options(folder, num_blocks, context)
        self.folder, self.tier, self._job = folder, self._create(subject.target, context, options), 1000

    @staticmethod
    def _create(target: Callable[..., KVTier], context: KVTierContext, options: object) -> KVTier:
        return target(context, options)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        array = np.zeros(num_bytes, np.uint8)
        self.num_bytes += num_bytes
        self.memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    def next_job(self) -> int:
        self._job += 1
        return self._job

    def require_quota(self) -> None:
        if not self.has_quota:
            raise SkipCheck("the class has no make_conformance_options")

    def require_persistence(self) -> None:
        if not self.is_persistent:
            raise SkipCheck("the tier is not persistent")
        if not self.has_quota:
            raise SkipCheck("the class has no make_conformance_options, so its place is not known")

    def make(self, key: bytes) -> torch.Tensor:
        return torch.from_numpy(make_block(key, self.block_bytes))

    def wait_for(self, jobs: Iterable[int]) -> dict[int, KVTierResult]:
        """Poll until all jobs have ended. No other job may be returned."""
        missing, results = set(jobs), {}
        end = time.monotonic() + PATIENCE
        while missing:
            for result in self.tier.poll():
                assert result.job in missing, f"poll returns job {result.job}, which is none that was to end"
                missing.remove(result.job)
                results[result.job] = result
            assert not missing or time.monotonic() < end, f"poll has not returned a job after {PATIENCE:g} seconds"
            time.sleep(0.0005 if missing else 0)
        return results

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll until something is so; no job may be returned."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.tier.poll() == [], "poll returns a job that has not begun"
            assert time.monotonic() < end, f"{what} after {PATIENCE:g} seconds"
            time.sleep(0.001)

    def begin_store(self, keys: Sequence[bytes], job: int | None = None) -> tuple[int, Sequence[torch.Tensor | None]]:
        """Begin a store, and fill its buffers. -> job, buffers."""
        job = self.next_job() if job is None else job
        buffers = self._get_buffers(self.tier.store, job, keys)
        for key, buffer in zip(keys, buffers, strict=True):
            if buffer is not None:
                buffer.copy_(self.make(key))
        return job, buffers

    def store(self, keys: Sequence[bytes], *, commit: bool = True) -> None:
        """Store blocks, and wait for them."""
        job, _ = self.begin_store(keys)
        self.tier.finish(job, commit=commit)
        if commit:
            result = self.wait_for([job])[job]
            assert result.num_blocks == len(keys) and not result.error, f"a store of {len(keys)} blocks ends with {result}"

    def begin_load(self, keys: Sequence[bytes], job: int | None = None) -> tuple[int, Sequence[torch.Tensor]]:
        job = self.next_job() if job is None else job
        return job, self._get_buffers(self.tier.load, job, keys)

    def _get_buffers(self, method: Callable[[int, Sequence[bytes]], Sequence[B] | None], job: int, keys: Sequence[bytes]) -> Sequence[B]:
        """What `store` or `load` returns once the tier has room."""
        buffers: Sequence[B] | None = None

        def has_room() -> bool:
            nonlocal buffers
            buffers = method(job, keys)
            return buffers is not None

        self.wait_until(has_room, f"the tier has no room to {method.__name__} {len(keys)} blocks")
        count = len(buffers or ())
        assert buffers is not None and count == len(keys), f"{method.__name__} of {len(keys)} keys returns {count} buffers"
        return buffers

    def compare(self, keys: Sequence[bytes], buffers: Sequence[torch.Tensor], result: KVTierResult) -> None:
        """The leading blocks of a load are those of their keys; it says what failed."""
        assert 0 <= result.num_blocks <= len(keys), f"a load of {len(keys)} blocks ends with {result.num_blocks}"
        for key, buffer in zip(keys[: result.num_blocks], buffers, strict=False):
            assert torch.equal(buffer, self.make(key)), "a loaded block has other bytes than were stored for its key"
        if result.num_blocks < len(keys):
            error = result.error
            assert error and "\n" not in error and "Traceback" not in error, f"a failed load has no sentence: {error!r:.200}"

    def load(self, keys: Sequence[bytes]) -> int:
        """Load blocks and compare them. -> the number of leading ones that were loaded."""
        job, buffers = self.begin_load(keys)
        result = self.wait_for([job])[job]
        self.compare(keys, buffers, result)
        self.tier.finish(job)
        return result.num_blocks

    def load_all(self, keys: Sequence[bytes]) -> None:
        count = self.load(keys)
        assert count == len(keys), f"{count} of {len(keys)} stored blocks are loaded"

    def count_held(self, keys: Sequence[bytes]) -> int:
        return sum(self.tier.match([key]) for key in keys)

    def count_memory(self) -> int:
        """Allocations of the tier that are in use."""
        gc.collect()
        return sum(reference() is not None for reference in self.memory)


Make = Callable[..., Rig]  # the rig of a check

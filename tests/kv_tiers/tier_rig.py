"""`TierRig`: the scheduler's rig with cache tiers in memory and a mover over the runner's pages.

Jobs end when the test lets them. The mover copies at the last moment, and spoils the pages of a
load before: a page that is used, freed or written too early shows as a wrong token. After each step
the tokens of all cached pages are compared with the prefix cache's keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.kv_tier import BlockMover, KVTier, KVTierResult
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.kv_tiers.controller import TierController
from frame.kv_tiers.tier_set import NamedTier, TierOptions, WritePolicy
from frame.testing.fake_runner import FakeRunner
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.small_rig import config, policy

SPOILED = -2  # as a token of a page
PROMPT = list(range(40, 64))  # 6 pages
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


class MemoryTier(KVTier):
    """Blocks in a dict. `is_held`: no job ends. `num_read`: leading blocks that the next load
    reads; None: all. `fails_store`: the next committed store keeps nothing. `max_jobs`: jobs whose
    buffers there is room for."""

    def __init__(self, block_bytes: int, max_blocks: int = 1000, max_jobs: int = 100) -> None:
        self.blocks: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.is_held, self.fails_store, self.is_closed = False, False, False
        self.num_read: int | None = None
        self.is_in_memory = False  # buffers of loads hold the blocks from the start
        self.max_jobs, self.num_loads = max_jobs, 0
        self.loads: dict[int, tuple[list[bytes], list[torch.Tensor]]] = {}
        self.stores: dict[int, tuple[list[bytes], list[torch.Tensor | None]]] = {}
        self._block_bytes, self._max_blocks = block_bytes, max_blocks
        self._reading: list[int] = []
        self._committed: list[int] = []

    def match(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self.blocks), len(keys))

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        assert job not in self.loads
        assert job not in self.stores
        assert keys
        if len(self.loads) + len(self.stores) >= self.max_jobs:
            return None
        self.num_loads += 1
        buffers = [torch.full((self._block_bytes,), 255, dtype=torch.uint8) for _ in keys]
        for key, buffer in zip(keys, buffers, strict=True):
            if self.is_in_memory and key in self.blocks:
                buffer.copy_(self.blocks[key])
        self.loads[job] = list(keys), buffers
        self._reading.append(job)
        return buffers

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        assert job not in self.loads
        assert job not in self.stores
        assert keys
        if len(self.loads) + len(self.stores) >= self.max_jobs:
            return None
        coming = {key for other, _ in self.stores.values() for key in other} | set(self.blocks)
        buffers = [None if key in coming else torch.zeros(self._block_bytes, dtype=torch.uint8) for key in keys]
        self.stores[job] = list(keys), buffers
        return buffers

    def finish(self, job: int, *, commit: bool = True) -> None:
        if job in self.loads:
            del self.loads[job]
            self._reading = [each for each in self._reading if each != job]
        elif commit:
            assert job in self.stores
            self._committed.append(job)
        else:
            del self.stores[job]

    def poll(self) -> list[KVTierResult]:
        if self.is_held:
            return []
        results = []
        for job in self._reading:
            keys, buffers = self.loads[job]
            count = self.match(keys)
            if self.num_read is not None:
                count, self.num_read = min(count, self.num_read), None
            for key, buffer in zip(keys[:count], buffers, strict=False):
                buffer.copy_(self.blocks[key])
                self.blocks.move_to_end(key)
            results.append(KVTierResult(job, count, "" if count == len(keys) else "a block was cut off"))
        for job in self._committed:
            keys, stored = self.stores.pop(job)
            fails, self.fails_store = self.fails_store, False
            pairs = [(key, buffer) for key, buffer in zip(keys, stored, strict=True) if buffer is not None and not fails]
            self.blocks.update(pairs)
            results.append(KVTierResult(job, 0 if fails else len(keys), "the disk is full" if fails else ""))
        while len(self.blocks) > self._max_blocks:
            self.blocks.popitem(last=False)
        self._reading, self._committed = [], []
        return results

    def close(self) -> None:
        self.is_closed = True


class RunnerMover:
    """Copies pages of a fake runner. `may_be_empty`: a job may have no pages, or pages without
    buffers."""

    def __init__(self, runner: FakeRunner, *, may_be_empty: bool = False) -> None:
        self.may_be_empty = may_be_empty
        self.is_held, self.is_closed = False, False
        self.loads: dict[int, tuple[np.ndarray, list[torch.Tensor]]] = {}
        self.stores: dict[int, tuple[np.ndarray, list[list[torch.Tensor | None]]]] = {}
        self._runner = runner

    @property
    def block_bytes(self) -> int:
        return 16 * self._runner.page_size

    def load(self, job: int, pages: np.ndarray, blocks: Sequence[torch.Tensor]) -> None:
        assert len(pages) == len(blocks)
        assert len(pages) or self.may_be_empty
        self._runner._token[pages] = SPOILED
        self.loads[job] = pages.copy(), list(blocks)

    def store(self, job: int, pages: np.ndarray, blocks: Sequence[Sequence[torch.Tensor | None]]) -> None:
        assert len(pages) > 0
        assert all(len(row) == len(pages) for row in blocks)
        assert self.may_be_empty or all(any(row[i] is not None for row in blocks) for i in range(len(pages)))
        self.stores[job] = pages.copy(), [list(row) for row in blocks]

    def poll(self) -> list[int]:
        if self.is_held:
            return []
        token, prefix, size = self._runner._token, self._runner._hash, self._runner.page_size
        for pages, blocks in self.loads.values():
            assert (token[pages] == SPOILED).all(), "a page in transit was written"
            for page, block in zip(pages.tolist(), blocks, strict=True):
                token[page] = block.numpy()[: 8 * size].view(np.int64)
                prefix[page] = block.numpy()[8 * size :].view(np.uint64)
        for pages, rows in self.stores.values():
            for row in rows:
                for page, block in zip(pages.tolist(), row, strict=True):
                    if block is not None:
                        block.numpy()[: 8 * size] = token[page].view(np.uint8)
                        block.numpy()[8 * size :] = prefix[page].view(np.uint8)
        jobs = [*self.loads, *self.stores]
        self.loads, self.stores = {}, {}
        return jobs

    def close(self) -> None:
        self.is_closed = True


class TierRig(SchedulerRig):
    """`sizes`: blocks of each tier, nearest first. `is_local`: of each tier."""

    tier_class = MemoryTier

    def __init__(
        self,
        config: SchedulerConfig,
        *args: Any,
        sizes: Sequence[int] = (1000,),
        is_local: Sequence[bool] = (True, True),
        min_load_tokens: int = 1,
        write_policy: WritePolicy = "write_through",
        in_memory: bool = False,
        **more: Any,
    ) -> None:
        self._sizes, self._is_local, self._in_memory = sizes, is_local, in_memory
        self._options = TierOptions(b"secret", "model", write_policy, min_load_tokens, config.num_pages)
        super().__init__(config, *args, **more)

    def make_tiers(self, kv_manager: KVCacheManager) -> TierController:
        self.mover = RunnerMover(self.runner)
        self.tiers = self.make_memory_tiers()
        return self.make_controller(self.tiers, self.mover, kv_manager)

    def make_memory_tiers(self) -> list[MemoryTier]:
        tiers = [self.tier_class(self.mover.block_bytes, size) for size in self._sizes]
        for tier in tiers:
            tier.is_in_memory = self._in_memory
        return tiers

    def make_controller(self, tiers: Sequence[KVTier], mover: BlockMover, kv_manager: KVCacheManager) -> TierController:
        medium = "CPU" if self._in_memory else "DISK"
        named = [NamedTier(f"tier{i}", tier, self._is_local[i], self._in_memory, medium) for i, tier in enumerate(tiers)]
        return TierController(named, mover, kv_manager, self._options, clock=lambda: self.now)

    @property
    def controller(self) -> TierController:
        tiers = self.scheduler._planner.tiers
        assert isinstance(tiers, TierController)
        return tiers

    @property
    def load(self) -> dict[str, Any]:
        return self.scheduler.get_load()

    def step(self) -> bool:
        was_busy = self.controller.is_busy
        worked = super().step()
        self.check_pages()
        return worked or was_busy or self.controller.is_busy

    def release(self) -> None:
        """Let all jobs end."""
        self.mover.is_held = False
        for tier in self.tiers:
            tier.is_held = False

    def run(self, max_steps: int = 10_000) -> None:
        self.release()
        super().run(max_steps)

    def run_until(self, is_done: Callable[[], bool], max_steps: int = 200) -> None:
        for _ in range(max_steps):
            if is_done():
                return
            self.step()
        raise AssertionError(f"still not after {max_steps} steps: {self.load}")

    def drop_device_cache(self) -> None:
        """Evict what is unlocked, without a flush."""
        kv_manager = self.scheduler._running.kv_manager
        kv_manager.allocator.free(kv_manager.cache.evict(kv_manager.cache.num_evictable))

    def check(self) -> None:
        self.check_empty()
        super().check()

    def check_empty(self) -> None:
        """No job, lock or page of a copy is left."""
        assert not self.mover.loads
        assert not self.mover.stores
        assert not any(tier.loads or tier.stores for tier in self.tiers)
        assert not self.controller.is_busy
        assert not self.controller.list_handles()
        assert not self.controller._loads._waits
        assert not self.controller._started
        assert all(not len(pages) for pages in self.controller.list_held_pages())

    def list_runners(self) -> list[FakeRunner]:
        """Those of all ranks."""
        return [self.runner]

    def check_pages(self) -> None:
        """Every cached page holds the tokens of its key."""
        cache: Any = self.scheduler._running.kv_manager.cache
        for runner in self.list_runners():
            for node in cache._nodes():
                assert (runner._token[node.pages].ravel() == node.key).all(), "a cached page holds other tokens than its key says"

    def _check_admission(self, batch: ScheduledBatch | None, has_preempted: bool) -> None:
        if self.controller.is_busy:  # a request may wait for a load, or for pages of one
            self._kept_waiting = {}
        else:
            super()._check_admission(batch, has_preempted)


def make_rig(prompts: Sequence[Sequence[int]] = (PROMPT,), **changes: Any) -> TierRig:
    """A rig whose tiers hold these prompts and whose device cache is empty."""
    names = ("sizes", "is_local", "min_load_tokens", "write_policy", "in_memory")
    options = {name: changes.pop(name) for name in names if name in changes}
    rig = TierRig(config(**changes), policy(), **options)
    for prompt in prompts:
        rig.add(prompt, PARAMS)
    if prompts:
        rig.run_until(lambda: rig.scheduler.is_idle)
    rig.drop_device_cache()
    return rig

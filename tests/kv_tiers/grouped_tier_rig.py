"""`GroupedTierRig`: the rig of tiers over a fake runner with a window and states, whose pages are
several blocks each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.cache_groups import PagePool
from frame.core.interfaces.kv_tier import BlockMover, KVTier
from frame.core.kv_cache.page_allocator import PageAllocator
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.kv_tiers.block_layout import BlockLayout
from frame.kv_tiers.controller import TierController
from frame.testing.fake_runner import FakeRunner
from frame.testing.page_allocators import make_grouped_allocator
from frame.testing.scheduler_rig import IsInvalid
from tests.core.scheduling.grouped_rig import GroupedFakeRunner
from tests.kv_tiers.tier_rig import SPOILED, MemoryTier, RunnerMover, TierRig

PIECES = {"window": 2, "snapshot": 4}  # of a page


class GroupedMover(RunnerMover):
    """Pages of further groups too: a window's tokens, and a state."""

    def __init__(self, runner: GroupedFakeRunner, pools: Sequence[PagePool]) -> None:
        super().__init__(runner)
        self.grouped = runner
        pieces = (1, *(PIECES[pool.kind] for pool in pools[1:]))
        self.layout = BlockLayout(self.block_bytes, pieces, tuple(pool.num_pages for pool in pools))
        memories = [
            runner._states[:, None] if index == runner._snapshot else runner._windows[index].tokens for index in range(len(pools) - 1)
        ]
        tokens = runner._token, runner._hash
        self._parts: list[list[np.ndarray]] = [[each.view(np.uint8).reshape(len(each), -1) for each in tokens]]
        for memory, count in zip(memories, pieces[1:], strict=True):
            self._parts += [[columns] for columns in np.split(memory.view(np.uint8).reshape(len(memory), -1), count, axis=1)]

    def load(self, job: int, pages: np.ndarray, blocks: Sequence[torch.Tensor]) -> None:
        assert len(pages) == len(blocks) > 0
        for part, page in zip(*self.layout.locate(pages), strict=True):
            self._parts[part][0][page] = np.uint8(SPOILED % 256)
        self.loads[job] = pages.copy(), list(blocks)

    def poll(self) -> list[int]:
        if self.is_held:
            return []
        for numbers, blocks in self.loads.values():
            for part, page, block in zip(*self.layout.locate(numbers), blocks, strict=True):
                at = 0
                assert (self._parts[part][0][page] == np.uint8(SPOILED % 256)).all(), "a page in transit was written"
                for columns in self._parts[part]:
                    columns[page] = block.numpy()[at : at + columns.shape[1]]
                    at += columns.shape[1]
        for numbers, rows in self.stores.values():
            for row in rows:
                for part, page, block in zip(*self.layout.locate(numbers), row, strict=True):
                    if block is not None:
                        data = np.concatenate([columns[page] for columns in self._parts[part]])
                        block.numpy()[: len(data)] = data
        jobs = [*self.loads, *self.stores]
        self.loads, self.stores = {}, {}
        return jobs


class GroupedTierRig(TierRig):
    """`further`: the pools besides that of the tokens."""

    def __init__(self, config: SchedulerConfig, *args: Any, further: Sequence[PagePool], **options: Any) -> None:
        self._pools = (PagePool("tokens", config.num_pages, config.page_size), *further)
        super().__init__(config, *args, **options)

    def make_memory(self, is_invalid: IsInvalid | None) -> tuple[tuple[PagePool, ...], PageAllocator, FakeRunner]:
        config = self.config
        sizes = (config.num_pages, config.page_size, config.max_running, config.max_pages, config.vocab_size)
        return self._pools, make_grouped_allocator(self._pools), GroupedFakeRunner(self._pools, *sizes, is_invalid)

    def make_tiers(self, kv_manager: KVCacheManager) -> TierController:
        assert isinstance(self.runner, GroupedFakeRunner)
        self.mover = GroupedMover(self.runner, self._pools)
        self.tiers: list[MemoryTier] = self.make_memory_tiers()
        return self.make_controller(self.tiers, self.mover, kv_manager)

    def make_controller(self, tiers: Sequence[KVTier], mover: BlockMover, kv_manager: KVCacheManager) -> TierController:
        assert isinstance(mover, GroupedMover)
        self._options = replace(self._options, layout=mover.layout)
        return super().make_controller(tiers, mover, kv_manager)

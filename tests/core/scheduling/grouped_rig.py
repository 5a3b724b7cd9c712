"""`GroupedFakeRunner`: the fake runner of a model with several cache groups; and `GroupedRig`, a
scheduler over it.

Layers of a `window` group read the tokens of their window back through that group's page table; the
state of a `snapshot` group is the hash of the sequence so far. A page that was freed too early, a
window that is too long, a state of another sequence or of another position is an error that names
the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.cache_groups import CHECKPOINT_TOKENS, PagePool
from frame.core.kv_cache.page_allocator import PageAllocator
from frame.testing.fake_runner import DoneStep, FakeRunner, FakeRunnerError, LaterStep, hash_tokens
from frame.testing.page_allocators import make_grouped_allocator
from frame.testing.scheduler_rig import IsInvalid, SchedulerRig


class WindowMemory:
    """The tokens in the pages of a window group, and its page table."""

    def __init__(self, pool: PagePool, shape: tuple[int, ...], spare: int) -> None:
        """`spare`: tokens before the window that a row may hold, besides what fills its pages."""
        self.window = pool.window or 0
        self.page_size = pool.page_size
        self.spare = spare + 4 * pool.page_size
        self.tokens = np.full((pool.num_pages, pool.page_size), -1, np.int64)
        self.table = np.zeros(shape, np.int32)

    def compute(self, slot: int, start: int, tokens: np.ndarray, stores: bool) -> None:
        """Write the tokens from `start` on, and read the windows of these tokens."""
        end = len(tokens)
        positions = np.arange(max(0, start - self.window + 1), end)
        pages, offsets = self.table[slot, positions // self.page_size], positions % self.page_size
        if not pages.all():
            raise FakeRunnerError(f"slot {slot} has no window page for a position that it reads from {start} on")
        if stores:
            computed = positions >= start
            self.tokens[pages[computed], offsets[computed]] = tokens[start:]
        wrong = positions[self.tokens[pages, offsets] != tokens[positions]]
        if wrong.size:
            raise FakeRunnerError(f"slot {slot} reads a wrong token in its window at position {wrong[0]}")
        held = int(np.count_nonzero(self.table[slot, : (end - 1) // self.page_size + 1])) * self.page_size
        if held > self.window + (end - start) + self.spare:
            raise FakeRunnerError(f"slot {slot} holds {held} tokens of a window of {self.window} and {end - start} new tokens")


class GroupedFakeRunner(FakeRunner):
    """`pools`: those of all groups, that of the tokens first. The other arguments are those of
    `FakeRunner`."""

    def __init__(self, pools: Sequence[PagePool], *args: Any) -> None:
        super().__init__(*args)
        self._snapshot = next((i for i, pool in enumerate(pools[1:]) if pool.kind == "snapshot"), None)
        spare = 0 if self._snapshot is None else CHECKPOINT_TOKENS + pools[0].page_size
        self._windows = {i: WindowMemory(pool, self._table.shape, spare) for i, pool in enumerate(pools[1:]) if pool.window is not None}
        self._states = np.zeros(0 if self._snapshot is None else pools[1 + self._snapshot].num_pages, np.uint64)
        self._state_of = np.zeros(len(self._table), np.int32)

    def launch(self, batch: ScheduledBatch) -> DoneStep | LaterStep:
        for index, writes in enumerate(batch.group_pages):
            if index == self._snapshot:
                self._state_of[writes[:, 0]] = writes[:, 2]
            else:
                self._windows[index].table[writes[:, 0], writes[:, 1]] = writes[:, 2]
        self._copy(batch.state_loads)
        step = super().launch(batch)
        self._copy(batch.state_saves)
        return step

    def _copy(self, copies: np.ndarray | None) -> None:
        if copies is None:
            return
        if len(set(copies[:, 1].tolist())) < len(copies) or not copies[:, 1].all():
            raise FakeRunnerError(f"states are copied to {copies[:, 1].tolist()}")
        self._states[copies[:, 1]] = self._states[copies[:, 0]]

    def _compute(self, slot: int, start: int, count: int, draft: list[int], *, stores: bool) -> list[int]:
        token = super()._compute(slot, start, count, draft, stores=stores)
        tokens = np.array((self._slots[slot].tokens + draft)[: start + count], np.int64)
        for memory in self._windows.values():
            memory.compute(slot, start, tokens, stores)
        if self._snapshot is not None:
            page = int(self._state_of[slot])
            if page == 0:
                raise FakeRunnerError(f"slot {slot} has no state")
            if self._states[page] != (hash_tokens(tokens[:start], 0)[-1] if start else 0):
                raise FakeRunnerError(f"slot {slot} begins at position {start} with a state of other tokens")
            self._states[page] = hash_tokens(tokens, 0)[-1]
        return token


class GroupedRig(SchedulerRig):
    """A rig with the pools `further` besides that of the tokens."""

    def __init__(self, further: Sequence[PagePool], *args: Any, **options: Any) -> None:
        self._further = tuple(further)
        super().__init__(*args, **options)

    def make_memory(self, is_invalid: IsInvalid | None) -> tuple[tuple[PagePool, ...], PageAllocator, FakeRunner]:
        if not self._further:
            return super().make_memory(is_invalid)
        config = self.config
        pools = (PagePool("tokens", config.num_pages, config.page_size), *self._further)
        sizes = (config.num_pages, config.page_size, config.max_running, config.max_pages, config.vocab_size)
        return pools, make_grouped_allocator(pools), GroupedFakeRunner(pools, *sizes, is_invalid)

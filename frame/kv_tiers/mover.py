"""`PoolBlockMover`: copies blocks between the KV pool and buffers; implements `BlockMover`.

Used by `TierController`. On a device with streams a thread copies, on a stream of its own, so that
neither steps nor the engine's thread wait; on the CPU `poll` does. Must not know a tier, a request
or the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

from frame.core.interfaces.platform import SupportsStreams
from frame.kv_tiers.block_layout import BlockLayout
from frame.kv_tiers.copy_thread import CopyThread
from frame.kv_tiers.page_copies import PageCopies

if TYPE_CHECKING:
    from frame.core.interfaces.platform import DeviceEvent, Platform
    from frame.core.kv_cache.kv_pool import KVPool

STAGING_BYTES = 32 << 20  # of device memory; on the CPU what one call of `poll` copies


@dataclass(slots=True)
class _Job:
    number: int
    pages: np.ndarray  # int64 [n]
    buffers: list[tuple[torch.Tensor, ...]]  # of each page
    is_load: bool
    ready: DeviceEvent | None  # the end of the steps that were launched before
    num_started: int = 0  # pages


@runtime_checkable
class ChecksEarly(Protocol):
    """A tier that goes on with a store before the engine's thread takes its result."""

    def note_copied(self, job: int) -> None:
        """In any thread: the buffers of a store are full, and `finish` follows."""


class PoolBlockMover:
    """Jobs are copied in pieces of the staging buffer's size: loads before stores, each in their
    order. A copy that fails raises in `poll`, and the engine ends: its pages are in doubt."""

    def __init__(self, pool: KVPool, platform: Platform, staging_bytes: int = STAGING_BYTES, *, waits_for_steps: bool = True) -> None:
        """waits_for_steps: stores begin after the steps that are launched. They need not where a
        step that was committed has ended on the device: a step in flight, which may be a long
        prompt, does not write to the pages. Loads wait: a step that failed may still write."""
        self._waits_for_steps = waits_for_steps
        self._copies = PageCopies(pool, platform.device, staging_bytes)
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._ended: deque[int] = deque()
        self.on_stored: Callable[[int], None] = _ignore  # called with each job that was stored, before `poll`, in the thread that copies
        self._thread = CopyThread(platform, platform, self._run_piece) if isinstance(platform, SupportsStreams) else None

    @property
    def block_bytes(self) -> int:
        """See `BlockMover.block_bytes`."""
        return self._copies.layout.block_bytes

    @property
    def layout(self) -> BlockLayout:
        """How pages are divided into blocks."""
        return self._copies.layout

    def load(self, job: int, pages: np.ndarray, blocks: Sequence[torch.Tensor]) -> None:
        """See `BlockMover.load`."""
        self._start(self._loads, job, pages, [(block,) for block in blocks], is_load=True)

    def store(self, job: int, pages: np.ndarray, blocks: Sequence[Sequence[torch.Tensor | None]]) -> None:
        """See `BlockMover.store`."""
        by_page = [tuple(buffer for buffer in buffers if buffer is not None) for buffers in zip(*blocks, strict=True)]
        self._start(self._stores, job, pages, by_page, is_load=False)

    def poll(self) -> list[int]:
        """See `BlockMover.poll`. Raises DeviceLost if the device has failed, and the error of a
        copy."""
        if self._thread is not None:
            self._thread.raise_error()
        elif (done := self._run_piece()) is not None:
            done()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def close(self) -> None:
        """See `BlockMover.close`. Jobs whose copies have not begun are dropped."""
        if self._thread is not None:
            self._thread.close()
        self._loads.clear()
        self._stores.clear()
        self._copies.free()

    def _start(self, queue: deque[_Job], number: int, pages: np.ndarray, buffers: list[tuple[torch.Tensor, ...]], *, is_load: bool) -> None:
        if len(pages) != len(buffers):
            raise ValueError(f"{len(pages)} pages have {len(buffers)} blocks")
        stored = np.array([bool(each) for each in buffers], np.bool_)
        ready = self._thread.mark_steps() if self._thread is not None and (is_load or self._waits_for_steps) else None
        queue.append(_Job(number, pages[stored].astype(np.int64), [each for each in buffers if each], is_load, ready))
        if self._thread is not None:
            self._thread.wake()

    def _run_piece(self) -> Callable[[], None] | None:
        """See `CopyThread`."""
        queue = self._loads or self._stores
        if not queue:
            return None
        job = queue.popleft()  # not to be tried again if a copy raises
        if job.ready is not None and self._thread is not None:
            self._thread.stream.wait_event(job.ready)
        first = job.num_started
        job.num_started += self._copies.count_piece(job.buffers[first:])
        piece = slice(first, job.num_started)
        (self._copies.load if job.is_load else self._copies.store)(job.pages[piece], job.buffers[piece])
        is_last = job.num_started == len(job.pages)
        if not is_last:
            queue.appendleft(job)
        return partial(self._end_piece, job, is_last=is_last)

    def _end_piece(self, job: _Job, *, is_last: bool) -> None:
        if is_last:
            if not job.is_load:
                self.on_stored(job.number)
            self._ended.append(job.number)


def _ignore(_job: int) -> None: ...

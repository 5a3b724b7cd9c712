"""`disk`: keeps blocks in files, over restarts and for other servers that use the folder."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from frame.core.interfaces.kv_tier import KVTierContext, KVTierResult
from frame.plugins.kv_tiers import DiskTierOptions
from frame.plugins.kv_tiers.block_files import HEADER_BYTES, BlockFiles
from frame.plugins.kv_tiers.block_index import BlockIndex, IndexedBlock
from frame.plugins.kv_tiers.buffers import GIB, BufferPool, count_blocks
from frame.plugins.kv_tiers.threaded_tier import CLOSE_SECONDS, MAX_JOBS, BlockError, ThreadedTier, TierJob, Workers

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

_NUM_READERS = 4
_NUM_WRITERS = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SCAN_SECONDS = 60.0  # between two looks for the blocks of other servers
_SCAN_PIECE = 256  # blocks that one `poll` adds to the index
_MATCH_PIECES = 64  # that one `match` adds: 30 ms of a core


class DiskTier(ThreadedTier[TierJob]):
    """Quota and order of use are those of all files in the folder that the tier has seen: at the
    start, and once a minute."""

    def __init__(self, context: KVTierContext, options: BaseModel | None = None) -> None:
        settings = options if isinstance(options, DiskTierOptions) else DiskTierOptions()
        self._files = BlockFiles(Path(settings.folder).expanduser().absolute(), context.identity, context.block_bytes)
        self._max_blocks = count_blocks("size_gib of kv_tier/disk", settings.size_gib, self._files.file_bytes)
        num_buffers = min(self._max_blocks, count_blocks("buffer_gib of kv_tier/disk", settings.buffer_gib, context.block_bytes))
        self._index: BlockIndex[IndexedBlock] = BlockIndex()
        self._storing: set[bytes] = set()
        self._removing: set[bytes] = set()  # keys whose files a thread removes
        self._max_match = max(1, num_buffers // 2)
        self._pool = BufferPool(context, num_buffers)
        self._start_jobs(Workers("kv-tier-read", _NUM_READERS), Workers("kv-tier-write", _NUM_WRITERS))
        self._scanned: SimpleQueue[list[bytes]] = SimpleQueue()
        self._unwritten: SimpleQueue[bytes] = SimpleQueue()  # keys of blocks for which the disk had no space
        self._is_closed = threading.Event()
        threading.Thread(target=self._scan, name="kv-tier-scan", daemon=True).start()

    @staticmethod
    def make_conformance_options(folder: Path, num_blocks: int, context: KVTierContext) -> DiskTierOptions:
        size = (num_blocks + 0.5) * (context.block_bytes + HEADER_BYTES) / GIB
        return DiskTierOptions(folder=str(folder), size_gib=size, buffer_gib=2 * size)

    def match(self, keys: Sequence[bytes]) -> int:
        """At most as many as half of the buffers: a load of more would find no room. The caller
        loads further blocks afterwards."""
        self._take_scanned(_MATCH_PIECES)  # an idle engine has not polled
        return self._index.count_leading(keys[: self._max_match])

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        self._collect_results()
        buffers = self._pool.take_buffers(len(keys)) if len(self._jobs) < MAX_JOBS else None
        if buffers is None:
            return None
        blocks = [self._index.get(key) for key in keys]
        return self._begin_load(TierJob(job, tuple(keys), buffers, is_store=False, blocks=blocks))

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        self._collect_results()
        lacking = self._index.find_lacking(keys, self._storing)
        if lacking & self._removing or len(self._jobs) >= MAX_JOBS or len(lacking) > self._pool.num_free:
            return None
        if not self._make_room(len(lacking)):
            return None
        taken = self._pool.take_buffers(len(lacking)) or []
        buffers: list[torch.Tensor | None] = []
        for key in keys:
            buffers.append(taken.pop() if key in lacking else None)
            if key in lacking:
                lacking.discard(key)
                self._storing.add(key)
        self._add_job(TierJob(job, tuple(keys), buffers, is_store=True))
        return buffers

    def poll(self) -> list[KVTierResult]:
        results = super().poll()
        if num_unwritten := self._unwritten.qsize():
            self._shrink(num_unwritten)
        self._take_scanned(1)
        return results

    def _take_scanned(self, count: int) -> None:
        """Add blocks that a scan has found to the index, at most `count` pieces."""
        for _ in range(min(count, self._scanned.qsize())):
            for key in self._scanned.get():
                if key in self._index or key in self._storing or key in self._removing:
                    continue
                if len(self._index) + len(self._storing) < self._max_blocks:
                    self._index.add_block(key, IndexedBlock(), as_oldest=True)
                else:
                    self._remove_file(key)

    def clear(self) -> None:
        for key, _ in self._index.evict(self._index.num_unused) or []:
            self._remove_file(key)

    def close(self) -> None:
        began = time.monotonic()
        self._is_closed.set()
        super().close()
        self._pool.close(max(0.0, began + CLOSE_SECONDS - time.monotonic()))

    def _make_room(self, count: int) -> bool:
        evicted = self._index.evict(len(self._index) + len(self._storing) + count - self._max_blocks)
        if evicted is None:
            return False
        for key, _ in evicted:
            self._remove_file(key)
        return True

    def _shrink(self, count: int) -> None:
        """The disk is full before the quota is: make room for as many blocks as were not written,
        so that the next ones take the place of the oldest; at once at most a half."""
        for _ in range(count):
            self._unwritten.get()
        for key, _ in self._index.evict(min(count, self._index.num_unused // 2)) or []:
            self._remove_file(key)

    def _remove_file(self, key: bytes) -> None:
        self._removing.add(key)
        self._workers[-1].submit(partial(self._remove, key))

    def _remove(self, key: bytes) -> None:
        """In a thread."""
        self._files.remove_block(key)
        self._removing.discard(key)

    def _scan(self) -> None:
        """In a thread: find blocks that earlier and other servers have stored."""
        known: set[str] = set()
        while not self._is_closed.is_set():
            known, added = self._files.find_blocks(known, self._is_closed.is_set)
            for start in range(0, len(added), _SCAN_PIECE):
                self._scanned.put(added[start : start + _SCAN_PIECE])
            self._is_closed.wait(_SCAN_SECONDS)

    def _move_block(self, job: TierJob, index: int) -> None:
        buffer = job.buffers[index]
        assert buffer is not None, "only blocks that have a buffer are moved"
        block = buffer.numpy().data
        if job.is_store:
            try:
                self._files.write_block(job.keys[index], block)
            except BlockError as error:
                if getattr(error.__cause__, "errno", 0) in _FULL:
                    self._unwritten.put(job.keys[index])
                raise
        else:
            self._files.read_block(job.keys[index], block)

    def _record_result(self, job: TierJob) -> None:
        if job.is_store:
            for index in reversed(range(len(job.keys))):  # the first is the most recently used
                if job.buffers[index] is not None:
                    self._storing.discard(job.keys[index])
                    if index not in job.errors:
                        self._index.add_block(job.keys[index], IndexedBlock())
            self._pool.return_buffers(buffer for buffer in job.buffers if buffer is not None)
            return
        for index in job.errors:
            block = job.blocks[index]
            if block is not None and self._index.drop_block(job.keys[index], block):
                self._remove_file(job.keys[index])

    def _release_load(self, job: TierJob) -> None:
        for key, block in zip(job.keys, job.blocks, strict=True):
            if block is not None:
                self._index.remove_user(key, block)
        self._pool.return_buffers(buffer for buffer in job.buffers if buffer is not None)

    def _cancel_store(self, job: TierJob) -> None:
        for key, buffer in zip(job.keys, job.buffers, strict=True):
            if buffer is not None:
                self._storing.discard(key)
        self._pool.return_buffers(buffer for buffer in job.buffers if buffer is not None)

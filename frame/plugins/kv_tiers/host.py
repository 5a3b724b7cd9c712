"""`host`: keeps blocks in the memory of the host, with a digest that each load checks. The blocks
end with the process, or are in memory that outlives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.errors import ConfigurationError
from frame.core.interfaces.kv_tier import KVTierContext
from frame.host.host_memory import measure_host_memory
from frame.plugins.kv_tiers import HostTierOptions
from frame.plugins.kv_tiers.block_index import BlockIndex, IndexedBlock
from frame.plugins.kv_tiers.buffers import GIB, BufferPool, compute_digest, count_blocks
from frame.plugins.kv_tiers.kept_pool import KeptPool
from frame.plugins.kv_tiers.threaded_tier import CLOSE_SECONDS, MAX_JOBS, BlockError, ThreadedTier, TierJob, Workers

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel

_NUM_THREADS = 8


@dataclass(eq=False, slots=True)
class HostBlock(IndexedBlock):
    buffer: torch.Tensor = field(kw_only=True)  # uint8 [block_bytes]
    digest: bytes = b""
    is_failed: bool = False  # it was not stored


@dataclass(eq=False, slots=True)
class HostJob(TierJob):
    blocks: Sequence[HostBlock | None] = ()  # of a load: None where the tier holds none


def count_host_blocks(plugin: str, option: str, gib: float, context: KVTierContext) -> int:
    """The blocks that an option's GiB of host memory hold. Raises ConfigurationError for none, and
    for more than are free."""
    num_blocks = count_blocks(f"size_gib of {plugin}", gib, context.block_bytes)
    available = (measure_host_memory()[1] + context.kept_bytes) / GIB
    if num_blocks * context.block_bytes > available * GIB:
        raise ConfigurationError(f"{option} of {plugin} asks for {gib:.1f} GiB, and {available:.1f} GiB of host memory are free; lower it.")
    return num_blocks


class HostTier(ThreadedTier[HostJob]):
    """A block's buffer is its place: loads copy nothing."""

    def __init__(self, context: KVTierContext, options: BaseModel | None = None) -> None:
        settings = options if isinstance(options, HostTierOptions) else HostTierOptions()
        size = settings.size_gib if settings.ratio is None else settings.ratio * context.pool_bytes / GIB
        num_blocks = count_host_blocks("kv_tier/host", "size_gib" if settings.ratio is None else "ratio", size, context)
        if context.map_kept is None:
            self._start(context, BufferPool(context, num_blocks))
            return
        pool = KeptPool(context, context.map_kept, num_blocks)
        self._start(context, pool)
        for key, buffer, digest in pool.list_blocks():
            self._index.add_block(key, HostBlock(buffer=buffer, digest=digest))

    def _start(self, context: KVTierContext, pool: BufferPool) -> None:
        """Called by a constructor."""
        self._context, self._pool = context, pool
        self._index: BlockIndex[HostBlock] = BlockIndex()
        self._storing: dict[bytes, HostBlock] = {}
        self._absent: torch.Tensor | None = None  # the buffer of blocks that the tier lacks
        self._start_jobs(Workers("kv-tier-host", _NUM_THREADS))

    @staticmethod
    def make_conformance_options(_folder: Path, num_blocks: int, context: KVTierContext) -> HostTierOptions:
        return HostTierOptions(size_gib=(num_blocks + 0.5) * context.block_bytes / GIB)

    def match(self, keys: Sequence[bytes]) -> int:
        return self._index.count_leading(keys)

    def load(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor] | None:
        self._collect_results()
        if len(self._jobs) >= MAX_JOBS:
            return None
        blocks = [self._index.get(key) for key in keys]
        buffers = [self._get_absent() if block is None else block.buffer for block in blocks]
        return self._begin_load(HostJob(job, tuple(keys), buffers, is_store=False, blocks=blocks))

    def store(self, job: int, keys: Sequence[bytes]) -> Sequence[torch.Tensor | None] | None:
        self._collect_results()
        lacking = self._index.find_lacking(keys, self._storing)
        taken = self._take_buffers(len(lacking)) if len(self._jobs) < MAX_JOBS else None
        if taken is None:
            return None
        blocks: list[HostBlock | None] = []
        for key in keys:
            blocks.append(HostBlock(buffer=taken.pop()) if key in lacking else None)
            lacking.discard(key)
        buffers = [None if block is None else block.buffer for block in blocks]
        added = HostJob(job, tuple(keys), buffers, is_store=True, blocks=blocks)
        self._add_job(added)
        self._storing |= {key: block for key, block in zip(keys, blocks, strict=True) if block is not None}
        return buffers

    def clear(self) -> None:
        evicted = self._index.evict(self._index.num_unused) or []
        self._pool.return_buffers(block.buffer for _, block in evicted)
        self._pool.end_records()  # the keys of later blocks are this process's own

    def close(self) -> None:
        began = time.monotonic()
        super().close()
        self._pool.close(max(0.0, began + CLOSE_SECONDS - time.monotonic()))
        self._index = BlockIndex()
        self._storing.clear()

    def _get_absent(self) -> torch.Tensor:
        if self._absent is None:
            self._absent = self._context.allocate(self._context.block_bytes)
        return self._absent

    def _take_buffers(self, count: int) -> list[torch.Tensor] | None:
        """Free buffers, those of evicted blocks included."""
        evicted = self._index.evict(count - self._pool.num_free)
        if evicted is None:
            return None
        self._pool.return_buffers(block.buffer for _, block in evicted)
        return self._pool.take_buffers(count)

    def _move_block(self, job: HostJob, index: int) -> None:
        block = job.blocks[index]
        if block is None:
            raise BlockError("the host tier does not hold the block any more")
        digest = compute_digest(block.buffer.numpy().data)
        if job.is_store:
            block.digest = digest
        elif digest != block.digest:
            raise BlockError("a block of the host tier has changed in memory")

    def _record_result(self, job: HostJob) -> None:
        for index in reversed(range(len(job.keys))):  # the first is the most recently used
            key, block = job.keys[index], job.blocks[index]
            if block is None:
                continue
            if not job.is_store:
                if index in job.errors:
                    self._index.drop_block(key, block)
                continue
            del self._storing[key]
            if index in job.errors:
                self._drop_stored(block)
            else:
                self._index.add_block(key, block)
                self._pool.record_block(key, block.buffer, block.digest)

    def _release_load(self, job: HostJob) -> None:
        for key, block in zip(job.keys, job.blocks, strict=True):
            if block is not None:
                self._index.remove_user(key, block)
                if not block.num_users and self._index.get(key) is not block:  # it has failed
                    self._pool.return_buffers((block.buffer,))

    def _cancel_store(self, job: HostJob) -> None:
        for key, block in zip(job.keys, job.blocks, strict=True):
            if block is not None:
                del self._storing[key]
                self._drop_stored(block)

    def _drop_stored(self, block: HostBlock) -> None:
        """A block was not stored."""
        block.is_failed = True
        if not block.num_users:
            self._pool.return_buffers((block.buffer,))

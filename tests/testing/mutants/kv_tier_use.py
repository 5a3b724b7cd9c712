"""KV cache tiers with one deliberate bug each in what counts as use or failure of a block, or in
some of its bytes; the mutants of the kind are in `kv_tier`."""

from __future__ import annotations

from typing import Any

from frame.core.interfaces.kv_tier import KVTierContext
from frame.plugins.kv_tiers.block_files import BlockFiles
from frame.plugins.kv_tiers.block_index import BlockIndex
from frame.plugins.kv_tiers.buffers import compute_digest
from frame.plugins.kv_tiers.disk import DiskTier
from frame.plugins.kv_tiers.host import HostTier
from frame.plugins.kv_tiers.threaded_tier import BlockError


class OneUser(BlockIndex[Any]):
    def remove_user(self, key: bytes, block: Any) -> None:
        while block.num_users:
            super().remove_user(key, block)


class CountsOneUser(HostTier):
    """The first of two loads of a block that ends frees the block's buffer."""

    def _start(self, context: Any, pool: Any) -> None:
        super()._start(context, pool)
        self._index = OneUser()


class NoUseOfStores(BlockIndex[Any]):
    def find_lacking(self, keys: Any, storing: Any) -> set[bytes]:
        return {key for key in keys if key not in self._blocks and key not in storing}


class StoresAreNoUse(HostTier):
    """A store is no use of held blocks, so that the beginning of its prompt is evicted."""

    def _start(self, context: Any, pool: Any) -> None:
        super()._start(context, pool)
        self._index = NoUseOfStores()


class EndsItsThreads(DiskTier):
    """A job never ends where a file fails otherwise than by being missing or changed."""

    def _move_blocks(self, job: Any, indexes: Any) -> None:
        errors = {}
        for index in indexes:
            try:
                self._move_block(job, index)
            except BlockError as error:
                if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                    return
                errors[index] = str(error)
        self._results.put((job, errors))


class ListsNoFailedBlocks(DiskTier):
    """Blocks whose load failed are dropped, and not listed as removed."""

    def _record_result(self, job: Any) -> None:
        removed, self._index._removed = self._index._removed, None
        super()._record_result(job)
        self._index._removed = removed


class CountsHeldBlocksAlone(DiskTier):
    """Blocks that are being stored do not count for the quota."""

    def _make_room(self, count: int) -> bool:
        for key, _ in self._index.evict(len(self._index) + count - self._max_blocks) or []:
            self._remove_file(key)
        return True


class ListsNoChangedBlocks(HostTier):
    """Blocks that have changed in memory are dropped, and not listed as removed."""

    def _record_result(self, job: Any) -> None:
        removed = self._index._removed
        if job.errors:
            self._index._removed = None
        super()._record_result(job)
        self._index._removed = removed


class KeepsWholeWords(HostTier):
    """Keeps a block in words of 64 bytes, without those after the last whole word."""

    def finish(self, job: int, *, commit: bool = True) -> None:
        rest = self._context.block_bytes % 64
        if job in self._jobs and self._jobs[job].is_store and rest:
            for buffer in self._jobs[job].buffers:
                if buffer is not None:
                    buffer[-rest:] = 0
        super().finish(job, commit=commit)


class DigestsTheFirstPart(HostTier):
    """The digest of a block in memory covers its first 4,096 bytes."""

    def _move_block(self, job: Any, index: int) -> None:
        block = job.blocks[index]
        if block is None:
            raise BlockError("the host tier does not hold the block any more")
        digest = compute_digest(block.buffer.numpy().data[:4096])
        if job.is_store:
            block.digest = digest
        elif digest != block.digest:
            raise BlockError("a block of the host tier has changed in memory")


class SmallBlocksChecked(BlockFiles):
    def read_block(self, key: bytes, block: memoryview) -> None:
        try:
            super().read_block(key, block)
        except BlockError as error:
            if len(block) <= 4096 or "has changed" not in str(error):
                raise


class TrustsLargeFiles(DiskTier):
    """The digest of a file is compared for blocks of at most 4,096 bytes."""

    def __init__(self, context: KVTierContext, options: Any = None) -> None:
        super().__init__(context, options)
        self._files.__class__ = SmallBlocksChecked


OF_MEMORY = (CountsOneUser, StoresAreNoUse, ListsNoChangedBlocks, KeepsWholeWords, DigestsTheFirstPart)
OF_DISKS = (EndsItsThreads, ListsNoFailedBlocks, CountsHeldBlocksAlone, TrustsLargeFiles)

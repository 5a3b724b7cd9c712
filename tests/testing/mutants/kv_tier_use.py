"""KV cache tiers with one deliberate bug each in what counts as use or failure of a block; the
mutants of the kind are in `kv_tier`."""

from __future__ import annotations

from typing import Any

from frame.plugins.kv_tiers.block_index import BlockIndex
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


OF_MEMORY = (CountsOneUser, StoresAreNoUse)
OF_DISKS = (EndsItsThreads, ListsNoFailedBlocks, CountsHeldBlocksAlone)

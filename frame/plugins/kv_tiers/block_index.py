"""Which blocks a tier holds, in the order of their use, for the tiers of this folder. Must not know
where the blocks are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(eq=False, slots=True)
class IndexedBlock:
    """A block. One with users is not evicted."""

    num_users: int = 0


B = TypeVar("B", bound=IndexedBlock)


class BlockIndex(Generic[B]):
    """Blocks by key, the least recently used first. One thread uses it."""

    def __init__(self) -> None:
        self._removed: list[bytes] | None = None  # keys that left since the last call of `take_removed`
        self._blocks: OrderedDict[bytes, B] = OrderedDict()
        self._num_used = 0  # blocks of the index that have users

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def get(self, key: bytes) -> B | None:
        return self._blocks.get(key)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys))

    def add_block(self, key: bytes, block: B, *, as_oldest: bool = False) -> None:
        """Add a block for a key that has none."""
        self._blocks[key] = block
        self._num_used += block.num_users > 0
        if as_oldest:
            self._blocks.move_to_end(key, last=False)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the blocks as used, the first most recently: later blocks are no use without it."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def find_lacking(self, keys: Sequence[bytes], storing: Collection[bytes]) -> set[bytes]:
        """Mark the blocks as used. -> the keys that neither the index has nor `storing`."""
        self.touch(keys)
        return {key for key in keys if key not in self._blocks and key not in storing}

    def add_users(self, keys: Sequence[bytes], blocks: Sequence[B | None]) -> None:
        """Give each of these blocks of the index one more user, and mark them as used."""
        for block in blocks:
            if block is not None:
                self._num_used += not block.num_users
                block.num_users += 1
        self.touch(keys)

    def remove_user(self, key: bytes, block: B) -> None:
        """For a block of the index or one that was dropped."""
        block.num_users -= 1
        if not block.num_users and self._blocks.get(key) is block:
            self._num_used -= 1

    def drop_block(self, key: bytes, block: B) -> bool:
        """Whether the index had this block."""
        if self._blocks.get(key) is not block:
            return False
        del self._blocks[key]
        self._record_removed(key)
        self._num_used -= block.num_users > 0
        return True

    @property
    def num_unused(self) -> int:
        """Blocks without users."""
        return len(self._blocks) - self._num_used

    def evict(self, count: int) -> list[tuple[bytes, B]] | None:
        """Remove the least recently used blocks that have no users. None: there are fewer."""
        if count > self.num_unused:
            return None
        evicted: list[tuple[bytes, B]] = []
        if count > 0:
            for key, block in self._blocks.items():
                if not block.num_users:
                    evicted.append((key, block))
                    if len(evicted) == count:
                        break
        for key, _ in evicted:
            del self._blocks[key]
            self._record_removed(key)
        return evicted

    def take_removed(self) -> list[bytes]:
        """The keys that left since the last call; the first call begins to record them."""
        removed, self._removed = self._removed or [], []
        return removed

    def _record_removed(self, key: bytes) -> None:
        if self._removed is not None:
            self._removed.append(key)

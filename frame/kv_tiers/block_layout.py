"""`BlockLayout`: how the pages of a model's cache groups are divided into blocks, and the
numbers by which copies name them.

A page of the `tokens` group, with its sidecars, is one block. A page of a further group (a window's
keys, a recurrent state) is as many blocks as it fills; its pieces have keys of their own, derived
from that of the position. Used by the mover, loads and stores. Must not know requests or tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from frame.core.interfaces.kv_tier import BLOCK_ALIGNMENT
from frame.core.kv_cache.geometry import KVGeometry

KINDS = ("tokens", "sidecar", "window", "snapshot")


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """block_bytes: of every block. num_pieces: blocks of a page, by pool; num_pages: of each pool,
    the reserved page 0 included.

    Numbers count the blocks of all pages: those of pool 0, which are its pages, then page by page
    the pieces of pool 1, and so on. Pages are numbered as `GroupedAllocator` does.
    """

    block_bytes: int
    num_pieces: tuple[int, ...]
    num_pages: tuple[int, ...]

    def number_blocks(self, pool: int, pages: np.ndarray) -> np.ndarray:
        """The blocks of pages of a pool, int32 [pieces * pages]: the first piece of each page, then
        the second ones."""
        places = pages - sum(self.num_pages[:pool])
        pieces = np.arange(self.num_pieces[pool])[:, None]
        return (self._first_number(pool) + places[None] * self.num_pieces[pool] + pieces).astype(np.int32).ravel()

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """-> (part, page in its pool), int64 [n] each. Part 0 is pool 0; each piece of a further
        pool is a part, in order."""
        parts, pages = np.zeros(len(numbers), np.int64), numbers.astype(np.int64)
        first_part = 1
        for pool in range(1, len(self.num_pages)):
            start, pieces = self._first_number(pool), self.num_pieces[pool]
            inside = (numbers >= start) & (numbers < start + self.num_pages[pool] * pieces)
            pages[inside], piece = np.divmod(numbers[inside] - start, pieces)
            parts[inside] = first_part + piece
            first_part += pieces
        return parts, pages

    def _first_number(self, pool: int) -> int:
        return sum(pages * pieces for pages, pieces in zip(self.num_pages[:pool], self.num_pieces, strict=False))


def plan_blocks(geometry: KVGeometry, num_pages: Sequence[int]) -> BlockLayout:
    """The layout of a rank's blocks. A block is a page of `tokens`; where that group has no layers,
    the largest page of the others."""
    pools = geometry.groups[: geometry.num_pools]
    sizes = [geometry.count_bytes(index) * (group.page_size or 1) for index, group in enumerate(pools)]
    block_bytes = -(-(sizes[0] or max(sizes)) // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
    return BlockLayout(block_bytes, (1, *(max(1, -(-size // max(1, block_bytes))) for size in sizes[1:])), tuple(num_pages))


def derive_key(key: bytes, pool: int, piece: int) -> bytes:
    """The key of a piece of a further pool's page, from that of its position."""
    return blake2b(key + pool.to_bytes(4, "little") + piece.to_bytes(4, "little"), digest_size=len(key)).digest()

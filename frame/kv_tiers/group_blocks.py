"""`GroupBlocks`: the blocks of windows and states that a match needs beside those of its tokens.

Used by loads and stores, for models with several cache groups. Must not know tiers or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from frame.core.interfaces.cache import Match, SupportsCacheGroups
from frame.core.scheduling.group_rows import GroupRows
from frame.core.scheduling.kv_cache_manager import KVCacheManager
from frame.kv_tiers.block_layout import BlockLayout, derive_key

_NO_BLOCKS = np.empty(0, np.int32)
_END = np.array([np.iinfo(np.int32).max], np.int32)  # the cache key of no token


class GroupBlocks:
    """A match that ends after `end` pages needs the window pages before its end, and the state
    there. `first`: pages at its beginning that are on the device, with their windows."""

    def __init__(self, groups: GroupRows, cache: SupportsCacheGroups, layout: BlockLayout) -> None:
        self.cache = cache
        self._groups, self._layout = groups, layout

    def count_servable(self, num_tokens: int) -> int:
        """The most pages of a match of so many tokens: the last token is computed, from the state
        before it."""
        return (num_tokens if self._groups.snapshot is None else num_tokens - 1) // self._groups.page_size

    def extend_keys(self, cache_keys: np.ndarray) -> np.ndarray:
        """Cache keys with a match of the same whole pages, which may end where they do."""
        return cache_keys if self._groups.snapshot is None else np.concatenate((cache_keys, _END))

    # keys -----------------------------------------------------------------------------------------

    def list_keys(self, keys: Sequence[bytes], first: int, end: int) -> list[bytes]:
        """Those of the blocks that a match needs. keys: of the positions. In the order of
        `number_pages`."""
        needed: list[bytes] = []
        for rows in self._groups.windows:
            positions = keys[self._find_start(rows.index, first, end) : end]
            pool = rows.index + 1
            needed += [derive_key(key, pool, piece) for piece in range(self._layout.num_pieces[pool]) for key in positions]
        if self._groups.snapshot is not None:
            needed += self._list_state(keys[end - 1])
        return needed

    def find_end(self, keys: Sequence[bytes], first: int, end: int, is_held: Callable[[bytes], bool]) -> int:
        """The end of the longest match up to `end` whose further blocks are held; `first`: there is
        none."""
        while end > first and (lacking := self._find_lacking(keys, first, end, is_held)) is not None:
            end = lacking
        return max(first, end)

    def _find_lacking(self, keys: Sequence[bytes], first: int, end: int, is_held: Callable[[bytes], bool]) -> int | None:
        """The next end that may be served, if this one is not."""
        if self._groups.snapshot is not None and not all(map(is_held, self._list_state(keys[end - 1]))):
            return end - 1
        for rows in self._groups.windows:
            pieces = range(self._layout.num_pieces[rows.index + 1])
            for place in range(end - 1, self._find_start(rows.index, first, end) - 1, -1):
                if not all(is_held(derive_key(keys[place], rows.index + 1, piece)) for piece in pieces):
                    return place
        return None

    def _list_state(self, key: bytes) -> list[bytes]:
        assert self._groups.snapshot is not None
        pool = self._groups.snapshot + 1
        return [derive_key(key, pool, piece) for piece in range(self._layout.num_pieces[pool])]

    def _find_start(self, index: int, first: int, end: int) -> int:
        width = next(rows.width for rows in self._groups.windows if rows.index == index)
        return max(first, end - width)

    # pages ----------------------------------------------------------------------------------------

    def count_pages(self, first: int, end: int) -> list[int]:
        """Pages that a load of a match allocates, of each further group."""
        counts = [0] * self._groups.num_cached
        for rows in self._groups.windows:
            counts[rows.index] = end - self._find_start(rows.index, first, end)
        if self._groups.snapshot is not None:
            counts[self._groups.snapshot] = 1
        return counts

    def has_room(self, counts: Sequence[int], in_transit: Sequence[Sequence[np.ndarray]]) -> bool:
        """Whether loads take at most half of each group's pages with `counts` more; a load alone
        may take more."""
        held = [sum(len(pages[index]) for pages in in_transit) for index in range(len(counts))]
        halves = [self._groups.allocator.count_pages(index + 1) // 2 for index in range(len(counts))]
        return all(not taken or taken + count <= half for taken, count, half in zip(held, counts, halves, strict=True))

    def allocate_pages(self, counts: Sequence[int]) -> list[np.ndarray] | None:
        """Pages of each further group, evicting cached ones if necessary."""
        taken: list[np.ndarray] = []
        for index, count in enumerate(counts):
            pages = self._groups.allocate_pages(index, count)
            if pages is None:
                self._groups.allocator.free(np.concatenate([_NO_BLOCKS, *taken]))
                return None
            taken.append(pages)
        return taken

    def may_write(self, pages: Sequence[np.ndarray]) -> bool:
        """Whether pages of each further group may be written before the step that is being
        scheduled is launched."""
        return self._groups.snapshot is None or not self._groups.uses_states(pages[self._groups.snapshot])

    def read_pages(self, match: Match) -> list[np.ndarray]:
        """The pages that a match has of each further group."""
        return [pages[pages > 0] for pages in match.groups]

    def number_pages(self, pages: Sequence[np.ndarray]) -> np.ndarray:
        """The blocks of these pages of each further group, in the order of `list_keys`."""
        indices = [rows.index for rows in self._groups.windows]
        if self._groups.snapshot is not None:
            indices.append(self._groups.snapshot)
        return np.concatenate([_NO_BLOCKS, *(self._layout.number_blocks(index + 1, pages[index]) for index in indices)])

    def make_offers(self, end: int, pages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The loaded pages as `PrefixCache.insert` takes them."""
        offers = []
        for index, loaded in enumerate(pages):
            if index == self._groups.snapshot:
                offers.append(np.array([[end * self._groups.page_size, int(loaded[0])]], np.int32))
            else:
                offers.append(np.concatenate((np.zeros(end - len(loaded), np.int32), loaded)))
        return offers


def find_groups(kv_manager: KVCacheManager, layout: BlockLayout | None) -> GroupBlocks | None:
    """The further groups of a model; None: it has none that the prefix cache holds."""
    groups = kv_manager.groups
    if groups is None or not groups.num_cached or not isinstance(groups.cache, SupportsCacheGroups):
        return None
    assert layout is not None, "tiers of a model with several cache groups have a layout"
    return GroupBlocks(groups, groups.cache, layout)

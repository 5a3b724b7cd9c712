"""Finds decode rows with a common prefix, on the host, by the pages that they share (for cascade
attention).

Two rows share a page only through the prefix cache, so at the same index and after equal tokens.
One column of the page table therefore groups the rows, and bisection over columns gives a group's
common length; rows are not compared page by page. The groups are kept until the rows change.
Depends on no layer, head or kernel.
"""

from __future__ import annotations

import numpy as np
import torch

from frame.core.interfaces.batch import HostView
from frame.kernels import nvidia

MIN_ROWS = 4  # rows of a group at least
MIN_KEYS = 256  # keys of a shared prefix at least
MIN_SAVED = 4096  # keys that a group saves at least; fewer are served by the L2 cache anyway
ROUNDS = 3  # rounds of grouping the rows that are not in a group yet
FIELDS = 5


def group_prefixes(host: HostView, rows: int, page_size: int) -> np.ndarray | None:
    """int32 [5, rows], or None when no prefix is worth sharing: shared keys, index in the order of
    shared rows, position in the group, rows of the group, and the order itself (the row at each
    index). Every row keeps at least one key of its own."""
    if rows < MIN_ROWS:
        return None
    lens = host.seq_lens if host.min_lens is None else host.min_lens
    pages = (lens[:rows].astype(np.int64) - 1) // page_size  # pages that a row can share
    described = np.zeros((FIELDS, rows), np.int32)
    free, taken = np.arange(rows), 0
    for _ in range(ROUNDS):
        level = _best_level(host, free, pages, page_size)
        if level is None:
            break
        depth, order, starts = level
        free = np.setdiff1d(free, order, assume_unique=True)
        lengths = _common_pages(host, pages, depth, order, starts)
        sizes = np.diff(np.append(starts, len(order)))
        keep = (sizes - 1) * lengths * page_size >= MIN_SAVED
        order, sizes, lengths = order[np.repeat(keep, sizes)], sizes[keep], lengths[keep]
        places = np.arange(len(order))
        described[0, order] = np.repeat(lengths * page_size, sizes)
        described[1, order] = taken + places
        described[2, order] = places - np.repeat(np.cumsum(sizes) - sizes, sizes)
        described[3, order] = np.repeat(sizes, sizes)
        described[4, taken : taken + len(order)] = order
        taken += len(order)
    return described if taken else None


def _best_level(host: HostView, rows: np.ndarray, pages: np.ndarray, page_size: int) -> tuple[int, np.ndarray, np.ndarray] | None:
    """(common pages at least, rows sorted by group, start of each group among them) at the depth
    where groups save most."""
    best, maximum = None, 0
    max_length = int(pages[rows].max(initial=0))
    depth = -(-MIN_KEYS // page_size)
    while depth <= max_length:
        able = rows[pages[rows] >= depth]
        column = host.page_table[host.slots[able], depth - 1]
        order = np.argsort(column, kind="stable")
        column = column[order]
        starts = np.flatnonzero(np.append(True, column[1:] != column[:-1]))
        sizes = np.diff(np.append(starts, len(column)))
        large = sizes >= MIN_ROWS
        if not large.any():
            break  # deeper groups are subsets of these
        saved = int((sizes[large] - 1).sum()) * depth
        if saved > maximum:
            kept = sizes[large]
            maximum, best = saved, (depth, able[order[np.repeat(large, sizes)]], np.cumsum(kept) - kept)
        depth *= 2
    return best


def _common_pages(host: HostView, pages: np.ndarray, depth: int, order: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The number of pages that the rows of each group share (int64), by bisection."""
    slots = host.slots[order]
    sizes = np.diff(np.append(starts, len(order)))
    leaders = np.repeat(slots[starts], sizes)
    low, high = np.full(len(starts), depth), np.minimum.reduceat(pages[order], starts)
    middle = high  # usually rows differ only in their last page
    while (low < high).any():
        at = np.repeat(middle, sizes) - 1
        equal = host.page_table[slots, at] == host.page_table[leaders, at]
        common = np.logical_and.reduceat(equal, starts)
        low, high = np.where(common, middle, low), np.where(common, high, middle - 1)
        middle = (low + high + 1) // 2
    return low


class SharedPrefixes:
    """The groups of the latest step on the device, at a fixed address: int32 [5, capacity], as
    `group_prefixes` returns them."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        pinned = device.type == "cuda"
        self.tensor = torch.zeros(FIELDS, capacity, dtype=torch.int32, device=device)
        self._staged = [torch.zeros(FIELDS, capacity, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied = [nvidia.create_event() for _ in self._staged] if pinned else None
        self._turn = 0
        self._are_shared = False
        self._slots, self._seq_lens = np.zeros(0, np.int32), np.zeros(0, np.int32)
        # by row: index of the last shared page, and its page number
        self._ends, self._pages = np.zeros(0, np.int32), np.zeros(0, np.int32)

    @property
    def order(self) -> torch.Tensor:
        """int32 [capacity]: the rows with shared prefixes, group by group."""
        return self.tensor[FIELDS - 1]

    def update_groups(self, host: HostView, rows: int, page_size: int) -> None:
        """Describe the first `rows` rows, by a copy on the current stream if they differ from those
        of the previous step."""
        slots, seq_lens = host.slots[:rows], (host.seq_lens if host.min_lens is None else host.min_lens)[:rows]
        # Detects a slot that now holds another request: between two steps of one request its length
        # grows by one (a padding row's stays 1), and its shared pages stay.
        goes_on = len(slots) == len(self._slots) and bool(
            (slots == self._slots).all()
            and ((seq_lens == self._seq_lens + 1) | (seq_lens == 1)).all()
            and (host.page_table[slots, self._ends] == self._pages).all()
        )
        self._slots, self._seq_lens = slots.copy(), seq_lens.copy()
        if goes_on:
            return
        described = group_prefixes(host, rows, page_size)
        self._ends = np.maximum(described[0] // page_size - 1, 0) if described is not None else np.zeros(rows, np.int32)
        self._pages = host.page_table[slots, self._ends]
        if described is not None:
            self._put(described)
        elif self._are_shared:
            self._put(np.zeros((FIELDS, self.tensor.shape[1]), np.int32))
        self._are_shared = described is not None

    def _put(self, described: np.ndarray) -> None:
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()  # the copy of two changes ago
        staged = self._staged[self._turn]
        staged.zero_()
        staged.numpy()[:, : described.shape[1]] = described
        self.tensor.copy_(staged, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()

"""`RowTable`: which rows of the device's table hold which item.

Rows are allotted in blocks. An item that no request reads keeps its rows until others
need them; the least recently used goes first. Used by `MediaScheduler`. Must not know a request or
a tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from frame.media.cache_keys import ItemName

BLOCK = 16  # rows


@dataclass(slots=True, eq=False)
class TableItem:
    """An item that has rows."""

    name: ItemName
    blocks: np.ndarray  # int32
    rows: np.ndarray  # int32 [rows of the item + 1]; the last one is -1, which index -1 finds
    num_readers: int = 0  # chunks of this step, and requests between two chunks, that read it
    is_encoded: bool = False  # a step has been ordered to encode it
    last_divided: int = -1  # the last step that computed some of its layers


class RowTable:
    """The table of one scheduler."""

    def __init__(self, num_rows: int, block: int = BLOCK) -> None:
        self._block = block
        self.num_blocks = num_rows // block
        self._free = np.arange(self.num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = self.num_blocks
        self._items: dict[ItemName, TableItem] = {}
        self._idle: OrderedDict[ItemName, TableItem] = OrderedDict()  # without readers, the least recently used first
        self._num_idle = 0  # blocks of these

    @property
    def num_available(self) -> int:
        """Blocks that no reader needs."""
        return self._num_free + self._num_idle

    @property
    def num_rows(self) -> int:
        return self.num_blocks * self._block

    @property
    def num_used_rows(self) -> int:
        """Rows in blocks of items, with and without readers."""
        return (self.num_blocks - self._num_free) * self._block

    def count_blocks(self, num_rows: int) -> int:
        """Blocks of an item of so many rows."""
        return -(-num_rows // self._block)

    def find_item(self, name: ItemName) -> TableItem | None:
        """An item's rows; None: it has none."""
        return self._items.get(name)

    def acquire(self, name: ItemName, num_rows: int) -> TableItem:
        """Add a reader to an item, which gets rows if it has none. Raises RuntimeError where too
        few blocks are available."""
        item = self._items.get(name)
        if item is None:
            blocks = self._take_blocks(self.count_blocks(num_rows))
            rows = (blocks[:, None] * self._block + np.arange(self._block)).ravel()
            rows = np.append(rows[:num_rows], -1).astype(np.int32)
            item = self._items[name] = TableItem(name, blocks, rows)
        elif not item.num_readers:
            del self._idle[name]
            self._num_idle -= len(item.blocks)
        item.num_readers += 1
        return item

    def release(self, item: TableItem) -> None:
        """Remove a reader. The rows stay until others need them."""
        item.num_readers -= 1
        if item.num_readers:
            return
        if item.is_encoded:
            self._idle[item.name] = item
            self._num_idle += len(item.blocks)
        else:
            self._drop(item)

    def invalidate(self) -> None:
        """The rows hold nothing any more: items with readers are to be encoded again, the others
        are forgotten."""
        for item in self._idle.values():
            self._drop(item)
        self._idle.clear()
        self._num_idle = 0
        for item in self._items.values():
            item.is_encoded = False

    def _take_blocks(self, count: int) -> np.ndarray:
        while self._num_free < count and self._idle:
            _, item = self._idle.popitem(last=False)
            self._num_idle -= len(item.blocks)
            self._drop(item)
        if self._num_free < count:
            raise RuntimeError(f"{count} blocks of rows are taken, and {self._num_free} are free")
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def _drop(self, item: TableItem) -> None:
        del self._items[item.name]
        self._free[self._num_free : self._num_free + len(item.blocks)] = item.blocks
        self._num_free += len(item.blocks)

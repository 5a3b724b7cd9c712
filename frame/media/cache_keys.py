"""`ItemKeys`: the cache keys of placeholders.

A key stands for an item in the prefix cache, in place of the ids of its placeholders. It is a
negative odd number that no other item has had; those of adapters are even. Used by
`MediaScheduler`. Must not know a request.
"""

from __future__ import annotations

from collections import OrderedDict

from frame.core.interfaces.media import MediaItem

MAX_ITEMS = 65_536  # remembered, the most recently used; one that is forgotten gets another key

ItemName = tuple[str, str, bytes]  # tenant, modality, digest


def name_item(tenant: str, item: MediaItem) -> ItemName:
    """What equal items of one tenant have in common, and no others."""
    return tenant, item.modality, item.digest


class ItemKeys:
    """The keys of one scheduler, whose prefix cache begins empty. There are 2 ** 30 of them; an
    engine that has used them all ends with an OverflowError of numpy, and its successor begins
    again."""

    def __init__(self, max_items: int = MAX_ITEMS) -> None:
        self._max_items = max_items
        self._keys: OrderedDict[ItemName, int] = OrderedDict()
        self._last = -1

    def find_key(self, name: ItemName) -> int:
        """The key of an item, below -1."""
        key = self._keys.get(name)
        if key is not None:
            self._keys.move_to_end(name)
            return key
        self._last -= 2
        self._keys[name] = self._last
        if len(self._keys) > self._max_items:
            self._keys.popitem(last=False)
        return self._last

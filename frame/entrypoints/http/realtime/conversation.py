"""`Conversation`: the items of a session, in their order, whose bytes count as held.

Used by `session` and `responses`. Must not know an event.
"""

from __future__ import annotations

from typing import Any

import msgspec

from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES
from frame.entrypoints.http.realtime.items import Item
from frame.entrypoints.http.request_context import RequestContext


class Conversation:
    """context: of the session, which holds the bytes."""

    def __init__(self, name: str, context: RequestContext) -> None:
        self.id = name
        self._context = context
        self._items: dict[str, Item] = {}  # by id, in their order
        self._sizes: dict[str, int] = {}  # bytes

    @property
    def last_id(self) -> str | None:
        return next(reversed(self._items), None)

    def list_items(self) -> list[Item]:
        return list(self._items.values())

    def measure(self, item: Item) -> int:
        """The bytes of an item, 0 for one that is not of this conversation."""
        name = item.get("id")
        return self._sizes[name] if name is not None and self._items.get(name) is item else 0

    def add_item(self, item: Item, after: str | None = None) -> str | None:
        """Add an item behind another (None: the last; "root": none). -> the id of that one. Raises
        ApiError."""
        name = item["id"]
        if name in self._items:
            raise ApiError(400, f"there is an item {name!r} already; choose another id", "item.id")
        if len(self._items) >= MAX_MESSAGES:
            raise ApiError(400, f"the conversation has {MAX_MESSAGES} items, all that it may; delete some", "item")
        previous = self.last_id if after is None else None if after == "root" else after
        if previous is not None:
            self.find_item(previous, "previous_item_id")
        size = len(msgspec.json.encode(item))
        self._context.hold(size)
        self._sizes[name] = size
        if previous == self.last_id:
            self._items[name] = item
        else:
            items = list(self._items.items())
            place = 0 if previous is None else list(self._items).index(previous) + 1
            self._items = dict([*items[:place], (name, item), *items[place:]])
        return previous

    def find_item(self, name: Any, param: str = "item_id") -> Item:
        """Raises ApiError 404 that names the field `param`."""
        item = self._items.get(name) if isinstance(name, str) else None
        if item is None:
            raise ApiError(404, f"the conversation has no item {quoted(name)}", param, "item_not_found")
        return item

    def delete_item(self, name: str) -> None:
        """Raises ApiError 404."""
        self.find_item(name)
        del self._items[name]
        self._context.release(self._sizes.pop(name))

    def close(self) -> None:
        """Give back what is held."""
        self._context.release(sum(self._sizes.values()))
        self._items, self._sizes = {}, {}

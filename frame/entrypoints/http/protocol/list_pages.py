"""Pages of lists, as OpenAI's API gives them. Used by the routes of responses, conversations and
batches. Must not depend on a route."""

from __future__ import annotations

from typing import Any

from frame.entrypoints.http.errors import ApiError

MAX_LISTED = 100


def make_page(items: list[dict[str, Any]], limit: str, order: str, after: str, maximum: int = MAX_LISTED) -> dict[str, Any]:
    """One page of items: `limit` items after the item `after`, in `order` (asc or desc). `limit` is
    at most `maximum`, and a page has no more than `MAX_LISTED` items. Raises ApiError 400."""
    limit, order = limit or "20", order or "desc"
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= maximum:
        raise ApiError(400, f"limit is {limit[:50]!r}; it must be from 1 to {maximum}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order[:50]!r}; it must be asc or desc", "order")
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after:
        names = [item.get("id") for item in ordered]
        if after not in names:
            raise ApiError(400, f"after is {after[:100]!r}; there is no such item here", "after")
        start = names.index(after) + 1
    end = start + min(int(limit), MAX_LISTED)
    return make_list(ordered[start:end], has_more=end < len(ordered))


def make_list(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """OpenAI's list object with these items."""
    first, last = (items[0].get("id", ""), items[-1].get("id", "")) if items else ("", "")
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}

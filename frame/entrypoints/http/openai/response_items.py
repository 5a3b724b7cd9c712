"""Items of the Responses API in stored form: ids, pages, references. Used by the routes of
responses and conversations. Must not depend on a route or the engine."""

from __future__ import annotations

import re
from typing import Any

from frame.entrypoints.http.errors import ApiError

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
            "custom_tool_call_output": "ctco"}  # fmt: skip
# An item's id contains that of its response or conversation
_CONTAINER = re.compile(r"[a-z]+_([0-9a-f]{32})_")
MAX_LISTED = 100


def to_stored_items(items: list[dict[str, Any]], owner: str, batch: str = "i") -> list[dict[str, Any]]:
    """Checked input items in stored form: with an id, and with text as a list of parts.

    `owner`: id of their response or conversation. `batch`: part of their ids, which separates them
    from other items of that owner.
    """
    suffix = owner.partition("_")[2]
    found = []
    for place, item in enumerate(items):
        kind = item.get("type") or "message"
        item = {"type": kind, "id": f"{PREFIXES.get(kind, 'item')}_{suffix}_{batch}{place}", "status": "completed"} | item
        if kind == "message":
            item["content"] = _parts(item.get("content"), item.get("role"))
        found.append(item)
    return found


def _parts(content: Any, role: Any) -> Any:
    if not isinstance(content, str):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]


def container_ids(name: str) -> list[str]:
    """The ids of the response and the conversation that may hold an item of this id."""
    found = _CONTAINER.match(name)
    return [f"resp_{found[1]}", f"conv_{found[1]}"] if found else []


def find_item(items: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The last item with this id."""
    return next((item for item in reversed(items) if item.get("id") == name), None)


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

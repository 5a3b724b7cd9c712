"""Items of the Responses API as they are stored and listed: ids, pages, references. Shared by responses and conversations.

Knows no route and no engine.
"""

from __future__ import annotations

import re
from typing import Any

from frame.entrypoints.http.errors import ApiError

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
            "custom_tool_call_output": "ctco"}  # fmt: skip
_CONTAINER = re.compile(r"[a-z]+_([0-9a-f]{32})_")  # an item's id names the response or the conversation that it is of
MOST_LISTED = 100


def stored_items(items: list[dict[str, Any]], owner: str, batch: str = "i") -> list[dict[str, Any]]:
    """Checked input items as they are stored: with an id, and with text as parts. `owner`: the id of their response or conversation;
    `batch` is a part of their ids that tells them from others of that owner."""
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


def containers_of(name: str) -> list[str]:
    """The ids of what an item of this id may be stored in."""
    found = _CONTAINER.match(name)
    return [f"resp_{found[1]}", f"conv_{found[1]}"] if found else []


def item_of(items: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The last item of this id."""
    return next((item for item in reversed(items) if item.get("id") == name), None)


def page_of(items: list[dict[str, Any]], limit: str, order: str, after: str) -> dict[str, Any]:
    """The page that the query asks for: `limit` (20) items after the one named `after`, in `order` (newest first)."""
    limit, order = limit or "20", order or "desc"
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MOST_LISTED:
        raise ApiError(400, f"limit is {limit[:50]!r}; it must be from 1 to {MOST_LISTED}", "limit")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {order[:50]!r}; it must be asc or desc", "order")
    ordered = items if order == "asc" else items[::-1]
    start = 0
    if after:
        names = [item.get("id") for item in ordered]
        if after not in names:
            raise ApiError(400, f"after is {after[:100]!r}, and there is no such item here", "after")
        start = names.index(after) + 1
    return list_of(ordered[start : start + int(limit)], has_more=start + int(limit) < len(ordered))


def list_of(items: list[dict[str, Any]], *, has_more: bool = False) -> dict[str, Any]:
    """OpenAI's list object."""
    first, last = (items[0].get("id", ""), items[-1].get("id", "")) if items else ("", "")
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}

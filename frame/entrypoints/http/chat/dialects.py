"""What request bodies of other dialects share on their way to a chat request. Knows no route and no engine."""

from __future__ import annotations

from typing import Any

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.request_options import SamplingFields


class Extensions(SamplingFields):
    """Fields beyond a dialect's own, as `/v1/chat/completions` takes them."""

    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    def extensions(self) -> dict[str, Any]:
        """Those that were sent, by name."""
        return {name: value for name in Extensions.model_fields if (value := getattr(self, name)) is not None}


def object_at(value: Any, place: str) -> dict[str, Any]:
    """`value`, which must be an object. Raises ApiError."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{place}: expected an object", place)
    return value


def text_at(value: Any, place: str) -> str:
    """`value`, which must be a text. Raises ApiError."""
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: expected a string", place)
    return value


def parts_at(content: Any, place: str) -> list[dict[str, Any]]:
    """Content that is a text, nothing, or a list of typed parts, as such a list; a text is a part of type `text`. Raises ApiError."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: expected a string or a list of parts", place)
    parts = [object_at(part, f"{place}[{i}]") for i, part in enumerate(content)]
    for i, part in enumerate(parts):
        text_at(part.get("type"), f"{place}[{i}].type")
    return parts


def function_tool(name: Any, place: str, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """A tool as chat requests and templates have it. Raises ApiError."""
    function: dict[str, Any] = {"name": text_at(name, f"{place}.name"), "description": description or "", "parameters": parameters or {}}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}

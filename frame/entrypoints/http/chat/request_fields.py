"""Fields and checks that the request schemas of several chat APIs share. Used by the schemas of the
Anthropic, Responses and Ollama APIs. Must not depend on a route or the engine."""

from __future__ import annotations

from typing import Any, Literal, get_args

from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.request_options import SamplingFields

# Of the reasoning: OpenAI's values, and Anthropic's
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ExtensionFields(SamplingFields):
    """Fields of `/v1/chat/completions` that other chat APIs accept besides their own."""

    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    def extension_fields(self) -> dict[str, Any]:
        """The extension fields that were sent, by name."""
        return {name: value for name in ExtensionFields.model_fields if (value := getattr(self, name)) is not None}


def check_object(value: Any, place: str) -> dict[str, Any]:
    """`value`, if it is an object. Raises ApiError 400 that names `place`, the field path."""
    if not isinstance(value, dict):
        raise ApiError(400, f"{place}: expected an object", place)
    return value


def check_string(value: Any, place: str) -> str:
    """`value`, if it is a string. Raises ApiError 400 that names `place`."""
    if not isinstance(value, str):
        raise ApiError(400, f"{place}: expected a string", place)
    return value


def check_effort(value: Any, place: str) -> str:
    """`value`, if it is a reasoning effort. Raises ApiError 400 that names `place`."""
    if check_string(value, place) not in get_args(Effort):
        raise ApiError(400, f"{place} is {quoted(value)}; it must be one of {', '.join(get_args(Effort))}", place)
    return str(value)


def to_content_parts(content: Any, place: str) -> list[dict[str, Any]]:
    """Content as a list of parts with a `type`. Raises ApiError 400 that names `place`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: expected a string or a list of parts", place)
    parts = [check_object(part, f"{place}[{i}]") for i, part in enumerate(content)]
    for i, part in enumerate(parts):
        check_string(part.get("type"), f"{place}[{i}].type")
    return parts


def make_function_tool(name: Any, place: str, description: Any, parameters: Any, strict: Any = None) -> dict[str, Any]:
    """A tool in the shape of chat completions. Raises ApiError 400."""
    function: dict[str, Any] = {
        "name": check_string(name, f"{place}.name"),
        "description": description or "",
        "parameters": parameters or {},
    }
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}

"""The tools of the Anthropic API as functions of a chat request, and its edits of the history.

The server runs no tool: those of Anthropic's servers are left out unless the request forces a call.
Tools of Anthropic's own that clients run have the schemas that their documentation states. Must not
depend on a route or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from frame.entrypoints.http.chat.request_fields import check_object, check_string, make_function_tool
from frame.entrypoints.http.errors import ApiError, quoted

# Tool choice of Anthropic -> of OpenAI
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Types, up to their date, of tools that Anthropic's servers run
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
_STRING: dict[str, Any] = {"type": "string"}
_EDITS = ("view", "create", "str_replace", "insert")


def _schema(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required.split()}


def _files(*commands: str) -> dict[str, Any]:
    return {
        "command": {"type": "string", "enum": list(commands)},
        "path": _STRING,
        "view_range": {"type": "array", "items": {"type": "integer"}},
        "old_str": _STRING,
        "new_str": _STRING,
        "file_text": _STRING,
        "insert_line": {"type": "integer"},
        "insert_text": _STRING,
    }


# Types, up to their date, of tools that clients run -> (description, schema)
_CLIENT: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash_": ("Runs a command in a shell that stays open.", _schema("", command=_STRING, restart={"type": "boolean"})),
    "text_editor_": ("Views and edits text files.", _schema("command path", **_files(*_EDITS))),
    "memory_": (
        "Views and edits files below /memories.",
        _schema("command", **_files(*_EDITS, "delete", "rename"), old_path=_STRING, new_path=_STRING),
    ),
}


def is_hosted(tool: Mapping[str, Any]) -> bool:
    """Whether Anthropic's servers run the tool."""
    return str(tool.get("type")).startswith(HOSTED)


def list_hosted(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The paths of the tools that are left out."""
    return [f"tools[{i}]" for i, tool in enumerate(tools) if is_hosted(tool)]


def to_chat_tools(tools: Sequence[dict[str, Any]], choice: dict[str, Any] | None) -> dict[str, Any]:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls` of a chat request. Raises
    ApiError 400, also where only a tool that was left out could make the required call."""
    fields = _to_choice(choice) if choice is not None else {}
    functions = [_to_function(tool, f"tools[{i}]") for i, tool in enumerate(tools) if not is_hosted(tool)]
    if functions:
        fields["tools"] = functions
    forced = fields.get("tool_choice")
    hosted = [tool for tool in tools if is_hosted(tool)]
    if isinstance(forced, dict):
        hosted = [tool for tool in hosted if tool.get("name") == forced["function"]["name"]]
    elif forced != "required" or functions:
        hosted = []
    if hosted:
        kind = quoted(hosted[0].get("type"))
        raise ApiError(400, f"tool_choice requires a call of a tool of type {kind}, which only Anthropic's servers run", "tool_choice")
    return fields


def _to_function(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    description, schema = tool.get("description"), tool.get("input_schema")
    if kind != "custom":
        known = next((known for prefix, known in _CLIENT.items() if str(kind).startswith(prefix)), None)
        if known is None:
            sentence = f"{place}.type is {quoted(kind)}, which is not supported; describe a tool with name, description and input_schema"
            raise ApiError(400, sentence, f"{place}.type")
        description, schema = description or known[0], schema or known[1]
    return make_function_tool(tool.get("name"), place, description, schema, tool.get("strict"))


def _to_choice(choice: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    kind = choice.get("type")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": check_string(choice.get("name"), "tool_choice.name")}}
    elif isinstance(kind, str) and kind in CHOICES:
        fields["tool_choice"] = CHOICES[kind]
    else:
        raise ApiError(400, f"tool_choice.type is {quoted(kind)}; it must be auto, any, tool or none", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    return fields


# edits of the history -----------------------------------------------------------------------------

_PLACE = "context_management.edits"
_CLEAR_THINKING = "clear_thinking_"
_THINKING = ("thinking", "redacted_thinking")


def edit_history(messages: list[dict[str, Any]], management: dict[str, Any] | None) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with the edits that the request asks for, and the paths of edits that are
    ignored: those only shorten the prompt. Raises ApiError 400."""
    ignored = []
    edits = (management or {}).get("edits") or []
    if not isinstance(edits, list):
        raise ApiError(400, f"{_PLACE}: expected a list", _PLACE)
    for i, edit in enumerate(edits):
        place = f"{_PLACE}[{i}]"
        if check_string(check_object(edit, place).get("type"), f"{place}.type").startswith(_CLEAR_THINKING):
            messages = _clear_thinking(messages, edit.get("keep"), f"{place}.keep")
        else:
            ignored.append(place)
    return messages, ignored


def _clear_thinking(messages: list[dict[str, Any]], keep: Any, place: str) -> list[dict[str, Any]]:
    """The messages without thinking but in the last turns that have some: `keep` of them, by
    default one."""
    if keep == "all":
        return messages
    count = check_object(keep, place).get("value") if keep is not None else 1
    if type(count) is not int or count < 1:
        raise ApiError(400, f"{place}.value is {quoted(count)}; it must be a whole number from 1", f"{place}.value")
    turns = [i for i, message in enumerate(messages) if _has_thinking(message)]
    cleared = set(turns[:-count])
    return [_without_thinking(message) if i in cleared else message for i, message in enumerate(messages)]


def _has_thinking(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in _THINKING for part in content)


def _without_thinking(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [part for part in message["content"] if not isinstance(part, dict) or part.get("type") not in _THINKING]}

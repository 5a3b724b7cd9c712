"""Items of a conversation, and how they become the chat request of a response.

Used by `session`. Must not know a connection or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frame.entrypoints.http.chat.constraints import check_schemas, rename_error_params, resolve_tools
from frame.entrypoints.http.chat.request_fields import check_object
from frame.entrypoints.http.chat.thinking_fields import check_effort
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES
from frame.entrypoints.http.realtime.schema import (
    MAX_ID_CHARS,
    NO_SPEECH,
    GenerationFields,
    ResponseFields,
    SessionFields,
    check_names,
    read_object,
)

Item = dict[str, Any]

MAX_PARTS = 2 * MAX_MESSAGES  # of the messages that a response reads
ROLES = {"system": ("input_text",), "user": ("input_text", "input_image"), "assistant": ("output_text",)}  # role -> types of its parts


class RealtimeChat(ChatRequest):
    """The chat request of a response that reads the conversation."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {"messages": "conversation", "prompt": "conversation", "max_tokens": "max_output_tokens"}
    TOOL_PLACES: ClassVar[Mapping[str, str]] = {".function": ""}


class RealtimeInputChat(RealtimeChat):
    """The chat request of a response with an input of its own."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {**RealtimeChat.FIELD_NAMES, "messages": "response.input", "prompt": "response.input"}


def check_item(item: Mapping[str, Any], place: str = "item") -> Item:
    """The item as it is kept, without an id of its own where it has none. Raises ApiError 400."""
    kind, identity = item.get("type"), item.get("id")
    if identity is not None and (not isinstance(identity, str) or not 0 < len(identity) <= MAX_ID_CHARS or not identity.isprintable()):
        raise ApiError(400, f"{place}.id must be a text of 1 to {MAX_ID_CHARS} printable characters", f"{place}.id")
    common = ("id", "type", "object", "status")
    if kind == "message":
        check_names(item, (*common, "role", "content"), f"{place}.")
        return {**item, "status": "completed", "content": _check_content(item, place)}
    fields = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}.get(str(kind))
    if fields is None:
        kinds = "message, function_call or function_call_output"
        raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be {kinds}", f"{place}.type")
    check_names(item, (*common, *fields), f"{place}.")
    for name in fields:
        if not isinstance(item.get(name), str):
            raise ApiError(400, f"{place}.{name}: expected a text", f"{place}.{name}")
    return {**item, "status": "completed"}


def _check_content(item: Mapping[str, Any], place: str) -> list[dict[str, Any]]:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{place}.role is {quoted(role)}; it must be one of {', '.join(ROLES)}", f"{place}.role")
    if not isinstance(content, list):
        raise ApiError(400, f"{place}.content: expected a list of parts", f"{place}.content")
    for number, part in enumerate(content):
        here = f"{place}.content[{number}]"
        kind = check_object(part, here).get("type")
        if kind not in ROLES[role]:
            sentence = f"{here}.type is {quoted(kind)}; in a message of the {role} it must be {' or '.join(ROLES[role])}"
            raise ApiError(400, sentence, f"{here}.type")
        name = "image_url" if kind == "input_image" else "text"
        check_names(part, ("type", name, *(("detail",) if kind == "input_image" else ())), f"{here}.")
        if not isinstance(part.get(name), str):
            raise ApiError(400, f"{here}.{name}: expected a text", f"{here}.{name}")
    return content


def check_amount(items: Sequence[Item], size: int, max_bytes: int, place: str = "conversation") -> None:
    """Raise ApiError 400 for more than the body of a chat could have: an input may refer to an item
    many times. size: bytes of the items. place: where they are from."""
    num_parts = sum(len(item.get("content", ())) for item in items)
    for count, maximum, what in (
        (len(items), MAX_MESSAGES, "items"), (num_parts, MAX_PARTS, "parts of messages"), (size, max_bytes, "bytes of items"),
    ):  # fmt: skip
        if count > maximum:
            sentence = f"the response would read {count} {what}, and may read {maximum}; send fewer, or delete some"
            raise ApiError(400, sentence, place)


def to_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked items as chat messages; the assistant's consecutive ones are one."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    texts: list[str] = []  # of the turn
    for item in items:
        if item["type"] == "function_call" or item.get("role") == "assistant":
            if turn is None:
                texts = []
                turn = {"role": "assistant", "content": texts}
                messages.append(turn)
            if item["type"] == "message":
                texts += [part["text"] for part in item["content"]]
            else:
                call = {"id": item["call_id"], "type": "function", "function": {name: item[name] for name in ("name", "arguments")}}
                turn.setdefault("tool_calls", []).append(call)
            continue
        turn = None
        if item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            messages.append({"role": item["role"], "content": _to_chat_content(item["content"])})
    return [{**each, "content": "".join(each["content"])} if each["role"] == "assistant" else each for each in messages]


def _to_chat_content(parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    if all(part["type"] != "input_image" for part in parts):
        return "".join(part["text"] for part in parts)
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] != "input_image"
        else {"type": "image_url", "image_url": {"url": part["image_url"], **({"detail": part["detail"]} if "detail" in part else {})}}
        for part in parts
    ]


# responses ----------------------------------------------------------------------------------------


def merge(session: SessionFields, response: ResponseFields) -> dict[str, Any]:
    """The settings of a response: its own, else those of the session."""
    names = GenerationFields.model_fields
    explicit = {name: value for name in names if (value := getattr(response, name)) is not None}
    return {name: value for name in names if (value := getattr(session, name)) is not None} | explicit


def to_chat(
    settings: Mapping[str, Any], items: Sequence[Mapping[str, Any]], model: str, rid: str, kind: type[RealtimeChat] = RealtimeChat
) -> RealtimeChat:
    """The chat request of a response. rid: its name. Raises ApiError 400."""
    instructions = settings.get("instructions")
    limit, reasoning = settings.get("max_output_tokens"), settings.get("reasoning") or {}
    values: dict[str, Any] = {
        "model": model,
        "messages": [*([{"role": "system", "content": instructions}] if instructions else []), *to_messages(items)],
        "max_tokens": None if limit == "inf" else limit,
        "tools": [_to_chat_tool(tool, f"tools[{number}]") for number, tool in enumerate(settings.get("tools") or ())] or None,
        "tool_choice": _to_chat_choice(settings.get("tool_choice"), "tool_choice"),
        "reasoning_effort": reasoning.get("effort"),
        "stream": True,
        "rid": rid,
        **{name: settings.get(name) for name in ("parallel_tool_calls", "temperature", "top_p", "seed")},
    }
    if not values["messages"]:
        raise ApiError(400, "the conversation is empty; create an item, or send input or instructions", "conversation")
    return read_object(kind, {name: value for name, value in values.items() if value is not None})


def check_generation(fields: GenerationFields, place: str) -> None:
    """Raise ApiError 400 for settings that no response can have."""
    if fields.output_modalities not in (None, ["text"]):
        sentence = f'{place}output_modalities is {quoted(fields.output_modalities)}; {NO_SPEECH}, so it must be ["text"]'
        raise ApiError(400, sentence, f"{place}output_modalities")
    if isinstance(fields.max_output_tokens, int) and fields.max_output_tokens < 1:
        raise ApiError(400, f"{place}max_output_tokens must be 1 or more, or inf", f"{place}max_output_tokens")
    check_names(fields.reasoning or {}, ("effort",), f"{place}reasoning.")
    if (effort := (fields.reasoning or {}).get("effort")) is not None:
        check_effort(effort, f"{place}reasoning.effort")
    tools = [_to_chat_tool(tool, f"{place}tools[{number}]") for number, tool in enumerate(fields.tools or ())]
    with rename_error_params({".function": "", "tools": f"{place}tools"}):
        resolve_tools(tools, None, None)
    check_schemas((tool["function"].get("parameters"), f"{place}tools[{number}].parameters") for number, tool in enumerate(tools))
    _to_chat_choice(fields.tool_choice, f"{place}tool_choice")


def check_choice(settings: Mapping[str, Any], place: str) -> None:
    """Raise ApiError 400 for a tool choice, sent as `place`, that the tools do not allow."""
    tools = [_to_chat_tool(tool, f"tools[{number}]") for number, tool in enumerate(settings.get("tools") or ())]
    with rename_error_params({"tool_choice": place}):
        resolve_tools(tools, _to_chat_choice(settings.get("tool_choice"), place), None)


def _to_chat_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if (kind := tool.get("type")) != "function":
        raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be function", f"{place}.type")
    check_names(tool, ("type", "name", "description", "parameters"), f"{place}.")
    if not isinstance(tool.get("name"), str):
        raise ApiError(400, f"{place}.name: expected a text", f"{place}.name")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _to_chat_choice(choice: str | Mapping[str, Any] | None, place: str) -> Any:
    if choice is None or isinstance(choice, str):
        if choice not in (None, "auto", "none", "required"):
            raise ApiError(400, f"{place} is {quoted(choice)}; it must be auto, none, required or a function", place)
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ApiError(400, f'{place} must be {{"type": "function", "name": NAME}}, auto, none or required', place)
    check_names(choice, ("type", "name"), f"{place}.")
    return {"type": "function", "function": {"name": choice["name"]}}

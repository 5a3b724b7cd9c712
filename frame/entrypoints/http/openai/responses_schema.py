"""The request body of the Responses API, and its translation into a chat request; items in stored
form: ids, pages, references.

Used by the routes of responses and conversations. A field that cannot be served raises ApiError 400
with its name. Must not depend on the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import Field

from frame.entrypoints.http.chat.constraints import FORMAT_FIELDS, SCHEMA_FIELDS
from frame.entrypoints.http.chat.request_fields import (
    CHOICE,
    ExtensionFields,
    check_effort,
    check_object,
    check_string,
    make_function_tool,
    to_content_parts,
)
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.openai.completions_schema import ChatRequest, ServiceTier
from frame.entrypoints.http.protocol.fields import Shape, check_nested_fields
from frame.entrypoints.http.request_body import Metadata

# The fields of items, content parts and tools; see `request_fields`.
ITEM_CONTENT = Shape(
    "type text refusal annotations logprobs id image_url file_id file_data file_url filename detail input_audio cache_control"
    " prompt_cache_breakpoint parsed encrypted_content"
)
ITEM = Shape(
    "type id role status phase name namespace call_id arguments input encrypted_content parsed_arguments created_by object created_at"
    " metadata caller action results queries internal_chat_message_metadata_passthrough model agent",
    {"content": ITEM_CONTENT, "output": ITEM_CONTENT, "summary": ITEM_CONTENT},
)
ITEMS: Mapping[str, Shape] = {"items": ITEM}
RESPONSES: Mapping[str, Shape] = {
    "input": ITEM,
    "tools": Shape(
        "type name description parameters strict defer_loading allowed_callers output_schema cache_control",
        {"format": Shape("type syntax definition")},
    ),
    "tool_choice": CHOICE,
    "text": Shape("format", unused="verbosity"),
    "reasoning": Shape("effort encrypted_content", unused="summary generate_summary context mode"),
    "conversation": Shape("id object created_at metadata"),
}


LOGPROBS = "message.output_text.logprobs"
# Values of `include`. All but `LOGPROBS` name outputs of built-in tools, images and encrypted
# reasoning, which no response here has.
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
                     "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
                     "computer_call_output.output.image_url", "code_interpreter_call.outputs"]  # fmt: skip
CUSTOM_ARGUMENT = "input"  # a custom tool is a function with one string argument of this name
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = ("user", "assistant", "system", "developer")
# Of the assistant, besides messages
TURN_KINDS = ("reasoning", "function_call", "custom_tool_call")
OUTPUT_KINDS = ("function_call_output", "custom_tool_call_output")
FORMATS = FORMAT_FIELDS | {"json_schema": ("type", *SCHEMA_FIELDS)}  # text.format.type -> the fields that it may have


class ResponsesChat(ChatRequest):
    """A chat request made from a Responses request: errors name the fields of the latter."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {
        "prompt": "input",
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    TOOL_PLACES: ClassVar[Mapping[str, str]] = {".function": ""}


class ResponsesRequest(ExtensionFields):
    """A request of the Responses API.

    `input`: text or a list of items. `previous_response_id` and `conversation` put stored items
    before it. `max_tool_calls` limits built-in tools, of which this server has none.
    """

    NESTED: ClassVar[Mapping[str, Shape]] = RESPONSES

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = False
    max_output_tokens: int | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    user: str | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[Includable] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_tool_calls: int | None = Field(None, ge=1)
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    prompt: Any = None  # refused with its own message

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of the tools that take a text in place of JSON arguments."""
        return frozenset(str(tool.get("name")) for tool in self.tools or () if tool.get("type") == "custom")

    def conversation_id(self) -> str | None:
        """The id of the conversation; None without one. Raises ApiError 400."""
        reference = self.conversation
        if reference is None:
            return None
        if self.previous_response_id:
            raise ApiError(400, "conversation and previous_response_id exclude each other; send one", "conversation")
        return reference if isinstance(reference, str) else check_string(reference.get("id"), "conversation.id")

    def items(self) -> list[dict[str, Any]]:
        """The input as a list of items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        return self.input

    def to_chat_request(self, history: list[dict[str, Any]], items: list[dict[str, Any]], rid: str) -> ChatRequest:
        """The chat request of this request. Raises ApiError 400.

        `history`: stored items before the input. `items`: the input with references resolved.
        `rid`: the response's id, which names the chat request.
        """
        if self.prompt is not None and self.prompt not in ("", [], {}) and self.prompt is not False:
            raise ApiError(400, "prompt is not supported; send the prompt's text as input", "prompt")
        if self.request_name() is not None:
            raise ApiError(400, "a response has its own id; leave rid and request_id out", "rid" if self.rid else "request_id")
        fields = self.extension_fields() | {"rid": rid}
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        if (effort := (self.reasoning or {}).get("effort")) is not None:
            fields["reasoning_effort"] = check_effort(effort, "reasoning.effort")
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        instructions = [{"role": "system", "content": self.instructions}] if self.instructions else []
        place = "conversation" if self.conversation else "previous_response_id"
        return ResponsesChat(
            model=self.model,
            messages=[*instructions, *messages_of(history, place), *messages_of(items, "input")],
            stream=self.stream,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tool_choice=_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=_format(self.text),
            service_tier=self.service_tier,
            **fields,
        )


def messages_of(items: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """Items as chat messages; the assistant's consecutive ones are one. Raises ApiError."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for i, item in enumerate(items):
        here, kind = f"{place}[{i}]", item.get("type") or "message"
        if kind in TURN_KINDS or (kind == "message" and item.get("role") == "assistant"):
            if turn is None:
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _extend(turn, kind, item, here)
        else:
            turn = None
            messages.append(_message(kind, item, here))
    return messages


def _extend(turn: dict[str, Any], kind: str, item: dict[str, Any], place: str) -> None:
    if kind == "reasoning":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(item.get("content") or item.get("summary"), place)
    elif kind in ("function_call", "custom_tool_call"):
        if kind == "function_call":
            arguments = check_string(item.get("arguments"), f"{place}.arguments")
        else:
            arguments = msgspec.json.encode({CUSTOM_ARGUMENT: check_string(item.get("input"), f"{place}.input")}).decode()
        function = {"name": check_string(item.get("name"), f"{place}.name"), "arguments": arguments}
        call = {"id": check_string(item.get("call_id"), f"{place}.call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] += _text(item.get("content"), place)


def _message(kind: str, item: dict[str, Any], place: str) -> dict[str, Any]:
    if kind in OUTPUT_KINDS:
        name = check_string(item.get("call_id"), f"{place}.call_id")
        return {"role": "tool", "tool_call_id": name, "content": _text(item.get("output"), f"{place}.output")}
    if kind != "message":
        kinds = ", ".join(("message", *TURN_KINDS, *OUTPUT_KINDS, "item_reference"))
        raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be one of {kinds}", f"{place}.type")
    role = item.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{place}.role is {quoted(role)}; it must be one of {', '.join(ROLES)}", f"{place}.role")
    return {"role": role, "content": _text(item.get("content"), f"{place}.content")}


def _text(content: Any, place: str) -> str:
    texts = []
    for i, part in enumerate(to_content_parts(content, place)):
        if part["type"] == "refusal":
            texts.append(check_string(part.get("refusal"), f"{place}[{i}].refusal"))
        elif part["type"] in TEXTS:
            texts.append(check_string(part.get("text"), f"{place}[{i}].text"))
        else:
            raise ApiError(400, f"{place}[{i}]: this model takes text only, not {quoted(part['type'])}", place)
    return "".join(texts)


def custom_input(arguments: str) -> str:
    """A custom tool's input in the model's arguments; else the arguments."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind == "custom":
        return _custom_tool(tool, place)
    if kind != "function":
        raise ApiError(400, f"{place}.type is {quoted(kind)}; this server runs no tools: describe a function of your own", f"{place}.type")
    return make_function_tool(tool.get("name"), place, tool.get("description"), tool.get("parameters"), tool.get("strict"))


def _custom_tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """A custom tool as a function with one string, whose pattern is a regex format."""
    form = check_object(tool.get("format") or {"type": "text"}, f"{place}.format")
    text: dict[str, Any] = {"type": "string"}
    if form.get("type") == "grammar":
        if form.get("syntax") != "regex":
            sentence = f"{place}.format.syntax is {quoted(form.get('syntax'))}; this server takes regex"
            raise ApiError(400, sentence, f"{place}.format.syntax")
        text["pattern"] = f"^(?:{check_string(form.get('definition'), f'{place}.format.definition')})$"
    elif form.get("type") != "text":
        raise ApiError(400, f"{place}.format.type is {quoted(form.get('type'))}; it must be text or grammar", f"{place}.format.type")
    schema = {"type": "object", "properties": {CUSTOM_ARGUMENT: text}, "required": [CUSTOM_ARGUMENT], "additionalProperties": False}
    return make_function_tool(tool.get("name"), place, tool.get("description"), schema, True if "pattern" in text else None)


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list):
            raise ApiError(400, "tool_choice.tools: expected a list", "tool_choice.tools")
        allowed = [_named(check_object(tool, f"tool_choice.tools[{i}]"), f"tool_choice.tools[{i}]") for i, tool in enumerate(tools)]
        return {"type": "allowed_tools", "mode": choice.get("mode"), "tools": allowed}
    return _named(choice, "tool_choice")


def _named(choice: dict[str, Any], place: str) -> dict[str, Any]:
    if choice.get("type") not in ("function", "custom"):
        raise ApiError(400, f"{place}.type is {quoted(choice.get('type'))}; it must be function, custom or allowed_tools", "tool_choice")
    return {"type": "function", "function": {"name": check_string(choice.get("name"), f"{place}.name")}}


def _format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    form = check_object(form, "text.format")
    kind = form.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise ApiError(400, f"text.format.type is {quoted(kind)}; it must be one of {', '.join(FORMATS)}", "text.format.type")
    check_nested_fields("text.format", form, FORMATS[kind])
    if kind != "json_schema":
        return form
    check_object(form.get("schema"), "text.format.schema")
    return {"type": "json_schema", "json_schema": {name: form[name] for name in ("name", "schema", "strict") if name in form}}


# stored items -------------------------------------------------------------------------------------

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
            "custom_tool_call_output": "ctco"}  # fmt: skip
# An item's id contains that of its response or conversation
_CONTAINER = re.compile(r"[a-z]+_([0-9a-f]{32})_")


def to_stored_items(items: list[dict[str, Any]], owner: str, batch: str = "i") -> list[dict[str, Any]]:
    """Checked input items in stored form: with an id, and with text as a list of parts.

    `owner`: id of their response or conversation. `batch`: part of their ids, which separates them
    from other items of that owner.
    """
    suffix = owner.partition("_")[2]
    stored = []
    for place, item in enumerate(items):
        kind = item.get("type") or "message"
        item = {"type": kind, "id": f"{PREFIXES.get(kind, 'item')}_{suffix}_{batch}{place}", "status": "completed"} | item
        if kind == "message":
            item["content"] = _stored_content(item.get("content"), item.get("role"))
        stored.append(item)
    return stored


def _stored_content(content: Any, role: Any) -> Any:
    if not isinstance(content, str):
        return content
    if role == "assistant":
        return [{"type": "output_text", "text": content, "annotations": [], "logprobs": []}]
    return [{"type": "input_text", "text": content}]


def container_ids(name: str) -> list[str]:
    """The ids of the response and the conversation that may hold an item of this id."""
    match = _CONTAINER.match(name)
    return [f"resp_{match[1]}", f"conv_{match[1]}"] if match else []


def find_item(items: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """The last item with this id."""
    return next((item for item in reversed(items) if item.get("id") == name), None)

"""The request bodies of the Anthropic API, and their translation into chat requests. A field that
cannot be served raises ApiError 400 with its name. Must not depend on the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from frame.entrypoints.http.chat.message_shapes import MESSAGES
from frame.entrypoints.http.chat.request_fields import ExtensionFields, check_object, check_string, make_function_tool, to_content_parts
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.nested_fields import Shape
from frame.entrypoints.http.request_options import Metadata

# Tool choice of Anthropic -> of OpenAI
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Types of tools that clients run, without a schema
TRAINED = ("bash_", "text_editor_", "computer_", "memory_")


class MessagesChat(ChatRequest):
    """A chat request made from a message request: errors name the fields of the latter."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages", "stop": "stop_sequences", "response_format": "output_config.format"}
    TOOL_PLACES: ClassVar[Mapping[str, str]] = {".function.parameters": ".input_schema", ".function": ""}


class CountTokensRequest(ExtensionFields):
    """A request to count the prompt tokens of a message: the fields that the prompt depends on."""

    NESTED: ClassVar[Mapping[str, Shape]] = MESSAGES

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def to_chat_request(self, **more: Any) -> ChatRequest:
        """The chat request of this request; `more` adds fields. Raises ApiError 400."""
        fields = {**self.extension_fields(), **more}
        if self.tools:
            fields["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)]
        fields |= _choice(self.tool_choice) | _format(self.output_config)
        if self.messages and self.messages[-1].get("role") == "assistant":
            fields["continue_final_message"] = True  # the response continues this message
        if self.thinking is not None:
            on = _is_thinking(self.thinking)
            # both names that templates use
            fields["chat_template_kwargs"] = {"enable_thinking": on, "thinking": on, **(self.chat_template_kwargs or {})}
        return MessagesChat(model=self.model, messages=self._conversation(), **fields)

    def _conversation(self) -> list[dict[str, Any]]:
        system = "\n".join(_text(part, "system") for part in to_content_parts(self.system, "system"))
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for i, message in enumerate(self.messages):
            place = f"messages[{i}]"
            role, parts = message.get("role"), to_content_parts(message.get("content"), f"{place}.content")
            if role == "assistant":
                messages.append(_assistant(parts, place))
            elif role in ("user", "system"):
                messages += _turn(role, parts, place)
            else:
                raise ApiError(400, f"{place}.role is {quoted(role)}; it must be user, assistant or system", f"{place}.role")
        return messages


class MessagesRequest(CountTokensRequest):
    """A request to create a message."""

    max_tokens: int
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None

    def to_chat_request(self, **more: Any) -> ChatRequest:
        return super().to_chat_request(
            max_tokens=self.max_tokens,
            stream=self.stream,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop_sequences,
            **more,
        )


def _assistant(parts: list[dict[str, Any]], place: str) -> dict[str, Any]:
    """A message of the assistant: text, reasoning and tool calls."""
    message: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for i, part in enumerate(parts):
        here = f"{place}.content[{i}]"
        if part["type"] == "thinking":
            thoughts.append(check_string(part.get("thinking"), f"{here}.thinking"))
        elif part["type"] == "tool_use":
            function = {
                "name": check_string(part.get("name"), f"{here}.name"),
                "arguments": check_object(part.get("input"), f"{here}.input"),
            }
            calls.append({"id": check_string(part.get("id"), f"{here}.id"), "type": "function", "function": function})
        elif part["type"] != "redacted_thinking":
            texts.append(_text(part, here))
    message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _turn(role: str, parts: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """A user turn as chat messages: each tool result becomes a message."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for i, part in enumerate(parts):
        here = f"{place}.content[{i}]"
        if part["type"] == "tool_result":
            results = to_content_parts(part.get("content"), f"{here}.content")
            content = "".join(_text(result, f"{here}.content") for result in results)
            messages.append(
                {"role": "tool", "tool_call_id": check_string(part.get("tool_use_id"), f"{here}.tool_use_id"), "content": content}
            )
        else:
            texts.append(_text(part, here))
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _text(part: dict[str, Any], place: str) -> str:
    source = part.get("source")
    if part["type"] == "document" and isinstance(source, dict) and source.get("type") == "text":
        return check_string(source.get("data"), f"{place}.source.data")
    if part["type"] != "text":
        raise ApiError(400, f"{place}: this model takes text only, not {quoted(part['type'])}", place)
    return check_string(part.get("text"), f"{place}.text")


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        what = "whose schema only Anthropic's models know" if str(kind).startswith(TRAINED) else "that Anthropic's own servers run"
        sentence = f"{place}.type is {quoted(kind)}, a tool {what}; describe one of your own with name, description and input_schema"
        raise ApiError(400, sentence, f"{place}.type")
    return make_function_tool(tool.get("name"), place, tool.get("description"), tool.get("input_schema"), tool.get("strict"))


def _choice(choice: dict[str, Any] | None) -> dict[str, Any]:
    if choice is None:
        return {}
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


def _is_thinking(thinking: dict[str, Any]) -> bool:
    """Whether the model is to think. The budget is checked and has no effect."""
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise ApiError(400, f"thinking.type is {quoted(kind)}; it must be enabled, adaptive or disabled", "thinking.type")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise ApiError(400, f"thinking.budget_tokens is {quoted(budget)}; it must be a whole number from 1", "thinking.budget_tokens")
    return bool(kind != "disabled")


def _format(config: dict[str, Any] | None) -> dict[str, Any]:
    config = config or {}
    if (effort := config.get("effort")) is not None:
        check_string(effort, "output_config.effort")  # has no effect
    if (form := config.get("format")) is None:
        return {}
    form = check_object(form, "output_config.format")
    if form.get("type") != "json_schema":
        raise ApiError(400, f"output_config.format.type is {quoted(form.get('type'))}; it must be json_schema", "output_config")
    schema = check_object(form.get("schema"), "output_config.format.schema")
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}

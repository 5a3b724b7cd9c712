"""Fields and checks that the request schemas of several chat APIs share: the fields of messages,
content parts and tools, as `Shape` reads them, and checks of nested values.

A known field is one that has an effect, that carries no request (an id, a status, log-probabilities
of an earlier response), or that the API accepts without one on every server (`cache_control`). The
kinds of content parts share one shape: a kind that is not supported is refused elsewhere. Must not
depend on a route or the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from frame.entrypoints.http.chat.thinking_fields import ThinkingFields
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.request_body import SamplingFields

# Chat completions, with the fields that templates and other servers' clients add to messages.
PART = Shape(
    "type text refusal cache_control annotations citations logprobs id index image_url input_audio audio_url video_url file image audio"
    " video uuid prompt_cache_breakpoint thinking signature reasoning"
)
FUNCTION_CALL = Shape("name arguments id description parsed_arguments")
CALL = Shape("id type index cache_control extra_content", {"function": FUNCTION_CALL, "custom": Shape("name input")})
FUNCTION = Shape("name description parameters strict return returns response type examples input_examples output_schema cache_control")
TOOL = Shape("type cache_control defer_loading allowed_callers eager_input_streaming", {"function": FUNCTION})
MESSAGE = Shape(
    "role name tool_call_id reasoning_content reasoning reasoning_details reasoning_text refusal audio annotations images thinking"
    " thinking_blocks tool_name tool_plan tools prefix partial cache_control id type status object created created_at index"
    " finish_reason stop_reason model usage logprobs metadata parsed token_ids weight phase provider_specific_fields additional_kwargs"
    " response_metadata extra_content encrypted_content reasoning_opaque signature is_error citations documents context",
    {"content": PART, "tool_calls": CALL, "function_call": FUNCTION_CALL},
)
NAMED = Shape("type name mode id", {"function": Shape("name")})
CHOICE = Shape("type name mode id", {"function": Shape("name"), "tools": NAMED, "allowed_tools": Shape("type mode", {"tools": NAMED})})
CHAT: Mapping[str, Shape] = {
    "messages": MESSAGE, "tools": TOOL, "functions": FUNCTION, "tool_choice": CHOICE, "function_call": Shape("name"),
    "thinking": Shape("type budget_tokens", unused="display"), "reasoning": Shape("effort enabled exclude max_tokens", unused="summary"),
}  # fmt: skip

# Ollama: a call's arguments and a tool's parameters are objects of their own.
OLLAMA: Mapping[str, Shape] = {name: CHAT[name] for name in ("messages", "tools", "thinking", "reasoning")}
Verbosity = Literal["low", "medium", "high"]


class TemplateFields(ThinkingFields):
    """Fields of a chat request, besides its messages, that the prompt depends on."""

    NESTED: ClassVar[Mapping[str, Shape]] = CHAT

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    # beyond OpenAI
    verbosity: Verbosity | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None


class ExtensionFields(SamplingFields, ThinkingFields):
    """Fields of `/v1/chat/completions` that other chat APIs accept besides their own."""

    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    verbosity: Verbosity | None = None

    def extension_fields(self) -> dict[str, Any]:
        """The extension fields that were sent, by name."""
        return {name: value for name in ExtensionFields.model_fields if (value := getattr(self, name)) is not None}


def check_num_messages(messages: Sequence[Any], place: str, others: int = 0) -> None:
    """Raise ApiError 400 for more messages than a chat may have, before they are converted.
    others: those that are added to them."""
    if len(messages) > (maximum := MAX_MESSAGES - others):
        raise ApiError(400, f"{place} has {len(messages)} entries; it may have {maximum}", place)


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


def to_content_parts(content: Any, place: str) -> list[dict[str, Any]]:
    """Content as a list of parts with a `type`. Raises ApiError 400 that names `place`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ApiError(400, f"{place}: expected a string or a list of parts", place)
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):  # a place is written for errors alone
            check_string(check_object(part, f"{place}[{i}]").get("type"), f"{place}[{i}].type")
    return content


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

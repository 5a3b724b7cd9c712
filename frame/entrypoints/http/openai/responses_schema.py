"""The request body of the Responses API, and its translation into a chat request; items in stored
form: ids, pages, references.

Used by the routes of responses and conversations. A field that cannot be served raises ApiError 400
with its name. Must not depend on the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from frame.entrypoints.http.chat.constraints import FORMAT_FIELDS, SCHEMA_FIELDS
from frame.entrypoints.http.chat.media_parts import check_url, read_audio_part, read_file_part, read_options
from frame.entrypoints.http.chat.request_fields import CHOICE, ExtensionFields, check_object, check_string, to_content_parts
from frame.entrypoints.http.errors import ApiError, quoted
from frame.entrypoints.http.openai.completions_schema import ChatRequest, ServiceTier
from frame.entrypoints.http.openai.response_tools import CALLS, ResponseTools, result_content, to_chat_call
from frame.entrypoints.http.protocol.fields import Shape, check_nested_fields
from frame.entrypoints.http.request_body import Metadata
from frame.entrypoints.media.media_service import MediaPart

# The fields of items, content parts and tools; see `request_fields`.
ITEM_CONTENT = Shape(
    "type text refusal annotations logprobs id image_url file_id file_data file_url filename detail input_audio cache_control"
    " prompt_cache_breakpoint parsed encrypted_content stdout stderr outcome created_by"
)
# With the fields of tools that OpenAI's servers run, which are left out as a whole
TOOL = Shape(
    "type name description parameters strict async defer_loading allowed_callers output_schema cache_control execution environment"
    " external_web_access search_content_types search_context_size user_location filters vector_store_ids max_num_results"
    " ranking_options container server_label server_url server_description connector_id authorization headers allowed_tools"
    " require_approval background action input_fidelity input_image_mask model moderation output_compression output_format"
    " partial_images quality size display_width display_height",
    {"format": Shape("type syntax definition")},
)
TOOL.nested["tools"] = TOOL  # of a namespace
TOOL.names |= {"tools"}
ITEM = Shape(
    "type id role status phase name namespace call_id arguments input encrypted_content parsed_arguments created_by object created_at"
    " metadata caller action operation execution environment max_output_length results queries"
    " internal_chat_message_metadata_passthrough model agent",
    {"content": ITEM_CONTENT, "output": ITEM_CONTENT, "summary": ITEM_CONTENT, "tools": TOOL},
)
ITEMS: Mapping[str, Shape] = {"items": ITEM}
RESPONSES: Mapping[str, Shape] = {
    "input": ITEM,
    "tools": TOOL,
    "tool_choice": CHOICE,
    "text": Shape("format verbosity"),
    "reasoning": Shape("effort enabled exclude max_tokens encrypted_content", unused="summary generate_summary context mode"),
    "conversation": Shape("id object created_at metadata"),
}


LOGPROBS = "message.output_text.logprobs"
# Values of `include`. All but `LOGPROBS` name outputs of built-in tools, images and encrypted
# reasoning, which no response here has.
Includable = Literal["message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
                     "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
                     "computer_call_output.output.image_url", "code_interpreter_call.outputs"]  # fmt: skip
VERBOSITIES = ("low", "medium", "high")
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
MEDIA = ("input_image", "input_audio", "input_file")
ROLES = ("user", "assistant", "system", "developer")
# Of the assistant, besides messages
TURN_KINDS = ("reasoning", *CALLS)
OUTPUT_KINDS = tuple(f"{kind}_output" for kind in CALLS)
SUMMARY = "frame:"  # begins the encrypted content of a compaction item, whose rest is a summary
SUMMARIZE = (
    "Summarize this conversation for a model that continues it without seeing it: the user's goals, what was done and found, files and"
    " names that matter, and what is left to do. Write the summary alone."
)
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
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    context_management: list[dict[str, Any]] | None = None  # has no effect: it would only shorten the prompt
    prompt: Any = None  # refused with its own message

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    @property
    def compacts(self) -> bool:
        """Whether the response is a summary of the conversation, as a compaction item."""
        return isinstance(self.input, list) and bool(self.input) and self.input[-1].get("type") == "compaction_trigger"

    def collect_tools(self, history: list[dict[str, Any]], items: list[dict[str, Any]]) -> ResponseTools:
        """The tools of the request and of its items. Raises ApiError 400."""
        tools = ResponseTools()
        tools.add(self.tools or [], "tools")
        tools.add_from_items(history, "previous_response_id")
        tools.add_from_items(items, "input")
        return tools

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

    def to_chat_request(self, history: list[dict[str, Any]], items: list[dict[str, Any]], rid: str, tools: ResponseTools) -> ChatRequest:
        """The chat request of this request. Raises ApiError 400.

        `history`: stored items before the input. `items`: the input with references resolved.
        `rid`: the response's id, which names the chat request. `tools`: see `collect_tools`.
        """
        if self.prompt is not None and self.prompt not in ("", [], {}) and self.prompt is not False:
            raise ApiError(400, "prompt is not supported; send the prompt's text as input", "prompt")
        if self.request_name() is not None:
            raise ApiError(400, "a response has its own id; leave rid and request_id out", "rid" if self.rid else "request_id")
        fields = self.extension_fields() | {"rid": rid}
        if self.previous_response_id:
            fields.setdefault("cache_control", {"type": "ephemeral"})
        if tools.functions:
            fields["tools"] = tools.functions
        if (verbosity := (self.text or {}).get("verbosity")) is not None:
            if verbosity not in VERBOSITIES:
                sentence = f"text.verbosity is {quoted(verbosity)}; it must be low, medium or high"
                raise ApiError(400, sentence, "text.verbosity")
            if fields.setdefault("verbosity", verbosity) != verbosity:
                raise ApiError(400, "verbosity and text.verbosity contradict each other; send one of them", "verbosity")
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
            tool_choice="none" if self.compacts else tools.choice(self.tool_choice),
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
        if kind == "additional_tools":
            continue
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
    elif kind in CALLS:
        turn.setdefault("tool_calls", []).append(to_chat_call(item, place))
    else:
        turn["content"] += _text(item.get("content"), place)


def _message(kind: str, item: dict[str, Any], place: str) -> dict[str, Any]:
    if kind in OUTPUT_KINDS:
        # the results of `local_shell` have only an id
        name = check_string(item.get("call_id", item.get("id")), f"{place}.call_id")
        return {"role": "tool", "tool_call_id": name, "content": _content(result_content(item), f"{place}.output")}
    if kind == "compaction":
        return {"role": "user", "content": f"Summary of the conversation so far:\n{_summary(item, place)}"}
    if kind == "compaction_trigger":
        return {"role": "user", "content": SUMMARIZE}
    if kind != "message":
        kinds = ", ".join(("message", *TURN_KINDS, *OUTPUT_KINDS, "additional_tools", "compaction", "item_reference"))
        raise ApiError(400, f"{place}.type is {quoted(kind)}; it must be one of {kinds}", f"{place}.type")
    role = item.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{place}.role is {quoted(role)}; it must be one of {', '.join(ROLES)}", f"{place}.role")
    return {"role": role, "content": _content(item.get("content"), f"{place}.content")}


def _content(content: Any, place: str) -> str | list[Any]:
    """The text, or the parts of a content with media."""
    if isinstance(content, str):
        return content
    parts = to_content_parts(content, place)
    media = {i: _media_part(part, f"{place}[{i}]") for i, part in enumerate(parts) if part["type"] in MEDIA}
    if not media:
        return _join_texts(parts, place)
    return [media[i] if i in media else {"type": "text", "text": _part_text(part, f"{place}[{i}]")} for i, part in enumerate(parts)]


def _media_part(part: dict[str, Any], place: str) -> MediaPart:
    if part["type"] == "input_audio":
        return read_audio_part(check_object(part.get("input_audio"), f"{place}.input_audio"), f"{place}.input_audio")
    if part["type"] == "input_file":
        return read_file_part(part, place)
    if part.get("file_id"):
        raise ApiError(400, f"{place}.file_id is not supported; send image_url, a URL or data:TYPE;base64,DATA", f"{place}.file_id")
    url = check_url(part.get("image_url"), f"{place}.image_url")
    return MediaPart("image", url, f"{place}.image_url", read_options({"detail": part.get("detail")}, set(), place))


def _summary(item: dict[str, Any], place: str) -> str:
    text = check_string(item.get("encrypted_content"), f"{place}.encrypted_content")
    if not text.startswith(SUMMARY):
        sentence = f"{place}.encrypted_content is not a summary of this server; send the conversation itself"
        raise ApiError(400, sentence, f"{place}.encrypted_content")
    return text.removeprefix(SUMMARY)


def _text(content: Any, place: str) -> str:
    return content if isinstance(content, str) else _join_texts(to_content_parts(content, place), place)


def _join_texts(parts: list[dict[str, Any]], place: str) -> str:
    texts = (part.get("text") if part["type"] in TEXTS else None for part in parts)
    return "".join(text if isinstance(text, str) else _part_text(parts[i], f"{place}[{i}]") for i, text in enumerate(texts))


def _part_text(part: dict[str, Any], place: str) -> str:
    if part["type"] == "refusal":
        return check_string(part.get("refusal"), f"{place}.refusal")
    if part["type"] in TEXTS:
        return check_string(part.get("text"), f"{place}.text")
    kinds = ", ".join((*TEXTS, "refusal", *MEDIA))
    raise ApiError(400, f"{place}.type is {quoted(part['type'])}; it must be one of {kinds}", f"{place}.type")


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

PREFIXES = {"message": "msg", "reasoning": "rs", "compaction": "cmp", "additional_tools": "at"}
PREFIXES |= {kind: form.prefix for kind, form in CALLS.items()} | {f"{kind}_output": f"{form.prefix}o" for kind, form in CALLS.items()}
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

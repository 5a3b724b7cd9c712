"""Cohere's `/v2/chat`, as chat requests. Must not depend on the engine."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NotRequired

import msgspec
from pydantic import Field

from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.block_response import BlockResponse
from frame.entrypoints.http.chat.chat_request import start_chat
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock
from frame.entrypoints.http.chat.request_fields import CHAT, MESSAGE, ExtensionFields, check_object, check_string, to_content_parts
from frame.entrypoints.http.errors import ApiError, ErrorShape, quoted
from frame.entrypoints.http.failures import aborted, failure
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.response_types import array, declare
from frame.entrypoints.http.services import Services

# requests -----------------------------------------------------------------------------------------

CHOICES = {"REQUIRED": "required", "NONE": "none"}


class CohereChat(ChatRequest):
    """A chat request made from Cohere's: errors name the fields of the latter."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {"prompt": "messages", "stop": "stop_sequences", "top_k": "k", "top_p": "p"}


class CohereChatRequest(ExtensionFields):
    """A request of `/v2/chat`. `thinking`: Cohere's `token_budget` is `thinking_token_budget`."""

    NESTED: ClassVar[Mapping[str, Shape]] = {
        "messages": MESSAGE, "tools": CHAT["tools"], "reasoning": CHAT["reasoning"], "thinking": Shape("type token_budget budget_tokens"),
    }  # fmt: skip

    model: str = ""
    messages: list[dict[str, Any]]
    documents: list[str | dict[str, Any]] | None = None  # type: ignore[assignment]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    strict_tools: bool | None = None
    response_format: dict[str, Any] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    k: int | None = None
    p: float | None = None
    logprobs: bool | None = None
    stream: bool = False

    def to_chat_request(self, kind: type[CohereChat] = CohereChat) -> ChatRequest:
        """The chat request of this request. Raises ApiError 400."""
        if self.logprobs:
            raise ApiError(400, "logprobs is not supported here; use /v1/chat/completions", "logprobs")
        fields = self.extension_fields()
        for name, own, value in (("top_k", "k", self.k), ("top_p", "p", self.p)):
            if value is not None and fields.setdefault(name, value) != value:
                raise ApiError(400, f"{own} and {name} are the same; send one of them", own)
        if isinstance(self.thinking, dict) and (budget := self.thinking.get("token_budget")) is not None:
            fields["thinking"] = {name: value for name, value in self.thinking.items() if name != "token_budget"}
            if type(budget) is not int or fields.setdefault("thinking_token_budget", budget) != budget:
                raise ApiError(400, "thinking.token_budget must be a whole number, and the same as thinking_token_budget", "thinking")
        fields["documents"] = [_document(each, f"documents[{i}]") for i, each in enumerate(self.documents)] if self.documents else None
        if self.tools is not None:
            fields["tools"] = [_tool(each, f"tools[{i}]", bool(self.strict_tools)) for i, each in enumerate(self.tools)]
        return kind(
            model=self.model,
            messages=[_message(each, f"messages[{i}]") for i, each in enumerate(self.messages)],
            tool_choice=None if self.tool_choice is None else CHOICES[self.tool_choice],
            response_format=_format(self.response_format),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            stream=self.stream,
            **fields,
        )


def _message(message: dict[str, Any], place: str) -> dict[str, Any]:
    """A message in OpenAI's shape."""
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        parts = to_content_parts(content, f"{place}.content")
        text = "".join(check_string(part.get("text"), f"{place}.content") for part in parts if part["type"] == "text")
        thoughts = "".join(check_string(part.get("thinking"), f"{place}.content") for part in parts if part["type"] == "thinking")
        plan = check_string(message.get("tool_plan") or "", f"{place}.tool_plan")
        fields = {"reasoning_content": thoughts} if thoughts else {}
        if message.get("tool_calls"):
            fields["tool_calls"] = message["tool_calls"]
        return {"role": "assistant", "content": text or plan, **fields}
    if role == "tool":
        texts = [_result(part, f"{place}.content[{i}]") for i, part in enumerate(to_content_parts(content, f"{place}.content"))]
        return {"role": "tool", "tool_call_id": message.get("tool_call_id"), "content": "\n".join(texts)}
    return message


def _result(part: dict[str, Any], place: str) -> str:
    """The text of a part of a tool's result."""
    if part["type"] == "document":
        data = check_object(part.get("document"), f"{place}.document").get("data")
        return data if isinstance(data, str) else msgspec.json.encode(data).decode()
    return check_string(part.get("text"), f"{place}.text")


def _document(document: str | dict[str, Any], place: str) -> dict[str, Any]:
    """A document as chat templates read it."""
    if isinstance(document, str):
        return {"text": document}
    data = document.get("data")
    fields = {"text": data} if isinstance(data, str) else check_object(data, f"{place}.data")
    return {"id": document["id"], **fields} if document.get("id") else fields


def _tool(tool: dict[str, Any], place: str, is_strict: bool) -> dict[str, Any]:
    function = check_object(tool.get("function"), f"{place}.function")
    return {**tool, "function": {**function, "strict": True}} if is_strict else tool


def _format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None:
        return None
    kind, schema = form.get("type"), form.get("json_schema", form.get("schema"))
    if kind not in ("text", "json_object"):
        raise ApiError(400, f"response_format.type is {quoted(kind)}; it must be text or json_object", "response_format")
    if schema is None or kind == "text":
        return {"type": kind}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": check_object(schema, "response_format.json_schema")}}


# responses ----------------------------------------------------------------------------------------

CohereTokens = declare("CohereTokens", "input_tokens output_tokens")
CohereUsage = declare("CohereUsage", "cached_tokens", billed_units=CohereTokens, tokens=CohereTokens)
CohereContent = declare("CohereContent", "text? thinking?", type=Literal["text", "thinking"])
CohereFunction = declare("CohereFunction", "name arguments")
CohereCall = declare("CohereCall", "id", type="function", function=CohereFunction)
CohereMessage = declare(
    "CohereMessage", role="assistant", content=NotRequired[array(CohereContent)], tool_calls=NotRequired[array(CohereCall)]
)
FinishReason = Literal["COMPLETE", "MAX_TOKENS", "STOP_SEQUENCE", "TOOL_CALL", "ERROR"]
CohereReply = declare("CohereReply", "id", message=CohereMessage, finish_reason=FinishReason, usage=CohereUsage)
CohereEvent = declare(
    "CohereEvent", "id? index?", "An event of a streamed chat. `type` says what its delta has.", type=str, delta=NotRequired[dict[str, Any]]
)
CohereErrorResponse = declare("CohereErrorResponse", "id message", "The error body of the Cohere API.")

_encode = msgspec.json.encode


def _error_body(error: ApiError) -> bytes:
    return _encode({"id": uuid.uuid4().hex, "message": error.message})


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: " % name.encode() + _encode({"type": name, **fields}) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return _event("message-end", delta={"finish_reason": "ERROR", "error": error.message})


ERRORS = ErrorShape(_error_body, _error_event, model=CohereErrorResponse)

router = ApiRouter(access=Access.USER, errors=ERRORS)


@router.post("/v2/chat", responses=responds_with(CohereReply, events=CohereEvent))
async def chat(request: CohereChatRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create a chat completion, as Cohere."""
    chat_request = request.to_chat_request()
    state = await start_chat(context, services, chat_request)
    return await ChatReply(services, chat_request, state).send(context, request.stream)


class ChatReply(BlockResponse):
    """A response, whole or as events."""

    def __init__(self, services: Services, request: ChatRequest, state: RequestState) -> None:
        super().__init__(services, request, state)
        self._writer = EventWriter()

    def _build(self, finish: Finish | None) -> dict[str, Any]:
        blocks = self._blocks.blocks
        message: dict[str, Any] = {"role": "assistant"}
        if content := [{"type": KINDS[each.kind], KINDS[each.kind]: each.text} for each in blocks if each.kind != "call"]:
            message["content"] = content
        if calls := [_call(each, each.text) for each in blocks if each.kind == "call"]:
            message["tool_calls"] = calls
        return {"id": self._name, "message": message, **self._end(finish)}

    def write_events(self, sequence: SequenceState) -> bytes:
        finish = sequence.finish
        if finish is not None and finish.reason in ("error", "abort"):
            return _error_event(failure(finish, sequence.request.sent_name) if finish.reason == "error" else aborted())
        events = b""
        if not self._is_started:
            self._is_started = True
            empty = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
            events = _event("message-start", id=self._name, delta={"message": empty})
        events += self._blocks.read(sequence, self._parser, self._writer)
        return events if finish is None else events + _event("message-end", id=self._name, delta=self._end(finish))

    def _end(self, finish: Finish | None) -> dict[str, Any]:
        if finish is not None and finish.reason == "length":
            reason = "MAX_TOKENS"
        elif self._parser is not None and self._parser.ends_in_call(finish):
            reason = "TOOL_CALL"
        else:
            reason = "STOP_SEQUENCE" if finish is not None and isinstance(finish.matched, str) else "COMPLETE"
        counts = {"input_tokens": len(self._sequence.prompt), "output_tokens": self._sequence.num_tokens}
        return {"finish_reason": reason, "usage": {"billed_units": counts, "tokens": counts, "cached_tokens": self._sequence.cached}}


KINDS = {"text": "text", "reasoning": "thinking"}


def _call(block: ContentBlock, arguments: str) -> dict[str, Any]:
    return {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


class EventWriter(BlockEventWriter):
    """Writes content blocks as Cohere's events. Contents and calls are numbered separately."""

    def __init__(self) -> None:
        self._counts = {"content": 0, "tool-call": 0}

    def write_start(self, block: ContentBlock) -> bytes:
        if block.kind == "call":
            return self._write(block, "start", {"tool_calls": _call(block, "")})
        return self._write(block, "start", {"content": {"type": KINDS[block.kind], KINDS[block.kind]: ""}})

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        if block.kind == "call":
            return self._write(block, "delta", {"tool_calls": {"function": {"arguments": piece}}})
        return self._write(block, "delta", {"content": {KINDS[block.kind]: piece}})

    def write_stop(self, block: ContentBlock) -> bytes:
        events = self._write(block, "end", None)
        self._counts[_family(block)] += 1
        return events

    def _write(self, block: ContentBlock, step: str, message: dict[str, Any] | None) -> bytes:
        family = _family(block)
        delta = {} if message is None else {"delta": {"message": message}}
        return _event(f"{family}-{step}", index=self._counts[family], **delta)


def _family(block: ContentBlock) -> str:
    return "tool-call" if block.kind == "call" else "content"

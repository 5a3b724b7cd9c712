"""Cohere's `/v1/chat`, the first version of its chat, as chats of `/v2/chat`. Must not depend on
the engine."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired

import msgspec

from frame.core.messages import Finish
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import drop_oldest_turns, start_chat
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock
from frame.entrypoints.http.chat.request_fields import ExtensionFields, check_num_messages, check_object, check_string, make_function_tool
from frame.entrypoints.http.dialects.cohere_chat import ERRORS as V2_ERRORS
from frame.entrypoints.http.dialects.cohere_chat import ChatReply, CohereChat, CohereChatRequest, CohereErrorResponse, CohereTokens
from frame.entrypoints.http.errors import ApiError, ErrorShape, quoted
from frame.entrypoints.http.failures import aborted, failure
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.response_types import Version, array, declare
from frame.entrypoints.http.services import Services

# requests -----------------------------------------------------------------------------------------

LINES = "application/stream+json"
ROLES = {"USER": "user", "CHATBOT": "assistant", "SYSTEM": "system", "TOOL": "tool"}
# types of parameters, as Python or JSON schema names them -> JSON schema
TYPES = {
    "str": "string", "string": "string", "int": "integer", "integer": "integer", "float": "number", "number": "number",
    "bool": "boolean", "boolean": "boolean", "list": "array", "array": "array", "dict": "object", "object": "object",
}  # fmt: skip
# Fields of Cohere's own servers -> what to do without them.
ELSEWHERE = {
    "connectors": "search in your program, and send documents",
    "search_queries_only": "ask for the queries in the message",
    "conversation_id": "send chat_history",
    "raw_prompting": "use /v1/completions",
    "return_prompt": "use /v1/chat/completions/render",
    "max_input_tokens": "use prompt_truncation",
}
_CALL = Shape("name parameters generation_id")
_RESULT = Shape("outputs", {"call": _CALL})


class CohereV1Chat(CohereChat):
    """A chat request made from one of the first version."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {**CohereChat.FIELD_NAMES, "prompt": "message", "messages": "chat_history"}
    TOOL_PLACES: ClassVar[Mapping[str, str]] = {".function.parameters": ".parameter_definitions", ".function": ""}


class CohereV1Request(ExtensionFields):
    """A request of `/v1/chat`. `tool_results` answer the calls at the end of `chat_history`, or
    else calls that `message` led to. `force_single_step`: with results, the model calls no more
    tools."""

    NESTED: ClassVar[Mapping[str, Shape]] = {
        "chat_history": Shape("role message user_name", {"tool_calls": _CALL, "tool_results": _RESULT}),
        "tools": Shape("name description parameter_definitions"),
        "tool_results": _RESULT,
    }

    model: str = ""
    message: str | None = None
    chat_history: list[dict[str, Any]] | None = None
    preamble: str | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_results: list[dict[str, Any]] | None = None
    force_single_step: bool | None = None
    response_format: dict[str, Any] | None = None
    prompt_truncation: Literal["OFF", "AUTO", "AUTO_PRESERVE_ORDER"] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    k: int | None = None
    p: float | None = None
    stream: bool = False
    connectors: list[Any] | None = None
    search_queries_only: bool | None = None
    conversation_id: str | None = None
    raw_prompting: bool | None = None
    return_prompt: bool | None = None
    max_input_tokens: int | None = None

    def to_chat_request(self) -> ChatRequest:
        """The chat request of this request. Raises ApiError 400."""
        for name, remedy in ELSEWHERE.items():
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported; {remedy}", name)
        form = self.response_format
        if form is not None and "schema" in form and "json_schema" not in form:
            form = {**{name: value for name, value in form.items() if name != "schema"}, "json_schema": form["schema"]}
        names = ("model", "max_tokens", "stop_sequences", "temperature", "k", "p", "stream")
        fields = {name: getattr(self, name) for name in names} | self.extension_fields()
        fields["documents"] = [{"data": each} for each in self.documents] if self.documents else None
        tools = None if self.tools is None else [_tool(each, f"tools[{i}]") for i, each in enumerate(self.tools)]
        if self.force_single_step and self.tool_results:
            fields["tool_choice"] = "NONE"  # the results end the step
        request = CohereChatRequest(messages=self.list_messages(), tools=tools, response_format=form, **fields)
        return request.to_chat_request(CohereV1Chat)

    def list_messages(self) -> list[dict[str, Any]]:
        """The conversation in the shape of `/v2/chat`. Raises ApiError 400."""
        if not self.message and not self.tool_results:
            raise ApiError(400, "message is empty; send a text, or tool_results", "message")
        check_num_messages(self.chat_history or (), "chat_history", others=bool(self.preamble) + bool(self.message))
        messages = _Messages()
        if self.preamble:
            messages.add("system", self.preamble)
        for i, each in enumerate(self.chat_history or ()):
            messages.add_entry(each, f"chat_history[{i}]")
        if self.tool_results is None:
            messages.add("user", self.message)
        elif messages.calls:
            messages.add_results(self.tool_results, "tool_results")
            messages.add("user", self.message)
        else:
            messages.add("user", self.message)
            messages.add_results(self.tool_results, "tool_results")
        return messages.messages


class _Messages:
    """A conversation that grows. Calls of the first version have no ids: results name their call by
    its function and arguments."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.calls: dict[Hashable, deque[str]] = {}  # those without a result: ids of calls that are the same
        self._count = 0

    def add(self, role: str, text: str | None) -> None:
        if text:
            self.messages.append({"role": role, "content": text})

    def add_entry(self, entry: dict[str, Any], place: str) -> None:
        """Add a message of the history. Raises ApiError 400."""
        role = entry.get("role")
        kind = ROLES.get(role.upper()) if isinstance(role, str) else None
        if kind is None:
            raise ApiError(400, f"{place}.role is {quoted(role)}; it must be USER, CHATBOT, SYSTEM or TOOL", f"{place}.role")
        if kind == "tool":
            self.add_results(_objects(entry.get("tool_results"), f"{place}.tool_results"), f"{place}.tool_results")
            return
        text = check_string(entry.get("message") or "", f"{place}.message")
        calls = _objects(entry.get("tool_calls"), f"{place}.tool_calls") if kind == "assistant" else []
        if calls:
            self._add_calls(calls, f"{place}.tool_calls", text)
        else:
            self.add(kind, text)

    def _add_calls(self, calls: Sequence[dict[str, Any]], place: str, text: str = "") -> None:
        sent = []
        for i, call in enumerate(calls):
            name = check_string(call.get("name"), f"{place}[{i}].name")
            arguments = msgspec.json.encode(check_object(call.get("parameters") or {}, f"{place}[{i}].parameters")).decode()
            self._count += 1
            self.calls.setdefault(_identify(call), deque()).append(f"call_{self._count}")
            sent.append({"id": f"call_{self._count}", "type": "function", "function": {"name": name, "arguments": arguments}})
        self.messages.append({"role": "assistant", "content": text, "tool_calls": sent})

    def add_results(self, results: Sequence[dict[str, Any]], place: str) -> None:
        """Add results; calls that no message has made are added before them. Raises ApiError
        400."""
        calls = [check_object(each.get("call"), f"{place}[{i}].call") for i, each in enumerate(results)]
        if not self.calls:
            self._add_calls(calls, place)
        for i, (result, call) in enumerate(zip(results, calls, strict=True)):
            ids = self.calls.get(same := _identify(call))
            if ids is None:
                raise ApiError(
                    400, f"{place}[{i}].call is not one of the calls before it; send the call as it was made", f"{place}[{i}].call"
                )
            name = ids.popleft()
            if not ids:
                del self.calls[same]
            outputs = _objects(result.get("outputs"), f"{place}[{i}].outputs")
            content = [{"type": "text", "text": msgspec.json.encode(each).decode()} for each in outputs]
            self.messages.append({"role": "tool", "tool_call_id": name, "content": content})


def _identify(call: Mapping[str, Any]) -> Hashable:
    """What is equal for calls of a function with the same arguments."""
    return _freeze(call.get("name")), _freeze(call.get("parameters") or {})


def _freeze(value: Any) -> Hashable:
    """A JSON value as one that can be hashed."""
    if isinstance(value, dict):
        return frozenset((name, _freeze(each)) for name, each in value.items())
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _objects(value: Any, place: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ApiError(400, f"{place}: expected a list of objects", place)
    return [check_object(each, f"{place}[{i}]") for i, each in enumerate(value)]


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    """A tool in the shape of `/v2/chat`."""
    properties: dict[str, Any] = {}
    required = []
    where = f"{place}.parameter_definitions"
    for name, definition in check_object(tool.get("parameter_definitions") or {}, where).items():
        fields = check_object(definition, f"{where}.{name}")
        properties[name] = _schema(check_string(fields.get("type") or "", f"{where}.{name}.type"))
        if fields.get("description"):
            properties[name]["description"] = check_string(fields["description"], f"{where}.{name}.description")
        if fields.get("required") is True:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return make_function_tool(tool.get("name"), place, tool.get("description"), schema)


def _schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a type such as str or List[str]; of another one: any value."""
    outer, _, inner = kind.strip().lower().partition("[")
    kind = TYPES.get(outer, "")
    if kind == "array" and inner:
        return {"type": "array", "items": _schema(inner.removesuffix("]"))}
    return {"type": kind} if kind else {}


# responses ----------------------------------------------------------------------------------------

V1Call = declare("CohereV1Call", "name", parameters=dict[str, Any])
V1Meta = declare("CohereV1Meta", api_version=Version, billed_units=CohereTokens, tokens=CohereTokens)
V1FinishReason = Literal["COMPLETE", "MAX_TOKENS", "STOP_SEQUENCE", "ERROR"]
V1Reply = declare(
    "CohereV1Reply",
    "response_id generation_id text",
    "A chat of the first version. `chat_history` ends with this turn.",
    finish_reason=V1FinishReason,
    chat_history=list[dict[str, Any]],
    tool_calls=NotRequired[array(V1Call)],
    meta=V1Meta,
)
V1Event = declare(
    "CohereV1Event",
    "event_type generation_id? text? error?",
    "A line of a streamed chat.",
    is_finished=bool,
    finish_reason=NotRequired[V1FinishReason],
    tool_calls=NotRequired[array(V1Call)],
    response=NotRequired[V1Reply],
)


def _line(kind: str, *, is_finished: bool = False, **fields: Any) -> bytes:
    return msgspec.json.encode({"is_finished": is_finished, "event_type": kind, **fields}) + b"\n"


def _error_line(error: ApiError) -> bytes:
    return _line("stream-end", is_finished=True, finish_reason="ERROR", error=error.message)


ERRORS = ErrorShape(V2_ERRORS.body, _error_line, model=CohereErrorResponse)

router = ApiRouter(access=Access.USER, errors=ERRORS)


@router.post("/v1/chat", responses=responds_with(V1Reply, events=V1Event, stream_type=LINES))
async def chat(request: CohereV1Request, context: ContextDep, services: ServicesDep) -> Any:
    """Create a chat completion, as the first version of Cohere's API."""
    chat_request = request.to_chat_request()
    if request.prompt_truncation in ("AUTO", "AUTO_PRESERVE_ORDER"):
        chat_request = await drop_oldest_turns(services, chat_request)
    state = await start_chat(context, services, chat_request)
    return await V1ChatReply(services, chat_request, state, request).send(context, request.stream)


class V1ChatReply(ChatReply):
    """A response, whole or as lines. Reasoning is not part of the first version."""

    media_type = LINES.encode()

    def __init__(self, services: Services, request: ChatRequest, state: RequestState, sent: CohereV1Request) -> None:
        super().__init__(services, request, state)
        self._sent = sent
        self._lines = _LineWriter()

    def write_events(self, sequence: SequenceState) -> bytes:
        finish = sequence.finish
        if finish is not None and finish.reason in ("error", "abort"):
            return _error_line(failure(finish, sequence.request.sent_name) if finish.reason == "error" else aborted())
        lines = b"" if self._is_started else _line("stream-start", generation_id=self._name)
        self._is_started = True
        lines += self._blocks.read(sequence, self._parser, self._lines)
        if finish is None:
            return lines
        reply = self._build(finish)
        if calls := reply.get("tool_calls"):
            lines += _line("tool-calls-generation", text=reply["text"], tool_calls=calls)
        return lines + _line("stream-end", is_finished=True, finish_reason=reply["finish_reason"], response=reply)

    def _build(self, finish: Finish | None) -> dict[str, Any]:
        end, blocks = self._end(finish), self._blocks.blocks
        text = "".join(each.text for each in blocks if each.kind == "text")
        calls = [{"name": each.name, "parameters": _arguments(each)} for each in blocks if each.kind == "call"]
        history, turn = [*(self._sent.chat_history or ())], {"role": "CHATBOT", "message": text}
        sent: list[dict[str, Any]] = [{"role": "USER", "message": self._sent.message}] if self._sent.message else []
        if self._sent.tool_results:
            results = {"role": "TOOL", "tool_results": self._sent.tool_results}
            sent.insert(0 if history and history[-1].get("tool_calls") else 1, results)  # as the model has read them
        history += sent
        usage = end["usage"]
        return {
            "response_id": uuid.uuid4().hex,
            "generation_id": self._name,
            "text": text,
            "finish_reason": "COMPLETE" if end["finish_reason"] == "TOOL_CALL" else end["finish_reason"],
            "chat_history": [*history, turn | ({"tool_calls": calls} if calls else {})],
            **({"tool_calls": calls} if calls else {}),
            "meta": {"api_version": {"version": "1"}, "billed_units": usage["billed_units"], "tokens": usage["tokens"]},
        }


def _arguments(block: ContentBlock) -> dict[str, Any]:
    """The arguments of a call; empty where the model has written no object."""
    try:
        arguments = msgspec.json.decode(block.text)
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


class _LineWriter(BlockEventWriter):
    """Writes pieces of text; calls are sent whole."""

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        return _line("text-generation", text=piece) if block.kind == "text" else b""

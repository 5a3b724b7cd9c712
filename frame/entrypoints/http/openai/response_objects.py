"""One response of the Responses API while it is generated: the types of its object, items and
events, the object itself, its events in the order that clients rely on, its stored form.

Used by the routes of `responses` and `conversations`. Must not depend on a connection or the
engine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal, NotRequired

import msgspec

from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import count_reasoning, make_output_parsers
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock, ContentBlocks, Kind
from frame.entrypoints.http.failures import failure
from frame.entrypoints.http.openai.completion_objects import ReasoningTokens, TextLogprobs, TokenLogprob, list_tiers
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.openai.response_store import EventLog
from frame.entrypoints.http.openai.response_tools import CALLS, Tool, call_fields, custom_input, to_chat_call, tool_of
from frame.entrypoints.http.openai.responses_schema import SUMMARY, ResponsesRequest
from frame.entrypoints.http.response_types import CachedTokens, Page, array, declare
from frame.entrypoints.http.services import Services

ItemStatus = Literal["in_progress", "completed", "incomplete"]
OutputText = declare("OutputText", "text annotations", type="output_text", logprobs=array(TokenLogprob))
ReasoningText = declare("ReasoningText", "text", type="reasoning_text")
_Item = declare("Item", "id", status=ItemStatus)
_Call = declare("Call", "call_id name namespace?", base=_Item)
OutputMessage = declare("OutputMessage", base=_Item, type="message", role="assistant", content=array(OutputText))
ReasoningItem = declare("ReasoningItem", "summary encrypted_content", base=_Item, type="reasoning", content=array(ReasoningText))
FunctionCallItem = declare("FunctionCallItem", "arguments", "`arguments` is JSON text.", _Call, type="function_call")
CustomToolCallItem = declare("CustomToolCallItem", "input", base=_Call, type="custom_tool_call")
_OwnCall = declare("OwnCall", "call_id", base=_Item)
LocalShellCallItem = declare("LocalShellCallItem", base=_OwnCall, type="local_shell_call", action=dict[str, Any])
ShellCallItem = declare("ShellCallItem", base=_OwnCall, type="shell_call", action=dict[str, Any])
ApplyPatchCallItem = declare("ApplyPatchCallItem", base=_OwnCall, type="apply_patch_call", operation=dict[str, Any])
ToolSearchCallItem = declare("ToolSearchCallItem", "execution", base=_OwnCall, type="tool_search_call", arguments=dict[str, Any])
CompactionItem = declare("CompactionItem", "id encrypted_content", "A summary of the conversation before it.", type="compaction")
OutputItem = (
    OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem | LocalShellCallItem | ShellCallItem | ApplyPatchCallItem
    | ToolSearchCallItem | CompactionItem
)  # fmt: skip
ResponsesUsage = declare(
    "ResponsesUsage",
    "input_tokens output_tokens total_tokens",
    input_tokens_details=CachedTokens,
    output_tokens_details=ReasoningTokens,
)
ResponseError = declare("ResponseError", "code message")
IncompleteDetails = declare("IncompleteDetails", "reason")
ConversationReference = declare("ConversationReference", "id")
ResponseObject = declare(
    "ResponseObject",
    "id created_at completed_at background instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls"
    " previous_response_id prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store temperature"
    " tools top_p truncation user",
    "A response. Most fields are those of the request, with their defaults.",
    object="response",
    status=Literal["in_progress", "completed", "incomplete", "cancelled", "failed"],
    error=ResponseError | None,
    incomplete_details=IncompleteDetails | None,
    conversation=ConversationReference | None,
    output=array(OutputItem),
    prompt=None,
    reasoning=dict[str, Any],
    text=dict[str, Any],
    tool_choice=str | dict[str, Any],
    top_logprobs=int,
    usage=ResponsesUsage | None,
)
ResponseEvent = declare(
    "ResponseEvent",
    "type sequence_number item_id? output_index? content_index? delta? text? name? arguments? input?",
    "An event of a streamed response. `type` says which fields it has; `response.created`,\n"
    "`response.in_progress` and the last event have `response`.",
    response=NotRequired[ResponseObject],
    item=NotRequired[OutputItem],
    part=NotRequired[OutputText | ReasoningText],
    logprobs=NotRequired[array(TokenLogprob)],
)
StoredItem = dict[str, Any]  # an item that keeps the fields of its sender, besides `type`, `id` and `status`
ItemList = declare("ItemList", base=Page, data=list[StoredItem])


# events -------------------------------------------------------------------------------------------

_encode = msgspec.json.encode
PREFIXES = {"reasoning": "rs", "text": "msg"}
CONTENT_TYPES = {"reasoning": "reasoning_text", "text": "output_text"}


class EventWriter(BlockEventWriter):
    """Writes the numbered events of one response.

    `name`: the response's id; the ids of its items contain its suffix. `tools`: by the name of
    their function. `compacts`: the text is a summary, which becomes a compaction item.
    """

    def __init__(self, name: str, tools: Mapping[str, Tool], compacts: bool = False) -> None:
        self._suffix = name.partition("_")[2]
        self._tools = tools
        self._compacts = compacts
        self._number = 0

    def write_event(self, kind: str, **fields: Any) -> bytes:
        """One event of type `response.{kind}`."""
        body = {"type": f"response.{kind}", "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), _encode(body))

    def make_item(self, block: ContentBlock, status: str = "completed") -> dict[str, Any]:
        """The block as an output item, with the text that it has so far."""
        head = {"type": "message", "id": self._id(block), "status": status}
        if block.kind == "call":
            # a text or an object is known only when its JSON is complete
            is_open = status == "in_progress" and not self._streams_arguments(block)
            return head | call_fields(self._tool(block), block.call_id, "" if is_open else block.text)
        if self._is_summary(block):
            return {"type": "compaction", "id": self._id(block), "encrypted_content": SUMMARY + block.text}
        content = [_content_part(block, block.text)] if block.pieces else []
        if block.kind == "text":
            return head | {"role": "assistant", "content": content}
        return head | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": None}

    def write_start(self, block: ContentBlock) -> bytes:
        added = self.write_event("output_item.added", output_index=block.index, item=self.make_item(block, "in_progress"))
        if block.kind == "call" or self._is_summary(block):
            return added
        return added + self.write_event("content_part.added", **self._place(block), content_index=0, part=_content_part(block, ""))

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        if self._is_summary(block) or (block.kind == "call" and not self._streams_arguments(block)):
            return b""
        if block.kind == "call":
            return self.write_event("function_call_arguments.delta", **self._place(block), delta=piece)
        extra: dict[str, Any] = {"logprobs": block.last_logprobs} if block.kind == "text" else {}
        return self.write_event(f"{CONTENT_TYPES[block.kind]}.delta", **self._place(block), content_index=0, delta=piece, **extra)

    def write_stop(self, block: ContentBlock) -> bytes:
        done = b"" if self._is_summary(block) else self._write_call_stop(block) if block.kind == "call" else self._write_content_stop(block)
        return done + self.write_event("output_item.done", output_index=block.index, item=self.make_item(block))

    def _write_call_stop(self, block: ContentBlock) -> bytes:
        place, tool = self._place(block), self._tool(block)
        if tool.kind == "custom_tool_call":
            text = custom_input(block.text)
            done = self.write_event("custom_tool_call_input.delta", **place, delta=text)
            return done + self.write_event("custom_tool_call_input.done", **place, input=text)
        if self._streams_arguments(block):
            return self.write_event("function_call_arguments.done", **place, name=tool.name, arguments=block.text)
        return b""

    def _write_content_stop(self, block: ContentBlock) -> bytes:
        place = self._place(block)
        extra: dict[str, Any] = {"logprobs": block.logprobs} if block.kind == "text" else {}
        done = self.write_event(f"{CONTENT_TYPES[block.kind]}.done", **place, content_index=0, text=block.text, **extra)
        return done + self.write_event("content_part.done", **place, content_index=0, part=_content_part(block, block.text))

    def _tool(self, block: ContentBlock) -> Tool:
        return self._tools.get(block.name) or Tool("function_call", block.name)

    def _streams_arguments(self, block: ContentBlock) -> bool:
        return self._tool(block).kind == "function_call"

    def _is_summary(self, block: ContentBlock) -> bool:
        return self._compacts and block.kind == "text"

    def _id(self, block: ContentBlock) -> str:
        prefix = (
            CALLS[self._tool(block).kind].prefix if block.kind == "call" else "cmp" if self._is_summary(block) else PREFIXES[block.kind]
        )
        return f"{prefix}_{self._suffix}_{block.index}"

    def _place(self, block: ContentBlock) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index}


def replay_events(body: dict[str, Any]) -> bytes:
    """The events of a stored, finished response, with each block in one piece."""
    tools = [tool_of(item, "output") for item in body["output"] if item["type"] in CALLS]
    compacts = any(item["type"] == "compaction" for item in body["output"])
    writer = EventWriter(body["id"], {tool.function: tool for tool in tools}, compacts)
    begun = body | {"status": "in_progress", "completed_at": None, "error": None, "incomplete_details": None, "output": [], "usage": None}
    events = [writer.write_event("created", response=begun), writer.write_event("in_progress", response=begun)]
    for place, item in enumerate(body["output"]):
        block = _block(place, item)
        events += [writer.write_start(block), *(writer.write_delta(block, piece) for piece in block.pieces), writer.write_stop(block)]
    events.append(writer.write_event(final_event_name(body["status"]), response=body))
    return b"".join(events)


def final_event_name(status: str) -> str:
    """The last event's name; OpenAI has none for cancelled responses."""
    return "incomplete" if status == "cancelled" else status


def _block(place: int, item: dict[str, Any]) -> ContentBlock:
    if item["type"] in CALLS:
        call = to_chat_call(item, "output")
        return ContentBlock(place, "call", call["function"]["name"], call["id"], [call["function"]["arguments"]])
    if item["type"] == "compaction":
        return ContentBlock(place, "text", pieces=[item["encrypted_content"].removeprefix(SUMMARY)])
    parts = item["content"]
    logprobs = [entry for part in parts for entry in part.get("logprobs", ())]
    kind: Kind = "text" if item["type"] == "message" else "reasoning"
    return ContentBlock(place, kind, pieces=[part["text"] for part in parts], logprobs=logprobs, last_logprobs=logprobs)


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """An output item as the next request reads it: log-probabilities have many JSON parts."""
    if item["type"] != "message":
        return item
    return item | {"content": [part | {"logprobs": []} for part in item["content"]]}


def _content_part(block: ContentBlock, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": CONTENT_TYPES[block.kind], "text": text}
    return part | {"annotations": [], "logprobs": block.logprobs if text else []} if block.kind == "text" else part


# the object ---------------------------------------------------------------------------------------

# Of finish reasons; otherwise "completed"
STATUSES = {"length": "incomplete", "abort": "cancelled", "error": "failed"}


@dataclass(slots=True)
class ResponseInput:
    """The input of one response."""

    request: ResponsesRequest
    tenant: str  # whose key the request has; "" without keys
    history: list[dict[str, Any]]  # stored items before the input
    items: list[dict[str, Any]]  # the input, as it is stored
    conversation: str | None = None  # id of the conversation that the response is added to
    is_stored: bool = False
    log: EventLog | None = None  # events of a streamed background response
    tools: Mapping[str, Tool] = field(default_factory=dict)  # by the name of their function


class ResponseBuilder:
    """A response as one object or as events; stored if its input says so."""

    def __init__(self, services: Services, response_input: ResponseInput, chat: ChatRequest, state: RequestState) -> None:
        request = response_input.request
        self._store = services.responses
        self._input = response_input
        self._sequence = state.sequences[0]
        self._parser = make_output_parsers(services, chat, state).get(0)
        # Cached, because the last body is made twice: for the store and for the client.
        self._count_reasoning = cache(partial(count_reasoning, services, chat, self._sequence, self._parser))
        self._is_stored = response_input.is_stored
        self._blocks = ContentBlocks(TextLogprobs(services.need_tokenizer()) if request.wants_logprobs else None)
        self._writer = EventWriter(state.rid, response_input.tools, request.compacts)
        self._name = state.rid
        self._model = services.response_model(chat.model)
        self._created = int(time.time())
        self._is_started = False

    def build_response(self) -> dict[str, Any]:
        """The whole response, after the sequence has finished."""
        self._blocks.read(self._sequence, self._parser, BlockEventWriter())
        return self._finished()

    def read(self, sequence: SequenceState) -> None:
        """Read new output of a response that is not streamed, so that its log-probabilities are not
        all formatted at its end."""
        if sequence.finish is None:
            self._blocks.read(sequence, self._parser, BlockEventWriter())

    def build_initial(self) -> dict[str, Any]:
        """The response before its first token."""
        return self._body("in_progress")

    def write_events(self, sequence: SequenceState) -> bytes:
        """The events of the new output."""
        events = b""
        if not self._is_started:
            self._is_started = True
            body = self._body("in_progress")
            events = self._writer.write_event("created", response=body) + self._writer.write_event("in_progress", response=body)
        events += self._blocks.read(sequence, self._parser, self._writer)
        if sequence.finish is None:
            return events
        body = self._finished()
        return events + self._writer.write_event(final_event_name(body["status"]), response=body)

    def store(self) -> None:
        """Store the response in its present state."""
        response_input = self._input
        if self._store.is_cancelled(self._name) and self._store.get(self._name, response_input.tenant) is None:
            return  # deleted after the cancellation
        if self._is_stored:
            status = self._status()
            body, log = self._body(status), response_input.log
            before = [*response_input.history, *response_input.items]
            items = _encode([*before, *map(_without_logprobs, body["output"])])
            # False: the output made it too large, and the body that the client receives says so
            self._is_stored = self._store.put(
                self._name, response_input.tenant, _encode(body), items, len(before), log, is_running=status == "in_progress"
            )

    def delete_unfinished(self) -> None:
        """Delete a response that ended before it finished. The last call for a response."""
        self._store.forget_cancelled(self._name)
        if self._is_stored and (self._sequence.finish is None or not self._is_started):
            self._store.delete(self._name, self._input.tenant)

    def _finished(self) -> dict[str, Any]:
        self._is_started = True
        response_input, status = self._input, self._status()
        if response_input.conversation is not None and status in ("completed", "incomplete"):
            new = [*response_input.items, *self._output(status)]
            if not self._store.append_items(response_input.conversation, response_input.tenant, new):
                # Deleted meanwhile, or full: the response shows no conversation
                response_input.conversation = None
        self.store()
        return self._body(status)

    def _status(self) -> str:
        """The status; a response that finished after its cancellation is cancelled."""
        if self._store.is_cancelled(self._name):
            return "cancelled"
        finish = self._sequence.finish
        return "in_progress" if finish is None else STATUSES.get(finish.reason, "completed")

    def _output(self, status: str) -> list[dict[str, Any]]:
        last = len(self._blocks.blocks) - 1
        return [
            self._writer.make_item(block, "incomplete" if block.index == last and status != "completed" else "completed")
            for block in self._blocks.blocks
        ]

    def _body(self, status: str) -> dict[str, Any]:
        request, finish = self._input.request, self._sequence.finish
        is_over = status != "in_progress"
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": bool(request.background),
            "error": {"code": "server_error", "message": failure(finish).message} if finish and finish.reason == "error" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "conversation": None if self._input.conversation is None else {"id": self._input.conversation},
            "max_output_tokens": request.max_output_tokens,
            "max_tool_calls": request.max_tool_calls,
            "metadata": request.metadata or {},
            "model": self._model,
            "moderation": None,
            "output": self._output(status) if is_over else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "prompt": None,
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_options": None,
            "prompt_cache_retention": request.prompt_cache_retention,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "safety_identifier": request.safety_identifier,
            "service_tier": "default",
            "store": self._is_stored,
            "temperature": self._sequence.params.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": self._sequence.params.top_p,
            "truncation": request.truncation or "disabled",
            "usage": self._usage() if is_over else None,
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        sequence = self._sequence
        return {
            "input_tokens": len(sequence.prompt),
            "input_tokens_details": {
                "cached_tokens": sequence.cached,
                "cache_write_tokens": sequence.num_written,
                **list_tiers([sequence]),
            },
            "output_tokens": sequence.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._count_reasoning()},
            "total_tokens": len(sequence.prompt) + sequence.num_tokens,
        }

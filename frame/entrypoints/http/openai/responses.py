"""The routes of OpenAI's Responses and Conversations APIs. A response runs as a chat request and is
stored; a conversation is stored items. Must not depend on the engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.http.chat.chat_request import count_chat, drop_oldest_turns, start_chat
from frame.entrypoints.http.errors import ApiError, DisconnectedError, ErrorShape
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.openai.response_objects import (
    ItemList,
    ResponseBuilder,
    ResponseEvent,
    ResponseInput,
    ResponseObject,
    ResponsesUsage,
    StoredItem,
    replay_events,
)
from frame.entrypoints.http.openai.response_store import EventLog, StoredEntry
from frame.entrypoints.http.openai.responses_schema import (
    ITEMS,
    ResponsesRequest,
    container_ids,
    find_item,
    messages_of,
    to_stored_items,
)
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.protocol.list_pages import make_list, make_page
from frame.entrypoints.http.request_body import Metadata, RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import stream_response, wait_complete
from frame.entrypoints.http.response_types import declare
from frame.entrypoints.http.services import Services

# Ids of responses and conversations in which one request's references are looked up
MAX_CONTAINERS = 32
OBJECT_BYTES = 2048  # of a response before its output, besides what it repeats of its request
NOTHING_STORED = "this server stores none (--response-store-size is 0)"

InputTokenCount = declare("InputTokenCount", "input_tokens", object="response.input_tokens")
CompactedResponse = declare(
    "CompactedResponse", "id created_at", object="response.compaction", output=list[StoredItem], usage=ResponsesUsage
)
DeletedResponse = declare("DeletedResponse", "id deleted", object="response")

ERRORS = ErrorShape(ApiError.body, lambda error: b"event: error\ndata: " + error.body() + b"\n\n")

router = ApiRouter(access=Access.USER, errors=ERRORS)


@router.post("/v1/responses", responses=responds_with(ResponseObject, events=ResponseEvent))
async def create(request: ResponsesRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create a response."""
    response_input, chat = await _prepare(context, services, request, f"resp_{uuid.uuid4().hex}")
    response_input.is_stored = _will_store(services, response_input)
    if request.background:
        return await _create_in_background(context, services, response_input, chat)
    state = await start_chat(context, services, chat)
    response = ResponseBuilder(services, response_input, chat, state)
    try:
        response.store()
        if request.stream:
            await stream_response(context, services, state, response.write_events, lambda: b"")
        else:
            await wait_complete(state, response.read if request.wants_logprobs else None)
            return response.build_response()
    finally:
        response.delete_unfinished()


async def _prepare(context: RequestContext, services: Services, request: ResponsesRequest, name: str) -> tuple[ResponseInput, ChatRequest]:
    """The input of a response, and its chat request. `name`: the response's id. Raises ApiError."""
    conversation, history = request.conversation_id(), []
    if conversation is not None:
        history = (await find_conversation(context, services, conversation, "conversation")).decode_items()
    elif request.previous_response_id:
        previous, remedy = request.previous_response_id, "send the conversation as input"
        stored = await find_response(context, services, previous, "previous_response_id", remedy)
        if stored.is_running:
            raise ApiError(400, f"the response {previous} is in progress; wait for its end", "previous_response_id")
        history = stored.decode_items()
    items = await _without_references(context, services, history, request.items())
    tools = request.collect_tools(history, items)
    context.ignored += (*tools.dropped, *(["context_management"] if request.context_management else []))
    await asyncio.sleep(0)  # thousands of items take long, here and below
    chat = request.to_chat_request(history, items, name, tools)
    await asyncio.sleep(0)
    if request.truncation == "auto":
        chat = await drop_oldest_turns(services, chat)
    return ResponseInput(request, context.tenant, history, to_stored_items(items, name), conversation, tools=tools.by_function), chat


def _will_store(services: Services, response_input: ResponseInput) -> bool:
    """Whether the response is stored. Raises ApiError 400 for one that must be and is too large."""
    request, history, items = response_input.request, response_input.history, response_input.items
    if request.store is False or not services.responses.is_on:
        return False
    repeated = _encode((request.instructions, request.tools, request.text, request.metadata))
    if services.responses.fits(response_input.tenant, bytes(OBJECT_BYTES) + repeated, _encode([*history, *items])):
        return True
    if not (request.store or request.background):
        return False
    count = f"input has {len(items)} items" + (f" and the conversation before it {len(history)}" if history else "")
    remedy = "begin a new conversation" if history else "send fewer or shorter items"
    remedy += "" if request.background else ", or store: false"
    param = "conversation" if response_input.conversation else "previous_response_id" if history else "input"
    raise ApiError(400, f"{count}, more than one stored response may hold; {remedy}", param)


async def _without_references(
    context: RequestContext, services: Services, history: list[dict[str, Any]], items: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The input items, with stored items in place of references. Raises ApiError 400 or 404."""
    places = [i for i, item in enumerate(items) if item.get("type") == "item_reference" or item.keys() == {"id"}]
    if not places:
        return items
    known, containers, resolved = _by_name(history), set[str](), list(items)
    for place in places:
        name, param = items[place].get("id"), f"input[{place}].id"
        if not isinstance(name, str):
            raise ApiError(400, f"{param}: expected a string", param)
        for container in container_ids(name) if name not in known else ():
            stored = await services.responses.find(container, context.tenant) if container not in containers else None
            containers.add(container)
            if len(containers) > MAX_CONTAINERS:
                sentence = f"{param}: the input refers to items of more than {MAX_CONTAINERS // 2} responses; send the items themselves"
                raise ApiError(400, sentence, param)
            if stored is not None:
                known = _by_name(stored.decode_items()) | known
                await asyncio.sleep(0)  # decoding may have taken long
        if name not in known:
            raise ApiError(404, f"{param}: there is no item {name[:100]!r}, or it is no longer stored; send the item itself", param)
        resolved[place] = known[name]
    return resolved


def _by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["id"]: item for item in items if isinstance(item.get("id"), str)}


async def _create_in_background(
    context: RequestContext, services: Services, response_input: ResponseInput, chat: ChatRequest
) -> dict[str, Any] | None:
    """Start a response that outlives the connection. Sends its events, or its first state."""
    request = response_input.request
    if request.store is False or not services.responses.is_on:
        remedy = "leave store out" if services.responses.is_on else NOTHING_STORED
        raise ApiError(400, f"a background response must be stored; {remedy}", "background")
    log = response_input.log = EventLog() if request.stream else None
    caller = BackgroundCaller(context)
    try:
        state = await start_chat(caller, services, chat)
    except BaseException:
        caller.close()
        raise
    context.scope["adapters"] = state.adapters
    response = ResponseBuilder(services, response_input, chat, state)
    response.store()
    services.run(_finish(services, response, state, caller, log))
    if log is None:
        return response.build_initial()
    else:
        await _send_events(context, log, 0)
    return None


async def _finish(
    services: Services, response: ResponseBuilder, state: RequestState, caller: BackgroundCaller, log: EventLog | None
) -> None:
    """Run a background response to its end."""
    try:
        while log is not None and (state.num_unfinished or state.changed) and not state.is_disconnected:
            for sequence in await state.wait():
                services.responses.add_events(state.rid, caller.tenant, log, response.write_events(sequence))
        if log is None:
            await state.wait_until_complete()
            response.build_response()
    finally:
        services.client.abort_request(state)
        response.delete_unfinished()
        caller.close()
        if log is not None:
            log.close()


class BackgroundCaller:
    """Keeps the tenant and the quota of a background response, not the connection."""

    handoff = None  # what is stored does not move

    def __init__(self, context: RequestContext) -> None:
        self.state: RequestState | None = None
        self.tenant = context.tenant
        self.request_id = context.request_id
        self.lease = None if context.lease is None else context.lease.transfer()
        self._context = context

    def header(self, name: bytes) -> str | None:
        return self._context.header(name)

    def on_disconnect(self, act: Callable[[], None]) -> None:
        """Ignore: the response continues when the client disconnects."""

    def close(self) -> None:
        if self.lease is not None:
            self.lease.close()


@router.post("/v1/responses/input_tokens", responses=responds_with(InputTokenCount))
async def count(request: ResponsesRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Count the input tokens of a response."""
    _, chat = await _prepare(context, services, request, "")
    return {"object": "response.input_tokens", "input_tokens": await count_chat(context, services, chat)}


@router.post("/v1/responses/compact", responses=responds_with(CompactedResponse))
async def compact(request: ResponsesRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Replace a conversation by its messages of the user and a summary of the rest."""
    items = [*request.items(), {"type": "compaction_trigger"}]
    request = request.model_copy(update={"input": items, "store": False, "stream": False, "background": None})
    response_input, chat = await _prepare(context, services, request, f"resp_{uuid.uuid4().hex}")
    state = await start_chat(context, services, chat)
    await wait_complete(state)
    body = ResponseBuilder(services, response_input, chat, state).build_response()
    before = [*response_input.history, *response_input.items]
    kept = [item for item in before if item["type"] == "message" and item.get("role") == "user"]
    summary = [item for item in body["output"] if item["type"] == "compaction"]
    head = {"id": body["id"], "object": "response.compaction", "created_at": body["created_at"]}
    return {**head, "output": [*kept, *summary], "usage": body["usage"]}


@router.get("/v1/responses/{name}", responses=responds_with(ResponseObject, events=ResponseEvent))
async def retrieve(name: str, context: ContextDep, services: ServicesDep, stream: str = "false", starting_after: str = "-1") -> Any:
    """Retrieve a stored response; with `stream=true` its events after number `starting_after`."""
    stored = await find_response(context, services, name)
    if (choice := (stream or "false").lower()) not in ("true", "1", "false", "0"):
        raise ApiError(400, f"stream is {stream[:50]!r}; it must be true or false", "stream")
    if choice in ("false", "0"):
        await context.respond(stored.body)
        return
    start = starting_after or "-1"
    if not start.removeprefix("-").isdecimal() or not int(start[:9]) >= -1:
        raise ApiError(400, f"starting_after is {start[:50]!r}; it must be the sequence number of an event", "starting_after")
    await context.body()  # a disconnect is reported after the body
    await _send_events(context, _log_of(stored), int(start[:9]) + 1)


def _log_of(stored: StoredEntry) -> EventLog:
    """The events of a stored response, or of its finished object. Raises ApiError 400."""
    if stored.log is not None and not stored.log.is_lost:
        return stored.log
    body = msgspec.json.decode(stored.body)
    if body["status"] == "in_progress":
        sentence = "the events of this response are not stored; retrieve it without stream, or create it with background and stream"
        raise ApiError(400, sentence, "stream")
    log = EventLog()
    log.add(replay_events(body))
    log.close()
    return log


async def _send_events(context: RequestContext, log: EventLog, start: int) -> None:
    """Send the events from index `start` on. A disconnect does not end the response."""
    gone = asyncio.Event()

    def hang_up() -> None:
        gone.set()
        log.wake()

    context.on_disconnect(hang_up)
    await context.start_events()
    while events := await log.read(start, gone.is_set):
        start += len(events)
        await context.event(b"".join(events))
    if gone.is_set():
        raise DisconnectedError
    if log.is_lost:
        raise ApiError(503, "the events of this response exceed what this key may store; retrieve the response without stream")
    await context.end()


@router.get("/v1/responses/{name}/input_items", responses=responds_with(ItemList))
async def input_items(
    name: str, context: ContextDep, services: ServicesDep, limit: str = "20", order: str = "desc", after: str = ""
) -> Any:
    """List the input items of a stored response."""
    stored = await find_response(context, services, name)
    return make_page(stored.decode_items()[: stored.num_input], limit, order, after)


@router.delete("/v1/responses/{name}", responses=responds_with(DeletedResponse))
async def delete(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Delete a stored response."""
    if msgspec.json.decode((await find_response(context, services, name)).body)["status"] == "in_progress":
        raise ApiError(400, f"the response {name} is in progress; cancel it before", "response_id")
    await _delete(context, services, name)
    return {"id": name, "object": "response", "deleted": True}


@router.post("/v1/responses/{name}/cancel", responses=responds_with(ResponseObject))
async def cancel(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Cancel a response that is in progress. One in the background that has ended is returned."""
    body = msgspec.json.decode((await find_response(context, services, name)).body)
    if body["status"] != "in_progress":
        if body.get("background"):
            return body
        raise ApiError(400, f"the response {name} is {body['status']}; only a response in progress can be cancelled", "response_id")
    body["status"] = "cancelled"
    services.responses.cancel(name, context.tenant, msgspec.json.encode(body))
    services.client.abort_requests([name], context.tenant)
    return body


async def _delete(context: RequestContext, services: Services, name: str) -> None:
    """Delete a stored response or conversation. Raises ApiError 503 if its file stays."""
    if not await services.responses.delete_file(name, context.tenant):
        raise ApiError(503, f"{name} was not deleted: server.state_dir cannot be written; the log says why. Delete it again later")


async def find_response(
    context: RequestContext, services: Services, name: str, param: str = "response_id", remedy: str = "create it again"
) -> StoredEntry:
    """A stored response. `param`: the field with its id. Raises ApiError 404."""
    stored = await services.responses.find(name, context.tenant) if name.startswith("resp_") else None
    return _require(stored, services, f"response {name[:100]!r}", param, remedy)


async def find_conversation(context: RequestContext, services: Services, name: str, param: str = "conversation_id") -> StoredEntry:
    """A stored conversation. `param`: the field with its id. Raises ApiError 404."""
    stored = await services.responses.find(name, context.tenant) if name.startswith("conv_") else None
    return _require(stored, services, f"conversation {name[:100]!r}", param, "create a new one")


def _require(stored: StoredEntry | None, services: Services, what: str, param: str, remedy: str) -> StoredEntry:
    if stored is None:
        remedy = remedy if services.responses.is_on else NOTHING_STORED
        raise ApiError(404, f"there is no {what}, or it is no longer stored; {remedy}", param)
    return stored


# conversations ------------------------------------------------------------------------------------

MAX_ADDED = 20  # items of one request
_encode = msgspec.json.encode

Conversation = declare("Conversation", "id created_at metadata", object="conversation")
DeletedConversation = declare("DeletedConversation", "id deleted", object="conversation.deleted")


class ConversationRequest(RequestBody):
    NESTED: ClassVar[Mapping[str, Shape]] = ITEMS

    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class ConversationUpdate(RequestBody):
    metadata: Metadata | None


class ItemsRequest(RequestBody):
    NESTED: ClassVar[Mapping[str, Shape]] = ITEMS

    items: list[dict[str, Any]]


@router.post("/v1/conversations", responses=responds_with(Conversation))
async def create_conversation(context: ContextDep, services: ServicesDep, request: ConversationRequest | None = None) -> Any:
    """Create a conversation with its first items."""
    request = request or ConversationRequest()
    if not services.responses.is_on:
        raise ApiError(400, f"a conversation must be stored; {NOTHING_STORED}")
    name = f"conv_{uuid.uuid4().hex}"
    body = {"id": name, "object": "conversation", "created_at": int(time.time()), "metadata": request.metadata or {}}
    _store(context, services, name, _encode(body), _new_items(request.items or [], name))
    return body


@router.get("/v1/conversations/{name}", responses=responds_with(Conversation))
async def retrieve_conversation(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve a conversation without its items."""
    await context.respond((await find_conversation(context, services, name)).body)


@router.post("/v1/conversations/{name}", dependencies=[SMALL_BODY], responses=responds_with(Conversation))
async def update_conversation(name: str, request: ConversationUpdate, context: ContextDep, services: ServicesDep) -> Any:
    """Replace a conversation's metadata."""
    stored = await find_conversation(context, services, name)
    body = msgspec.json.decode(stored.body) | {"metadata": request.metadata or {}}
    _store(context, services, body["id"], _encode(body), stored.decode_items())
    return body


@router.delete("/v1/conversations/{name}", responses=responds_with(DeletedConversation))
async def delete_conversation(name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Delete a conversation. Its responses stay."""
    await find_conversation(context, services, name)
    await _delete(context, services, name)
    return {"id": name, "object": "conversation.deleted", "deleted": True}


@router.post("/v1/conversations/{name}/items", responses=responds_with(ItemList))
async def add_items(request: ItemsRequest, name: str, context: ContextDep, services: ServicesDep) -> Any:
    """Append items to a conversation."""
    stored = await find_conversation(context, services, name)
    new = _new_items(request.items, name)
    _store(context, services, name, stored.body, [*stored.decode_items(), *new])
    return make_list(new)


@router.get("/v1/conversations/{name}/items", responses=responds_with(ItemList))
async def items(name: str, context: ContextDep, services: ServicesDep, limit: str = "20", order: str = "desc", after: str = "") -> Any:
    """List the items of a conversation, in pages."""
    return make_page((await find_conversation(context, services, name)).decode_items(), limit, order, after)


@router.get("/v1/conversations/{name}/items/{item}", responses=responds_with(StoredItem))
async def get_item(name: str, item: str, context: ContextDep, services: ServicesDep) -> Any:
    """Retrieve an item of a conversation."""
    return _item((await find_conversation(context, services, name)).decode_items(), item)


@router.delete("/v1/conversations/{name}/items/{item}", responses=responds_with(Conversation))
async def delete_item(name: str, item: str, context: ContextDep, services: ServicesDep) -> Any:
    """Delete an item of a conversation."""
    stored = await find_conversation(context, services, name)
    items = stored.decode_items()
    gone = _item(items, item)
    _store(context, services, name, stored.body, [each for each in items if each is not gone])
    await context.respond(stored.body)


def _new_items(items: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Items in stored form. Raises ApiError 400 for items that no request could use."""
    if len(items) > MAX_ADDED:
        raise ApiError(400, f"items has {len(items)} entries; send at most {MAX_ADDED} at once", "items")
    messages_of(items, "items")
    return to_stored_items(items, name, f"{uuid.uuid4().hex[:8]}_")


def _store(context: RequestContext, services: Services, name: str, body: bytes, items: list[dict[str, Any]]) -> None:
    """Store a conversation. Raises ApiError 413 if it is larger than a key may store."""
    data = _encode(items)
    if not services.responses.fits(context.tenant, body, data):
        sentence = f"the items of the conversation would have {len(data)} bytes, more than one entry may have; delete items of it"
        raise ApiError(413, sentence, "items")
    services.responses.put(name, context.tenant, body, data)


def _item(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    each = find_item(items, name)
    if each is None:
        raise ApiError(404, f"there is no item {name[:100]!r} in this conversation", "item_id")
    return each

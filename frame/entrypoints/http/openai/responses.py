"""`/v1/responses`: OpenAI's newer API, as chat requests in another dialect, with responses stored for `previous_response_id`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.http.chat.chat_request import begin_chat, count_prompt, shortened
from frame.entrypoints.http.errors import ApiError, DisconnectedError, ErrorShape
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.openai.items import containers_of, page_of, stored_items
from frame.entrypoints.http.openai.response_store import EventLog, Stored
from frame.entrypoints.http.openai.responses_answer import ResponseAnswer, Turn
from frame.entrypoints.http.openai.responses_events import replayed
from frame.entrypoints.http.openai.responses_schema import ResponsesRequest
from frame.entrypoints.http.request_context import Call
from frame.entrypoints.http.services import Access, Operation, Routes, Services

_decoder = msgspec.json.Decoder(ResponsesRequest, strict=False)
MOST_CONTAINERS = 32  # ids of responses and conversations that the references of one request are looked up in
NOTHING_STORED = "this server keeps none (--response-store-size)"


def _error_body(error: ApiError) -> bytes:
    if error.param == "response_format":  # what a grammar's refusal names
        error.param = "text.format"
    return error.body()


def _error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + _error_body(error) + b"\n\n"


ERRORS = ErrorShape(_error_body, _error_event)


async def create(call: Call, services: Services) -> None:
    """A response, as OpenAI's Responses API."""
    request = await call.json(_decoder)
    turn, chat = await _prepare(call, services, request, f"resp_{uuid.uuid4().hex}")
    if request.background:
        await _create_in_background(call, services, turn, chat)
        return
    answer = await begin_chat(call, services, chat)
    response = ResponseAnswer(services, turn, chat, answer)
    try:
        response.store()
        if request.stream:
            await services.stream(call, answer, response.write, lambda: b"")
        else:
            await services.complete(answer)
            await call.respond_json(response.whole())
    finally:
        services.client.abandon(answer)
        response.forget_unfinished()


async def _prepare(call: Call, services: Services, request: ResponsesRequest, name: str) -> tuple[Turn, ChatRequest]:
    """What a request asks for, and the same as a chat request. `name`: the response's id. Raises ApiError."""
    conversation, history = request.conversation_id(), []
    if conversation is not None:
        history = stored_of(call, services, conversation, "conversation").conversation()
    elif request.previous_response_id:
        history = stored_of(call, services, request.previous_response_id, "previous_response_id").conversation()
    items = await _without_references(call, services, history, request.items())
    chat = request.chat(history, items, name)
    if request.truncation == "auto":
        chat = await shortened(services, chat)
    return Turn(request, call.tenant, history, stored_items(items, name), conversation), chat


async def _without_references(
    call: Call, services: Services, history: list[dict[str, Any]], items: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The items, with stored ones where they were referred to by id. Raises ApiError."""
    places = [i for i, item in enumerate(items) if item.get("type") == "item_reference" or item.keys() == {"id"}]
    if not places:
        return items
    known, containers, found = _by_name(history), set[str](), list(items)
    for place in places:
        name, param = items[place].get("id"), f"input[{place}].id"
        if not isinstance(name, str):
            raise ApiError(400, f"{param}: expected a string", param)
        for container in containers_of(name) if name not in known else ():
            stored = services.responses.get(container, call.tenant) if container not in containers else None
            containers.add(container)
            if len(containers) > MOST_CONTAINERS:
                sentence = f"{param}: the input refers to items of more than {MOST_CONTAINERS // 2} responses; send the items themselves"
                raise ApiError(400, sentence, param)
            if stored is not None:
                known = _by_name(stored.conversation()) | known
                await asyncio.sleep(0)  # decoding took its time
        if name not in known:
            raise ApiError(404, f"{param}: there is no item {name[:100]!r}, or it is no longer stored; send the item itself", param)
        found[place] = known[name]
    return found


def _by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {item["id"]: item for item in items if isinstance(item.get("id"), str)}


async def _create_in_background(call: Call, services: Services, turn: Turn, chat: ChatRequest) -> None:
    """Answer with the response as it begins, or with its events; it is finished also without a client, who may come back for it."""
    request = turn.request
    if request.store is False or not services.responses.is_on:
        remedy = "leave store out" if services.responses.is_on else NOTHING_STORED
        raise ApiError(400, f"a background response has to be stored; {remedy}", "background")
    log = turn.log = EventLog() if request.stream else None
    caller = Detached(call)
    try:
        answer = await begin_chat(caller, services, chat)
    except BaseException:
        caller.close()
        raise
    response = ResponseAnswer(services, turn, chat, answer)
    response.store()
    services.run(_finish(services, response, answer, caller, log))
    if log is None:
        await call.respond_json(response.begun())
    else:
        await _send_events(call, log, 0)


async def _finish(services: Services, response: ResponseAnswer, answer: RequestState, caller: Detached, log: EventLog | None) -> None:
    """A background response to its end, whatever that is."""
    try:
        while log is not None and (answer.open or answer.changed) and not answer.gone:
            for sequence in await answer.wait():
                response.log_events(sequence, log)
        if log is None:
            await answer.complete()
            response.whole()
    finally:
        services.client.abandon(answer)
        response.forget_unfinished()
        caller.close()
        if log is not None:
            log.close()


class Detached:
    """The sender of a request that goes on without him: who he was stays, his connection does not matter, his share is handed on."""

    def __init__(self, call: Call) -> None:
        self.answer: RequestState | None = None
        self.tenant = call.tenant
        self.request_id = call.request_id
        self.share = None if call.share is None else call.share.handed_on()
        self._call = call

    def header(self, name: bytes) -> str | None:
        return self._call.header(name)

    def on_disconnect(self, act: Callable[[], None]) -> None:
        """Nothing."""

    def close(self) -> None:
        """It is over."""
        if self.share is not None:
            self.share.close()


async def count(call: Call, services: Services) -> None:
    """How many tokens a response's prompt has."""
    _, chat = await _prepare(call, services, await call.json(_decoder), "")
    await call.respond_json({"object": "response.input_tokens", "input_tokens": await count_prompt(services, chat)})


async def retrieve(call: Call, services: Services) -> None:
    """A stored response; with `stream=true` its events, those after number `starting_after`."""
    stored = _stored(call, services)
    if (call.query("stream") or "false").lower() not in ("true", "1"):
        await call.respond(stored.body)
        return
    given = call.query("starting_after") or "-1"
    if not given.removeprefix("-").isdecimal() or not int(given[:9]) >= -1:
        raise ApiError(400, f"starting_after is {given[:50]!r}; it must be the sequence number of an event", "starting_after")
    await call.body()  # a hang-up is heard after it
    await _send_events(call, _log_of(stored), int(given[:9]) + 1)


def _log_of(stored: Stored) -> EventLog:
    """The events of a response; of one that is over they are made anew where they were not stored. Raises ApiError."""
    if stored.log is not None and not stored.log.is_lost:
        return stored.log
    body = msgspec.json.decode(stored.body)
    if body["status"] == "in_progress":
        raise ApiError(400, "the events of this response are not stored; get it without stream, or create it with background and stream",
                       "stream")  # fmt: skip
    log = EventLog()
    log.add(replayed(body))
    log.close()
    return log


async def _send_events(call: Call, log: EventLog, place: int) -> None:
    """Events from `place` on, until the last. A client that hangs up ends nothing but this."""
    reader = log.open_reader(place)
    call.on_disconnect(reader.hang_up)
    try:
        await call.start_events()
        while (events := await reader.read()) is not None:
            await call.event(events)
        if reader.is_gone:
            raise DisconnectedError
        if log.is_lost:
            raise ApiError(503, "the events of this response need more room than this key may fill; get the response without stream")
        await call.end()
    finally:
        log.close_reader(reader)


async def input_items(call: Call, services: Services) -> None:
    """The items that a stored response answers."""
    stored = _stored(call, services)
    await call.respond_json(page_of(call, stored.conversation()[: stored.num_input]))


async def delete(call: Call, services: Services) -> None:
    """Forget a response."""
    name = call.scope["path_params"]["name"]
    if msgspec.json.decode(_stored(call, services).body)["status"] == "in_progress":
        raise ApiError(400, f"the response {name} is in progress; cancel it before", "response_id")
    services.responses.delete(name, call.tenant)
    await call.respond_json({"id": name, "object": "response", "deleted": True})


async def cancel(call: Call, services: Services) -> None:
    """End a response that is being written."""
    name = call.scope["path_params"]["name"]
    body = msgspec.json.decode(_stored(call, services).body)
    if body["status"] != "in_progress":
        raise ApiError(400, f"the response {name} is {body['status']}; only one that is in progress can be cancelled", "response_id")
    services.client.abort([name], call.tenant)
    await call.respond_json({**body, "status": "cancelled"})


def _stored(call: Call, services: Services) -> Stored:
    """The response that the path names. Raises ApiError 404."""
    return stored_of(call, services, call.scope["path_params"]["name"], "response_id")


def stored_of(call: Call, services: Services, name: str, param: str) -> Stored:
    """A stored response, or a conversation where `param`, the place that named it, speaks of one. Raises ApiError 404."""
    kind, prefix = ("conversation", "conv_") if param.startswith("conversation") else ("response", "resp_")
    found = services.responses.get(name, call.tenant) if name.startswith(prefix) else None
    if found is None:
        remedies = {"response_id": "ask for it anew", "previous_response_id": "send the conversation as input"}
        remedy = remedies.get(param, "create a new one")
        if not services.responses.is_on:
            remedy = NOTHING_STORED
        raise ApiError(404, f"there is no {kind} {name[:100]!r}, or it is no longer kept; {remedy}", param)
    return found


ROUTES: Routes = (
    Operation("/v1/responses", ("POST",), Access.USER, create, ResponsesRequest, errors=ERRORS),
    Operation("/v1/responses/input_tokens", ("POST",), Access.USER, count, ResponsesRequest),
    Operation("/v1/responses/{name}", ("GET",), Access.USER, retrieve, query=("stream", "starting_after"), errors=ERRORS),
    Operation("/v1/responses/{name}", ("DELETE",), Access.USER, delete),
    Operation("/v1/responses/{name}/cancel", ("POST",), Access.USER, cancel),
    Operation("/v1/responses/{name}/input_items", ("GET",), Access.USER, input_items, query=("limit", "order", "after")),
)

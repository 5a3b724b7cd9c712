"""`/v1/responses`: OpenAI's newer API, as chat requests in another dialect, with responses kept for `previous_response_id`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec

from frame.core.messages import Finish
from frame.entrypoints.answers import Answer, Stream
from frame.entrypoints.http.blocks import Blocks, Silent
from frame.entrypoints.http.call import Call
from frame.entrypoints.http.chat import answer_parsers, begin_chat, count_prompt, thinking_tokens
from frame.entrypoints.http.errors import ApiError, ErrorShape
from frame.entrypoints.http.failures import failure
from frame.entrypoints.http.openai_schema import ChatRequest
from frame.entrypoints.http.response_store import Kept
from frame.entrypoints.http.responses_events import EventWriter
from frame.entrypoints.http.responses_schema import ResponsesRequest
from frame.entrypoints.http.services import Access, Operation, Routes, Services

_decoder = msgspec.json.Decoder(ResponsesRequest)
_encode = msgspec.json.encode
STATUSES = {"length": "incomplete", "abort": "cancelled", "error": "failed"}  # every other end is `completed`


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
    history = _history(call, services, request)
    name = f"resp_{uuid.uuid4().hex}"
    chat = request.chat(history, name)
    if request.background:
        await _create_in_background(call, services, request, chat, history)
        return
    answer = await begin_chat(call, services, chat)
    response = ResponseAnswer(services, request, chat, answer, history, call.tenant)
    try:
        response.keep()
        if request.stream:
            await services.stream(call, answer, response.write, lambda: b"")
        else:
            await services.complete(answer)
            await call.respond_json(response.whole())
    finally:
        services.client.abandon(answer)
        response.forget_unfinished()


async def _create_in_background(
    call: Call, services: Services, request: ResponsesRequest, chat: ChatRequest, history: list[dict[str, Any]]
) -> None:
    """Answer with the response as it begins; it is finished without a client, who comes back for it."""
    if request.stream:
        raise ApiError(400, "background with stream is not supported; leave stream out, and get the response by its id", "stream")
    if request.store is False or not services.responses.is_on:
        remedy = "leave store out" if services.responses.is_on else "this server keeps none (--response-store-size)"
        raise ApiError(400, f"a background response has to be kept; {remedy}", "background")
    caller = Detached(call)
    try:
        answer = await begin_chat(caller, services, chat)
    except BaseException:
        caller.close()
        raise
    response = ResponseAnswer(services, request, chat, answer, history, call.tenant)
    response.keep()
    services.run(_finish(services, response, answer, caller))
    await call.respond_json(response.begun())


async def _finish(services: Services, response: ResponseAnswer, answer: Answer, caller: Detached) -> None:
    """A background response to its end, whatever that is."""
    try:
        await answer.complete()
        response.whole()
    finally:
        services.client.abandon(answer)
        response.forget_unfinished()
        caller.close()


class Detached:
    """The sender of a request that goes on without him: who he was stays, his connection does not matter, his share is handed on."""

    def __init__(self, call: Call) -> None:
        self.answer: Answer | None = None
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
    request = await call.json(_decoder)
    history = _history(call, services, request)
    num_tokens = await count_prompt(services, request.chat(history, ""))
    await call.respond_json({"object": "response.input_tokens", "input_tokens": num_tokens})


async def retrieve(call: Call, services: Services) -> None:
    """A response that was kept."""
    await call.respond(_kept(call, services, call.scope["path_params"]["name"]).body)


async def delete(call: Call, services: Services) -> None:
    """Forget a response."""
    name = call.scope["path_params"]["name"]
    if msgspec.json.decode(_kept(call, services, name).body)["status"] == "in_progress":
        raise ApiError(400, f"the response {name} is in progress; cancel it before", "response_id")
    services.responses.delete(name, call.tenant)
    await call.respond_json({"id": name, "object": "response", "deleted": True})


async def cancel(call: Call, services: Services) -> None:
    """End a response that is being written."""
    name = call.scope["path_params"]["name"]
    body = msgspec.json.decode(_kept(call, services, name).body)
    if body["status"] != "in_progress":
        raise ApiError(400, f"the response {name} is {body['status']}; only one that is in progress can be cancelled", "response_id")
    services.client.abort([name])
    await call.respond_json({**body, "status": "cancelled"})


def _history(call: Call, services: Services, request: ResponsesRequest) -> list[dict[str, Any]]:
    """The items before the request's own. Raises ApiError 404."""
    if not request.previous_response_id:
        return []
    return _kept(call, services, request.previous_response_id, "previous_response_id").conversation()


def _kept(call: Call, services: Services, name: str, param: str = "response_id") -> Kept:
    """Raises ApiError 404. `param` is where the name was given."""
    found = services.responses.get(name, call.tenant)
    if found is None:
        remedy = "send the conversation as input" if param == "previous_response_id" else "ask for it anew"
        if not services.responses.is_on:
            remedy = "this server keeps none (--response-store-size)"
        raise ApiError(404, f"there is no response {name[:100]!r}, or it is no longer kept; {remedy}", param)
    return found


class ResponseAnswer:
    """A response, whole or as events; kept in the store unless the request says no. `history` are the items before its input."""

    def __init__(
        self, services: Services, request: ResponsesRequest, chat: ChatRequest, answer: Answer, history: list[dict[str, Any]], tenant: str
    ) -> None:
        self._store = services.responses
        self._tenant = tenant
        self._request = request
        self._sequence = answer.sequences[0]
        self._parser = answer_parsers(services, chat, answer).get(0)
        self._thinking = cache(partial(thinking_tokens, services, chat, self._sequence, self._parser))  # the last body is made twice
        self._keeps = request.store is not False and self._store.is_on
        self._items = [*history, *request.items()] if self._keeps else []
        self._blocks = Blocks()
        self._writer = EventWriter(answer.rid)
        self._name = answer.rid
        self._model = services.resolved.served_name
        self._created = int(time.time())
        self._is_started = False

    def whole(self) -> dict[str, Any]:
        """The whole response, once the answer is complete."""
        self._blocks.read(self._sequence, self._parser, Silent())
        return self._finished()

    def begun(self) -> dict[str, Any]:
        """The response before anything came of it."""
        return self._body("in_progress")

    def write(self, sequence: Stream) -> bytes:
        """The events of what is new."""
        events = b""
        if not self._is_started:
            self._is_started = True
            body = self._body("in_progress")
            events = self._writer.event("created", response=body) + self._writer.event("in_progress", response=body)
        events += self._blocks.read(sequence, self._parser, self._writer)
        if sequence.finish is None:
            return events
        body = self._finished()
        return events + self._writer.event("incomplete" if body["status"] == "cancelled" else body["status"], response=body)

    def keep(self) -> None:
        """Keep the response as it is."""
        if self._keeps:
            finish = self._sequence.finish
            body = self._body("in_progress" if finish is None else STATUSES.get(finish.reason, "completed"))
            self._store.put(self._name, self._tenant, _encode(body), _encode([*self._items, *body["output"]]))

    def forget_unfinished(self) -> None:
        """A response that will never be finished is none."""
        if self._keeps and (self._sequence.finish is None or not self._is_started):
            self._store.delete(self._name, self._tenant)

    def _finished(self) -> dict[str, Any]:
        self._is_started = True
        self.keep()
        finish = self._sequence.finish
        return self._body(STATUSES.get(finish.reason, "completed") if finish is not None else "in_progress")

    def _body(self, status: str) -> dict[str, Any]:
        request, finish = self._request, self._sequence.finish
        is_over = status != "in_progress"
        last = len(self._blocks.row) - 1
        output = [
            self._writer.item(block, "incomplete" if block.place == last and status != "completed" else "completed")
            for block in self._blocks.row
        ]
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "background": bool(request.background),
            "error": _error(finish),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": output if is_over else [],
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None, **(request.reasoning or {})},
            "service_tier": "default",
            "store": self._keeps,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_over else None,
            "user": request.user,
        }

    def _usage(self) -> dict[str, Any]:
        sequence = self._sequence
        return {
            "input_tokens": len(sequence.prompt),
            "input_tokens_details": {"cached_tokens": sequence.cached, "cache_write_tokens": 0},
            "output_tokens": sequence.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thinking()},
            "total_tokens": len(sequence.prompt) + sequence.num_tokens,
        }


def _error(finish: Finish | None) -> dict[str, Any] | None:
    if finish is None or finish.reason != "error":
        return None
    return {"code": "server_error", "message": failure(finish).message}


ROUTES: Routes = (
    Operation("/v1/responses", ("POST",), Access.USER, create, ResponsesRequest, errors=ERRORS),
    Operation("/v1/responses/input_tokens", ("POST",), Access.USER, count, ResponsesRequest),
    Operation("/v1/responses/{name}", ("GET",), Access.USER, retrieve),
    Operation("/v1/responses/{name}", ("DELETE",), Access.USER, delete),
    Operation("/v1/responses/{name}/cancel", ("POST",), Access.USER, cancel),
)

"""`TextResponse`: one response of a session, from its chat request to its last event.

Used by `session`, which runs it as a task. Must not know a connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.http.chat.chat_request import drop_oldest_turns, make_output_parsers, start_chat
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock, ContentBlocks
from frame.entrypoints.http.errors import CONTEXT_LENGTH, TYPES, ApiError
from frame.entrypoints.http.failures import aborted, failure
from frame.entrypoints.http.realtime.caller import SessionCaller
from frame.entrypoints.http.realtime.conversation import Conversation
from frame.entrypoints.http.realtime.items import Item, RealtimeChat
from frame.entrypoints.http.request_starter import limit_unread_tokens
from frame.entrypoints.http.services import Services

Send = Callable[..., Awaitable[None]]  # (type of the event, its fields)


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


class TextResponse(BlockEventWriter):
    """`settings`: what it is made with. `conversation`: None: its items are kept nowhere."""

    def __init__(self, settings: Mapping[str, Any], metadata: Any, conversation: Conversation | None) -> None:
        self.id = new_id("resp")
        self.is_cancelled = False
        self._settings, self._metadata, self._conversation = settings, metadata, conversation
        self._state: RequestState | None = None
        self._error: ApiError | None = None  # why it ended
        self._items: dict[int, Item] = {}  # by index of the block; blocks of reasoning have none
        self._events: list[tuple[str, dict[str, Any]]] = []

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._state is not None:
            self._state.mark_disconnected()

    async def run(self, caller: SessionCaller, services: Services, chat: RealtimeChat, send: Send, *, truncates: bool) -> dict[str, Any]:
        """Run it to its end. -> the response of its last event. Raises ApiError where it cannot
        start, DisconnectedError."""
        try:
            state = await start_chat(caller, services, chat)
        except ApiError as error:
            if error.code != CONTEXT_LENGTH or not truncates:
                raise
            state = await start_chat(caller, services, await drop_oldest_turns(services, chat))
        self._state = state
        limit_unread_tokens(services, state, self._abort)
        await send("response.created", response=self._describe("in_progress"))
        blocks, sequence = ContentBlocks(), state.sequences[0]
        parser = make_output_parsers(services, chat, state).get(0)
        while sequence.finish is None and not self.is_cancelled and self._error is None:
            for changed in await state.wait():
                blocks.read(changed, parser, self)
            await self._send_events(send)
        blocks.finish(self)
        await self._send_events(send)
        return self._finish()

    def _abort(self, error: ApiError) -> None:
        self._error = error
        if self._state is not None:
            self._state.mark_disconnected()

    async def _send_events(self, send: Send) -> None:
        events, self._events = self._events, []
        for kind, fields in events:
            await send(kind, **fields)

    # events of blocks -----------------------------------------------------------------------------

    def _add(self, kind: str, **fields: Any) -> None:
        self._events.append((kind, fields))

    def write_start(self, block: ContentBlock) -> bytes:
        if block.kind == "reasoning":  # the API has no events for it
            return b""
        item: Item
        if block.kind == "call":
            call_id = block.call_id or new_id("call")
            item = {"type": "function_call", "call_id": call_id, "name": block.name, "arguments": ""}
        else:
            item = {"type": "message", "role": "assistant", "content": []}
        item = {"id": new_id("item"), "object": "realtime.item", "status": "in_progress", **item}
        self._items[block.index] = item
        place = {"response_id": self.id, "output_index": len(self._items) - 1}
        self._add("response.output_item.added", **place, item=dict(item))
        if self._conversation is not None:
            self._add("conversation.item.added", previous_item_id=self._conversation.last_id, item=dict(item))
        if block.kind == "text":
            self._add("response.content_part.added", **self._place(block), content_index=0, part={"type": "text", "text": ""})
        return b""

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        if block.kind == "text":
            self._add("response.output_text.delta", **self._place(block), content_index=0, delta=piece)
        elif block.kind == "call":
            call_id = self._items[block.index]["call_id"]
            self._add("response.function_call_arguments.delta", **self._place(block), call_id=call_id, delta=piece)
        return b""

    def write_stop(self, block: ContentBlock) -> bytes:
        if block.kind == "reasoning":
            return b""
        item, place, text = self._items[block.index], self._place(block), block.text
        is_whole = self._status(block) == "completed"
        item["status"] = "completed" if is_whole else "incomplete"
        if block.kind == "text":
            item["content"] = [{"type": "output_text", "text": text}]
            self._add("response.output_text.done", **place, content_index=0, text=text)
            self._add("response.content_part.done", **place, content_index=0, part={"type": "text", "text": text})
        else:
            item["arguments"] = text
            call = {"call_id": item["call_id"], "name": item["name"]}
            self._add("response.function_call_arguments.done", **place, **call, arguments=text)
        self._add("response.output_item.done", response_id=self.id, output_index=place["output_index"], item=item)
        if self._conversation is not None:
            try:
                previous = self._conversation.add_item(item)
            except ApiError as error:  # it holds as much as it may
                self._error = self._error or error
            else:
                self._add("conversation.item.done", previous_item_id=previous, item=item)
        return b""

    def _place(self, block: ContentBlock) -> dict[str, Any]:
        index = list(self._items).index(block.index)
        return {"response_id": self.id, "item_id": self._items[block.index]["id"], "output_index": index}

    # the object -----------------------------------------------------------------------------------

    def _status(self, block: ContentBlock | None = None) -> str:
        """The status at the end. block: one that is closed before the end has been completed."""
        finish = self._state.sequences[0].finish if self._state is not None else None
        if self.is_cancelled:
            return "cancelled"
        if self._error is not None:
            return "failed"
        if finish is None:
            return "completed" if block is not None else "in_progress"
        return {"length": "incomplete", "abort": "failed", "error": "failed"}.get(finish.reason, "completed")

    def _finish(self) -> dict[str, Any]:
        status = self._status()
        details: dict[str, Any] = {"type": status}
        if status == "cancelled":
            details["reason"] = "client_cancelled"
        elif status == "incomplete":
            details["reason"] = "max_output_tokens"
        elif status == "failed":
            assert self._state is not None
            finish = self._state.sequences[0].finish
            error = self._error or (failure(finish) if finish is not None and finish.reason == "error" else aborted())
            details["error"] = describe_error(error)
        return self._describe(status) | {"status_details": None if status == "completed" else details, "usage": self._usage()}

    def _describe(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "realtime.response",
            "status": status,
            "status_details": None,
            "output": list(self._items.values()) if status != "in_progress" else [],
            "conversation_id": None if self._conversation is None else self._conversation.id,
            "output_modalities": ["text"],
            "max_output_tokens": self._settings.get("max_output_tokens") or "inf",
            "metadata": self._metadata,
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        assert self._state is not None
        sequence = self._state.sequences[0]
        inputs, outputs = len(sequence.prompt), sequence.num_tokens
        return {
            "input_tokens": inputs,
            "output_tokens": outputs,
            "total_tokens": inputs + outputs,
            "input_token_details": {"text_tokens": inputs, "audio_tokens": 0, "cached_tokens": sequence.cached},
            "output_token_details": {"text_tokens": outputs, "audio_tokens": 0},
        }


def describe_error(error: ApiError) -> dict[str, Any]:
    """The error as events have it."""
    kind, code = TYPES.get(error.status, "server_error"), error.code or str(error.status)
    return {"type": kind, "code": code, "message": error.message, "param": error.param}

"""`RealtimeSession`: one session: its settings, its conversation, and what each event of the client
does. An event that fails is answered with an `error` event, and the session goes on.

Used by the route. Must not know a frame of WebSocket or the engine.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from frame.core.blame import explain
from frame.entrypoints.http.errors import ApiError, DisconnectedError, quoted
from frame.entrypoints.http.realtime import schema
from frame.entrypoints.http.realtime.caller import SessionCaller
from frame.entrypoints.http.realtime.connection import WebSocketConnection
from frame.entrypoints.http.realtime.conversation import Conversation
from frame.entrypoints.http.realtime.items import (
    Item,
    RealtimeChat,
    RealtimeInputChat,
    check_amount,
    check_choice,
    check_generation,
    check_item,
    merge,
    to_chat,
)
from frame.entrypoints.http.realtime.open_sessions import MAX_SECONDS
from frame.entrypoints.http.realtime.responses import TextResponse, describe_error, new_id
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.services import Services

if TYPE_CHECKING:
    from frame.entrypoints.http.realtime.transcription import AudioBuffer

log = logging.getLogger(__name__)

MAX_ECHO = 64  # characters of a client's event id that cannot be read, in the error


class RealtimeSession:
    """Implements `OpenSession`. `model`: as the client names it. The type of the
    session is that of the server's model: `transcription` for speech models, else `realtime`."""

    def __init__(self, context: RequestContext, services: Services, connection: WebSocketConnection, model: str) -> None:
        self.id = new_id("sess")
        self.opened_at = self.last_event_at = time.monotonic()
        self._expires_at = int(time.time() + MAX_SECONDS)
        self._context, self._services, self._connection = context, services, connection
        self._fields = schema.SessionFields(model=model or None)
        self._settings_size = 0  # bytes
        self._conversation = Conversation(new_id("conv"), context)
        self._response: TextResponse | None = None  # in progress
        self._running: asyncio.Task[None] | None = None  # the response
        self._numbers = itertools.count(1)  # of events
        self._audio = schema.AudioSettings()
        self._buffer: AudioBuffer | None = None  # of a transcription session
        if services.resolved.model.encoder_length:
            from frame.entrypoints.http.realtime.transcription import AudioBuffer

            self._buffer = AudioBuffer(context, services, self.send)

    @property
    def is_busy(self) -> bool:
        return self._response is not None or (self._buffer is not None and self._buffer.is_busy)

    def close(self, code: int, reason: str) -> None:
        self._connection.close(code, reason)

    async def run(self) -> None:
        """Handle events until the connection ends. Raises DisconnectedError."""
        try:
            await self.send("session.created", session=self._describe())
            while True:
                data = await self._connection.receive()
                self.last_event_at = time.monotonic()
                await self._handle(data)
        finally:
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait({self._running})
            if self._buffer is not None:
                await self._buffer.close()
            self._conversation.close()
            self._context.release(self._settings_size)

    async def send(self, kind: str, /, **fields: Any) -> None:
        """Send an event. Raises DisconnectedError."""
        await self._connection.send(msgspec.json.encode({"type": kind, "event_id": f"event_{self.id[5:]}_{next(self._numbers)}", **fields}))

    async def _handle(self, data: bytes) -> None:
        value: Any = None
        try:
            value = await self._context.decode(data)
            await self._act(schema.read_event(value))
        except ApiError as error:
            await self._send_error(error, value.get("event_id") if isinstance(value, dict) else None)
        except DisconnectedError:
            raise
        except Exception as error:
            log.exception("an event of a realtime session failed: %s", explain(error))
            await self._send_error(ApiError(500, "the server failed on this event; its log says why"), None)

    async def _send_error(self, error: ApiError, event_id: Any) -> None:
        shown = event_id if event_id is None or (isinstance(event_id, str) and len(event_id) <= 512) else str(quoted(event_id))[:MAX_ECHO]
        await self.send("error", error={**describe_error(error), "event_id": shown})

    async def _act(self, event: schema.ClientEvent) -> None:
        match event:
            case schema.SessionUpdate():
                await self._update(event.session)
            case schema.ItemCreate():
                await self._create_item(event)
            case schema.ItemEvent() if event.type == "conversation.item.delete":
                self._conversation.delete_item(event.item_id)
                await self.send("conversation.item.deleted", item_id=event.item_id)
            case schema.ItemEvent():
                await self.send("conversation.item.retrieved", item=self._conversation.find_item(event.item_id))
            case schema.ResponseCreate():
                self._create_response(event)
            case schema.ResponseCancel():
                self._cancel_response(event.response_id)
            case schema.AudioAppend():
                await self._need_buffer(event).append(event.audio)
            case _ if event.type == "input_audio_buffer.commit":
                await self._need_buffer(event).commit(self._audio)
            case _:
                self._need_buffer(event).clear()
                await self.send("input_audio_buffer.cleared")

    # settings -------------------------------------------------------------------------------------

    @property
    def _type(self) -> str:
        return "realtime" if self._buffer is None else "transcription"

    async def _update(self, sent: dict[str, Any]) -> None:
        fields = schema.read_object(schema.SessionFields, sent, "session.")
        if fields.type not in (None, self._type):
            name = self._services.resolved.served_name
            sentence = f"session.type is {fields.type}; the model {name!r} serves sessions of the type {self._type}"
            raise ApiError(400, sentence, "session.type")
        self._check_model(fields.model, "session.model")
        check_generation(fields, "session.")
        audio = self._audio
        if self._buffer is None:
            schema.check_no_audio(fields.audio)
        else:
            schema.check_transcription_fields(fields)
            audio = audio.update(fields.audio)
            self._check_model(audio.transcription.model, "session.audio.input.transcription.model")
        merged = self._fields.model_copy(update={name: getattr(fields, name) for name in fields.model_fields_set - {"type", "audio"}})
        if merged.tools:  # others may come later, or with a response
            check_choice(merged.model_dump(), "session.tool_choice")
        size = len(msgspec.json.encode(merged.model_dump())) + len(msgspec.json.encode(audio.model_dump()))
        self._context.hold(size)
        self._context.release(self._settings_size)
        self._fields, self._audio, self._settings_size = merged, audio, size
        await self.send("session.updated", session=self._describe())

    def _check_model(self, name: str | None, place: str) -> None:
        """Raise ApiError 404, with the name of the field, for a model that is not served."""
        try:
            self._services.check_model(name or "", self._context.tenant)
        except ApiError as error:
            raise ApiError(error.status, error.message, place, error.code) from None

    def _describe(self) -> dict[str, Any]:
        """The session object."""
        kind = "realtime.session" if self._buffer is None else "realtime.transcription_session"
        head = {"id": self.id, "object": kind, "type": self._type, "expires_at": self._expires_at}
        if self._buffer is not None:
            return head | {"audio": self._audio.describe(), "include": None}
        fields = self._fields
        return head | {
            **fields.model_dump(exclude={"type", "audio"}),
            "model": self._services.response_model(fields.model or ""),
            "output_modalities": ["text"],
            "instructions": fields.instructions or "",
            "tools": fields.tools or [],
            "tool_choice": fields.tool_choice or "auto",
            "max_output_tokens": fields.max_output_tokens or "inf",
            "truncation": fields.truncation or "auto",
        }

    def _need_buffer(self, event: schema.ClientEvent) -> AudioBuffer:
        if self._buffer is None:
            sentence = f"{event.type} is for transcription sessions, and the model of this session reads text; create an item"
            raise ApiError(400, sentence, "type", "wrong_session_type")
        return self._buffer

    def _need_conversation(self, kind: str) -> None:
        if self._buffer is not None:
            sentence = f"{kind} is for conversations, and this session transcribes audio; append it to the input audio buffer"
            raise ApiError(400, sentence, "type", "wrong_session_type")

    # conversation ---------------------------------------------------------------------------------

    async def _create_item(self, event: schema.ItemCreate) -> None:
        self._need_conversation(event.type)
        item = check_item(event.item)
        item = {**item, "id": item.get("id") or new_id("item"), "object": "realtime.item"}
        previous = self._conversation.add_item(item, event.previous_item_id)
        await self.send("conversation.item.added", previous_item_id=previous, item=item)
        await self.send("conversation.item.done", previous_item_id=previous, item=item)

    # responses ------------------------------------------------------------------------------------

    def _create_response(self, event: schema.ResponseCreate) -> None:
        self._need_conversation(event.type)
        if self._response is not None:
            sentence = f"the response {self._response.id} is in progress; wait for its end, or cancel it"
            raise ApiError(400, sentence, None, "conversation_already_has_active_response")
        fields = schema.read_object(schema.ResponseFields, event.response or {}, "response.")
        check_generation(fields, "response.")
        items = self._conversation.list_items() if fields.input is None else self._resolve(fields.input)
        kind, place = (RealtimeChat, "conversation") if fields.input is None else (RealtimeInputChat, "response.input")
        check_amount(items, sum(map(self._conversation.measure, items)), self._context.max_body, place)
        settings = merge(self._fields, fields)
        check_choice(settings, "session.tool_choice" if fields.tool_choice is None else "response.tool_choice")
        response = TextResponse(settings, fields.metadata, None if fields.conversation == "none" else self._conversation)
        chat = to_chat(settings, items, self._fields.model or "", response.id, kind)
        self._response = response
        self._running = asyncio.create_task(self._run_response(response, chat, event.event_id))

    def _resolve(self, sent: list[dict[str, Any]]) -> list[Item]:
        """The items of a response's input. Raises ApiError."""
        items = []
        for number, item in enumerate(sent):
            place = f"response.input[{number}]"
            if item.get("type") == "item_reference":
                schema.check_names(item, ("type", "id"), f"{place}.")
                items.append(self._conversation.find_item(item.get("id"), f"{place}.id"))
            else:
                items.append(check_item(item, place))
        return items

    async def _run_response(self, response: TextResponse, chat: Any, event_id: str | None) -> None:
        """Run a response, whose failure to start is an `error` event."""
        try:
            caller = await SessionCaller.open(self._context, self._services)
            try:
                done = await response.run(caller, self._services, chat, self.send, truncates=self._fields.truncation != "disabled")
            finally:
                caller.close()
                self._response = None  # before the client knows of the end, and creates the next one
            await self.send("response.done", response=done)
        except DisconnectedError:
            return
        except ApiError as error:
            await self._tell(error, event_id)
        except Exception as error:
            log.exception("a realtime response failed: %s", explain(error))
            await self._tell(ApiError(500, "the server failed on this response; its log says why"), event_id)
        finally:
            if self._response is response:  # else the next one has begun while the last event was not taken
                self._response = None

    async def _tell(self, error: ApiError, event_id: str | None) -> None:
        try:
            await self._send_error(error, event_id)
        except DisconnectedError:
            return

    def _cancel_response(self, name: str | None) -> None:
        if self._response is None or name not in (None, self._response.id):
            what = "no response is in progress" if self._response is None else f"the response in progress is {self._response.id}"
            raise ApiError(400, f"{what}; there is nothing to cancel", "response_id", "response_cancel_not_active")
        self._response.cancel()

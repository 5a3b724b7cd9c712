"""`AudioBuffer`: the audio of a transcription session, and the transcriptions of it.

A committed buffer is transcribed as a file of `/v1/audio/transcriptions` is, in the turns of its
key. Used by `session`, for speech models. Must not know a connection.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import struct
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from frame.core.blame import explain
from frame.entrypoints.audio import MAX_BYTES
from frame.entrypoints.engine_client.quotas import QuotaExceededError
from frame.entrypoints.http.errors import ApiError, DisconnectedError
from frame.entrypoints.http.failures import as_api_error, too_many
from frame.entrypoints.http.openai.transcriptions import OrderedTexts, SpeechFields, decode_windows, need_speech, start_windows
from frame.entrypoints.http.realtime.caller import SessionCaller
from frame.entrypoints.http.realtime.responses import Send, describe_error, new_id
from frame.entrypoints.http.realtime.schema import AudioSettings
from frame.entrypoints.http.request_context import INLINE_BYTES, MIN_PIECE, RequestContext
from frame.entrypoints.http.request_starter import limit_unread_tokens
from frame.entrypoints.http.services import Services

log = logging.getLogger(__name__)

HEAD_BYTES = 44  # of a WAV file
MAX_BUFFER = MAX_BYTES - HEAD_BYTES
MAX_WAITING = 16  # committed buffers that are not transcribed yet
PREFIX = "conversation.item.input_audio_transcription"


@dataclass(frozen=True, slots=True)
class Job:
    """A committed buffer: its samples, of 16 bits and one channel, in pieces of `size` bytes in
    all."""

    item_id: str
    pieces: list[bytes]
    size: int
    settings: AudioSettings

    def make_wave(self) -> bytes:
        """A WAV file, which takes the pieces' place."""
        rate = self.settings.rate
        form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
        head = struct.pack("<4sI4s", b"RIFF", HEAD_BYTES - 8 + self.size, b"WAVE") + form + struct.pack("<4sI", b"data", self.size)
        data = b"".join((head, *self.pieces))
        self.pieces.clear()
        return data


class AudioBuffer:
    """`append`, then `commit`. Buffers are transcribed one after another. Bytes count as held until
    their text is complete."""

    def __init__(self, context: RequestContext, services: Services, send: Send) -> None:
        self._context, self._services, self._send = context, services, send
        self._pieces: list[bytes] = []
        self._size = 0
        self._jobs: deque[Job] = deque()  # the first is being transcribed
        self._running: asyncio.Task[None] | None = None
        self._last_id: str | None = None

    @property
    def is_busy(self) -> bool:
        return self._running is not None and not self._running.done()

    async def append(self, audio: str) -> None:
        """Add base64 of samples. Raises ApiError."""
        try:
            is_small = len(audio) <= INLINE_BYTES
            data = _decode(audio) if is_small else await asyncio.to_thread(_decode, audio)
        except (binascii.Error, ValueError):
            raise ApiError(400, "audio is not valid base64; send the samples' bytes in base64", "audio") from None
        if self._size + len(data) > MAX_BUFFER:
            sentence = f"the buffer would have {self._size + len(data)} bytes, and may have {MAX_BUFFER}; commit it before"
            raise ApiError(400, sentence, "audio", "buffer_full")
        self._context.hold(len(data))
        if self._pieces and len(self._pieces[-1]) < MIN_PIECE:
            self._pieces[-1] += data
        else:
            self._pieces.append(data)
        self._size += len(data)

    def clear(self) -> None:
        self._context.release(self._size)
        self._pieces, self._size = [], 0

    async def commit(self, settings: AudioSettings) -> None:
        """Transcribe what was appended. Raises ApiError."""
        if not self._size:
            raise ApiError(400, "the buffer is empty; append audio before", None, "input_audio_buffer_commit_empty")
        if self._size % 2:
            raise ApiError(400, f"the buffer has {self._size} bytes, and a sample has 2; append the rest, or clear it", "audio")
        if len(self._jobs) >= MAX_WAITING:
            raise ApiError(429, f"{MAX_WAITING} committed buffers wait; commit more when some are transcribed", None, "too_many_commits")
        item = {
            "id": new_id("item"), "object": "realtime.item", "type": "message", "status": "completed", "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }  # fmt: skip
        name, previous = str(item["id"]), self._last_id
        self._jobs.append(Job(name, self._pieces, self._size, settings))  # it is held on, until its transcription ends
        self._pieces, self._size, self._last_id = [], 0, name
        await self._send("input_audio_buffer.committed", item_id=name, previous_item_id=previous)
        await self._send("conversation.item.added", previous_item_id=previous, item=item)
        await self._send("conversation.item.done", previous_item_id=previous, item=item)
        if not self.is_busy:
            self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the transcriptions, and give back what is held."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._context.release(self._size + sum(job.size for job in self._jobs))
        self._pieces, self._size = [], 0
        self._jobs.clear()

    async def _run(self) -> None:
        try:
            while self._jobs:
                job = self._jobs[0]
                try:
                    await self._transcribe(job)
                except ApiError as error:
                    await self._fail(job.item_id, error)
                except DisconnectedError:
                    return
                except Exception as error:
                    log.exception("a realtime transcription failed: %s", explain(error))
                    await self._fail(job.item_id, ApiError(500, "the server failed on this audio; its log says why"))
                self._jobs.popleft()
                self._context.release(job.size)
        except DisconnectedError:
            return

    async def _fail(self, name: str, error: ApiError) -> None:
        await self._send(f"{PREFIX}.failed", item_id=name, content_index=0, error=describe_error(error))

    async def _transcribe(self, job: Job) -> None:
        """Send the text of a buffer, as it is written and as a whole. Raises ApiError,
        DisconnectedError."""
        services, tenant = self._services, self._context.tenant
        speech, asked_for = need_speech(services), job.settings.transcription
        form = SpeechFields(model=asked_for.model or "", language=asked_for.language, prompt=asked_for.prompt or "")
        caller = await SessionCaller.open(self._context, services)
        try:
            with closing(services.features.open_lease(tenant)) as lease:
                language = speech.choose_language(form.language.lower() if form.language else None, "transcribe")
                windows = await decode_windows(caller, services, await asyncio.to_thread(job.make_wave), lease)
                state, _, _ = await start_windows(caller, services, form, windows, language)
                texts, failed = OrderedTexts(len(state.sequences)), list[ApiError]()

                def abort(error: ApiError) -> None:
                    failed.append(error)
                    state.mark_disconnected()

                limit_unread_tokens(services, state, abort)
                place: dict[str, Any] = {"item_id": job.item_id, "content_index": 0}
                while state.num_unfinished or state.changed:
                    for sequence in await state.wait():
                        for text in texts.feed(sequence):
                            await self._send(f"{PREFIX}.delta", **place, delta=text)
                    if failed:
                        raise failed[0]
                if any(sequence.finish is not None and sequence.finish.reason == "abort" for sequence in state.sequences):
                    raise ApiError(503, "the transcription was aborted before it was finished; send the audio again", code="aborted")
                usage = {"type": "duration", "seconds": round(job.size / 2 / job.settings.rate, 2)}
                await self._send(f"{PREFIX}.completed", **place, transcript=texts.whole.strip(), usage=usage)
        except QuotaExceededError as error:
            raise too_many(error) from None
        except ValueError as error:
            raise as_api_error(error) from None
        finally:
            caller.close()


def _decode(audio: str) -> bytes:
    return base64.b64decode(audio, validate=True)

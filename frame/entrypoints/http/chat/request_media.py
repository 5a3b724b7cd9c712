"""Media of a request: collected from its prompts, prepared, placed in them, and given back once the
last sequence has ended.

Used by `request_starter`. Must not depend on a dialect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from frame.core.interfaces.media import MediaItem
from frame.entrypoints.engine_client.limits import ContextLengthError
from frame.entrypoints.engine_client.response_state import RequestState
from frame.entrypoints.http.errors import RETRY_AFTER, ApiError
from frame.entrypoints.http.failures import as_api_error
from frame.entrypoints.http.services import Services
from frame.entrypoints.media.media_service import MediaInputError, MediaPart, PreparedMedia
from frame.entrypoints.media.placement import PlacementError, count_rows, make_media_texts, place_items
from frame.text.chat_template import ChatTemplateError

log = logging.getLogger(__name__)

# Seconds that files outlive a request which was stopped: a step that was scheduled before may still
# read them.
LINGER = 10.0


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation, from which the chat template makes a prompt. The content of a message is a
    text, or a list of `{"type": "text"}` and `MediaPart`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextWithMedia:
    """A text that has the model's placeholder for each item, of each modality in order."""

    text: str
    media: list[MediaPart]


def list_media(prompt: object) -> list[MediaPart]:
    """The parts with media of a prompt, in order."""
    if isinstance(prompt, TextWithMedia):
        return prompt.media
    if not isinstance(prompt, Chat):
        return []
    contents = (content for message in prompt.messages if isinstance(content := message.get("content"), list))
    return [part for content in contents for part in content if isinstance(part, MediaPart)]


def check_media(services: Services, parts: Sequence[MediaPart]) -> None:
    """Raise ApiError 400 for media that the model does not read."""
    if not parts:
        return
    known = services.media.placeholders() if services.media is not None else {}
    for part in parts:
        if (why := services.resolved.lacking_media.get(part.modality)) is not None:
            raise ApiError(400, f"{part.param}: this server cannot read {part.modality} parts: {why}", part.param)
        if part.modality not in known:
            reads = f"this model reads {', '.join(('text', *known))}" if known else "this model takes text only"
            raise ApiError(400, f"{part.param}: {reads}, and this part is {part.modality}; leave it out", part.param)


@asynccontextmanager
async def hold_media(services: Services, prompts: Sequence[object], owner: str) -> AsyncIterator[HeldMedia]:
    """The prepared media of these prompts. They are given back after the block, unless a request
    has taken them over. Raises ApiError."""
    held = HeldMedia(services, [[] for _ in prompts])
    parts = [list_media(prompt) for prompt in prompts]
    try:
        if any(parts):
            check_media(services, [part for each in parts for part in each])
            await held.prepare(parts, owner)
        yield held
    finally:
        held.close()


class HeldMedia:
    """The prepared media of a request, by prompt."""

    def __init__(self, services: Services, prepared: list[list[PreparedMedia]]) -> None:
        self.placed: list[list[MediaItem]] = [[] for _ in prepared]  # of each prompt, once it is encoded
        self._services = services
        self._prepared = prepared
        self._is_taken = False

    async def prepare(self, parts: Sequence[Sequence[MediaPart]], owner: str) -> None:
        service = self._services.media
        assert service is not None  # check_media has passed
        works = [service.prepare(each, owner) if each else _nothing() for each in parts]
        tasks = [asyncio.ensure_future(work) for work in works]
        try:
            await asyncio.gather(*tasks)
        except MediaInputError as error:
            status, wait = (503, RETRY_AFTER) if error.is_busy else (400, None)
            raise ApiError(status, error.sentence, error.param, retry_after=wait) from None
        finally:  # those that fail or are cancelled give back what they had
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._prepared = [[] if isinstance(each, BaseException) else each for each in ended]

    async def encode(self, index: int, prompt: Chat | TextWithMedia, add_special_tokens: bool, maximum: int) -> list[int]:
        """The token ids of a prompt with media, which are placed in it. Raises ApiError,
        TextTooLongError."""
        items, text_input = self._prepared[index], self._services.need_text_input()
        tokenizer, texts = self._services.need_tokenizer(), make_media_texts(items)
        if (rows := sum(map(count_rows, items))) >= maximum:
            sentence = f"the media alone take {rows} tokens of it; send fewer or smaller ones"
            raise as_api_error(ContextLengthError(maximum, sentence, "prompt"))
        try:
            if isinstance(prompt, Chat):
                messages = [_as_template_message(message) for message in prompt.messages]
                content: dict[str, Any] = {"messages": messages, "tools": prompt.tools, "template_arguments": prompt.arguments}
            else:
                content = {"text": prompt.text, "add_special_tokens": add_special_tokens}
            ids, order = await text_input.encode_media(texts, maximum, **content)
        except ChatTemplateError as error:
            raise ApiError(400, str(error), "messages" if isinstance(prompt, Chat) else "prompt") from None
        try:
            self.placed[index] = place_items(ids, items, order, tokenizer.find_token_id)
        except PlacementError as error:
            log.error("the media of a request could not be placed: %s", error)
            raise ApiError(500, "the server failed to place the media in the prompt; the cause is in its log") from None
        return ids

    def hand_over(self, state: RequestState) -> None:
        """Give the items to the sequences, and keep the files until the last one has ended."""
        items = [each for prepared in self._prepared for each in prepared]
        service = self._services.media
        if not items or service is None:
            return
        for sequence in state.sequences:
            sequence.recovery.media = self.placed[sequence.prompt_index]
        self._is_taken = True
        state.on_left = partial(_release_later, partial(service.release, items), state)

    def close(self) -> None:
        """Give back what no request has taken over."""
        items = [] if self._is_taken else [each for prepared in self._prepared for each in prepared]
        if items and self._services.media is not None:
            self._services.media.release(items)


def count_media_tokens(state: RequestState) -> dict[str, int]:
    """Tokens of the prompts that are rows of media, by the name of the field in `usage`; empty
    without media."""
    counts: dict[str, int] = {}
    for sequence in state.first_sequences:
        for item in sequence.recovery.media:
            name = f"{item.modality}_tokens"
            counts[name] = counts.get(name, 0) + item.num_rows
    return counts


def _as_template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": [{"type": part.modality} if isinstance(part, MediaPart) else part for part in content]}


def _release_later(release: Callable[[], None], state: RequestState) -> None:
    """Release at once where every sequence has ended by itself, else after `LINGER`."""
    if all(sequence.finish is not None and sequence.finish.reason in ("stop", "length") for sequence in state.sequences):
        release()
    else:
        asyncio.get_running_loop().call_later(LINGER, release)


async def _nothing() -> list[PreparedMedia]:
    return []

"""Tokenization without blocking the event loop: in threads of this process, or in tokenizer
processes.

Used by the HTTP and gRPC servers; `tokenize` is the work of a tokenizer process. Must not know a
request or HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from frame.core.messages import MediaText, Message, Tokenize, Tokenized
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.logs import TRACE
from frame.text.chat_template import TEMPLATE, ChatTemplateError
from frame.text.text_bounds import WHOLE, TextTooLongError
from frame.text.tokenizer import Encoded, Tokenizer, panics_as_errors

log = logging.getLogger(__name__)

INLINE_CHARACTERS = 1024  # encoding this much takes less time than switching to a thread and back
INLINE_TEXTS = 16
THREADS = 2
MAX_CRASHES = 2  # of a tokenizer process on one text, after which the text is refused


class AsyncTokenizer(ABC):
    """Text to token ids. Raises ChatTemplateError for messages that the template refuses, and
    TextTooLongError for a long text of more than `max_tokens` tokens, before all of it is
    tokenized."""

    async def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return (await self._run(text=text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)).token_ids

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any], max_tokens: int | None = None
    ) -> list[int]:
        return (await self._run(messages=messages, tools=tools, template_arguments=arguments, max_tokens=max_tokens)).token_ids

    async def encode_inputs(
        self, inputs: list[list[str]], truncate_to: int | None = None, max_tokens: int | None = None, add_special_tokens: bool = True
    ) -> list[Encoded]:
        asked = self._run(inputs=inputs, truncate_to=truncate_to, max_tokens=max_tokens, add_special_tokens=add_special_tokens)
        return (await asked).encoded

    async def encode_media(self, media: list[MediaText], max_tokens: int | None = None, **content: Any) -> tuple[list[int], list[int]]:
        """The token ids of a text or a chat with media, and the indices of the items in the order
        of the prompt. content: fields of `Tokenize`."""
        tokenized = await self._run(media=media, max_tokens=max_tokens, **content)
        return tokenized.token_ids, tokenized.media_order

    @abstractmethod
    async def _run(self, **content: Any) -> Tokenized:
        """The reply to the message `Tokenize` with these fields."""


class ThreadedTokenizer(AsyncTokenizer):
    """Encodes short texts at once and others in a small thread pool: the tokenizer releases the
    interpreter lock. Long texts have a separate thread, so that short ones do not wait for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    async def _run(self, **content: Any) -> Tokenized:
        message = Tokenize(id="", **content)
        if message.messages is not None:
            size = sum(len(text) for each in message.messages if isinstance(text := each.get("content"), str))
            is_short = not message.tools and _is_short(message.messages, message.template_arguments)
        else:
            inputs = message.inputs if message.inputs is not None else [[message.text or ""]]
            size = sum(len(text) for texts in inputs for text in texts)
            is_short = size <= INLINE_CHARACTERS and len(inputs) <= INLINE_TEXTS and not message.media
        size += sum(len(each.expansion) for each in message.media)
        if is_short:
            return _encode(self._tokenizer, message)
        pool = self._pool if size <= WHOLE else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, _encode, self._tokenizer, message)


def _is_short(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> bool:
    """Whether all that the template may read of a conversation is plain and short."""
    if TEMPLATE in arguments:  # a client's own template may take any time
        return False
    values = [value for fields in (*messages, arguments) for value in fields.values()]
    if not all(isinstance(value, str | bool | None) for value in values):
        return False
    return sum(len(value) for value in values if isinstance(value, str)) <= INLINE_CHARACTERS


@dataclass(slots=True)
class _Pending:
    worker: int
    message: Tokenize
    future: asyncio.Future[Tokenized]
    num_crashes: int = 0


class TokenizerProcesses(AsyncTokenizer):
    """Encodes in tokenizer processes, round-robin. `send(worker, message)` sends to worker number
    `worker`; their replies are given to `receive_reply`. `resend_requests` repeats the open
    requests of a worker that was restarted."""

    def __init__(self, workers: int, send: Callable[[int, Message], None]) -> None:
        self._turn = itertools.cycle(range(workers))
        self._send = send
        self._waiting: dict[str, _Pending] = {}
        self._names = itertools.count()

    async def _run(self, **content: Any) -> Tokenized:
        name = str(next(self._names))
        pending = _Pending(next(self._turn), Tokenize(id=name, trace=TRACE.get(), **content), asyncio.get_running_loop().create_future())
        self._waiting[name] = pending
        self._send(pending.worker, pending.message)
        try:
            return await pending.future
        finally:
            del self._waiting[name]

    def receive_reply(self, reply: Tokenized) -> None:
        pending = self._waiting.get(reply.id)
        if pending is not None and not pending.future.done():
            future = pending.future
            if reply.is_too_long:
                future.set_exception(TextTooLongError(pending.message.max_tokens or 0))
            elif reply.error is not None:
                future.set_exception(ChatTemplateError(reply.error))
            else:
                future.set_result(reply)

    def resend_requests(self, worker: int) -> None:
        """Send the open requests of a restarted worker again. A worker processes them in order, so
        it crashed on the oldest one; a text that crashed it twice is refused."""
        lost = [pending for pending in self._waiting.values() if pending.worker == worker and not pending.future.done()]
        for pending in lost[:1]:
            pending.num_crashes += 1
            if pending.num_crashes >= MAX_CRASHES:
                sentence = f"this text crashed its tokenizer process {pending.num_crashes} times; it is refused: send a different one"
                pending.future.set_exception(InvalidRequestError(sentence))
        for pending in lost:
            if not pending.future.done():
                self._send(worker, pending.message)


@panics_as_errors()
def _encode(tokenizer: Tokenizer, message: Tokenize) -> Tokenized:
    if message.media:
        return _encode_media(tokenizer, message)
    if message.messages is not None:
        ids = tokenizer.encode_chat(message.messages, message.tools, message.template_arguments, message.max_tokens)
    elif message.inputs is not None:
        encoded = tokenizer.encode_inputs(message.inputs, message.truncate_to, message.max_tokens, message.add_special_tokens)
        return Tokenized(id=message.id, encoded=encoded)
    else:
        ids = tokenizer.encode(message.text or "", message.add_special_tokens, message.max_tokens)
    return Tokenized(id=message.id, token_ids=ids)


def _encode_media(tokenizer: Tokenizer, message: Tokenize) -> Tokenized:
    if message.messages is not None:
        ids, order = tokenizer.encode_media_chat(
            message.messages, message.tools, message.template_arguments, message.media, message.max_tokens
        )
    else:
        ids, order = tokenizer.encode_media(message.text or "", message.media, message.add_special_tokens, message.max_tokens)
    return Tokenized(id=message.id, token_ids=ids, media_order=order)


def tokenize(tokenizer: Tokenizer, message: Tokenize) -> Tokenized:
    """The reply of a tokenizer process to one message."""
    try:
        return _encode(tokenizer, message)
    except TextTooLongError:
        return Tokenized(id=message.id, is_too_long=True)
    except ChatTemplateError as error:
        return Tokenized(id=message.id, error=str(error))
    except Exception:  # must end this request only
        log.exception("tokenization failed")
        return Tokenized(id=message.id, error="the server failed to tokenize this text; the cause is in the server's log")

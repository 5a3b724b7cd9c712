"""Tokenizing off the event loop: in threads of this process, or in tokenizer processes. Short texts are encoded at once.

Knows no request and no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from frame.core.messages import Message, Tokenize, Tokenized
from frame.core.text.chat_template import TEMPLATE, ChatTemplateError
from frame.core.text.text_bounds import WHOLE, TextTooLongError
from frame.core.text.tokenizer import Encoded, Tokenizer
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.tracing import TRACE

log = logging.getLogger(__name__)

T = TypeVar("T")
INLINE_CHARACTERS = 1024  # encoding this much takes less time than a thread switch and back would cost
INLINE_TEXTS = 16
THREADS = 2
MAX_DEATHS = 2  # of a tokenizer process over one text


class TextInput(Protocol):
    """Text to ids, awaitable. Raises ChatTemplateError for messages that the template refuses, and TextTooLongError for a long text of
    more than `most` tokens, before all of it is tokenized."""

    async def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]: ...

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any], most: int | None = None
    ) -> list[int]: ...

    async def encode_inputs(
        self, inputs: list[list[str]], longest: int | None = None, most: int | None = None, add_special_tokens: bool = True
    ) -> list[Encoded]: ...

    def close(self) -> None: ...


class ThreadedInput:
    """Encodes in a small thread pool; the tokenizer releases the interpreter's lock. Long texts have a thread of their own, so that short
    ones do not wait for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    async def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens, most)
        return await self._off_loop(len(text), self._tokenizer.encode, text, add_special_tokens, most)

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any], most: int | None = None
    ) -> list[int]:
        if not tools and _is_short(messages, arguments):
            return self._tokenizer.encode_chat(messages, tools, arguments, most)
        size = sum(len(content) for message in messages if isinstance(content := message.get("content"), str))
        return await self._off_loop(size, self._tokenizer.encode_chat, messages, tools, arguments, most)

    async def encode_inputs(
        self, inputs: list[list[str]], longest: int | None = None, most: int | None = None, add_special_tokens: bool = True
    ) -> list[Encoded]:
        size = sum(len(text) for texts in inputs for text in texts)
        if size <= INLINE_CHARACTERS and len(inputs) <= INLINE_TEXTS:
            return self._tokenizer.encode_inputs(inputs, longest, most, add_special_tokens)
        return await self._off_loop(size, self._tokenizer.encode_inputs, inputs, longest, most, add_special_tokens)

    async def _off_loop(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        pool = self._pool if size <= WHOLE else self._long
        return await asyncio.get_running_loop().run_in_executor(pool, work, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)


def _is_short(messages: list[dict[str, Any]], arguments: dict[str, Any]) -> bool:
    """Whether a conversation is plain, and short in everything that the template may read."""
    if TEMPLATE in arguments:  # which may take any time
        return False
    values = [value for fields in (*messages, arguments) for value in fields.values()]
    if not all(isinstance(value, str | bool | None) for value in values):
        return False
    return sum(len(value) for value in values if isinstance(value, str)) <= INLINE_CHARACTERS


@dataclass(slots=True)
class _Asked:
    worker: int
    message: Tokenize
    future: asyncio.Future[Tokenized]
    deaths: int = 0


class ProcessInput:
    """Encodes in tokenizer processes, in turn. `send(worker, message)` reaches worker number `worker`; `answer` takes their replies.
    A worker's successor is asked again by `ask_again`."""

    def __init__(self, workers: int, send: Callable[[int, Message], None]) -> None:
        self._turn = itertools.cycle(range(workers))
        self._send = send
        self._waiting: dict[str, _Asked] = {}
        self._names = itertools.count()

    async def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        return (await self._ask(text=text, add_special_tokens=add_special_tokens, max_tokens=most)).token_ids

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any], most: int | None = None
    ) -> list[int]:
        return (await self._ask(messages=messages, tools=tools, template_arguments=arguments, max_tokens=most)).token_ids

    async def encode_inputs(
        self, inputs: list[list[str]], longest: int | None = None, most: int | None = None, add_special_tokens: bool = True
    ) -> list[Encoded]:
        return (await self._ask(inputs=inputs, truncate_to=longest, max_tokens=most, add_special_tokens=add_special_tokens)).encoded

    async def _ask(self, **content: Any) -> Tokenized:
        name = str(next(self._names))
        asked = _Asked(next(self._turn), Tokenize(id=name, trace=TRACE.get(), **content), asyncio.get_running_loop().create_future())
        self._waiting[name] = asked
        self._send(asked.worker, asked.message)
        try:
            return await asked.future
        finally:
            del self._waiting[name]

    def answer(self, reply: Tokenized) -> None:
        asked = self._waiting.get(reply.id)
        if asked is not None and not asked.future.done():
            future = asked.future
            if reply.is_too_long:
                future.set_exception(TextTooLongError(asked.message.max_tokens or 0))
            elif reply.error is not None:
                future.set_exception(ChatTemplateError(reply.error))
            else:
                future.set_result(reply)

    def ask_again(self, worker: int) -> None:
        """The worker died and has a successor. It works in order, so it died over the oldest text that it had; the second time that
        text is refused."""
        lost = [asked for asked in self._waiting.values() if asked.worker == worker and not asked.future.done()]
        for asked in lost[:1]:
            asked.deaths += 1
            if asked.deaths >= MAX_DEATHS:
                sentence = f"this text ended its tokenizer process {asked.deaths} times; it is refused, send another one"
                asked.future.set_exception(InvalidRequestError(sentence))
        for asked in lost:
            if not asked.future.done():
                self._send(worker, asked.message)

    def close(self) -> None:
        for asked in self._waiting.values():
            asked.future.cancel()


def tokenize(tokenizer: Tokenizer, message: Tokenize) -> Tokenized:
    """A tokenizer process's whole work."""
    try:
        if message.messages is not None:
            ids = tokenizer.encode_chat(message.messages, message.tools, message.template_arguments, message.max_tokens)
        elif message.inputs is not None:
            encoded = tokenizer.encode_inputs(message.inputs, message.truncate_to, message.max_tokens, message.add_special_tokens)
            return Tokenized(id=message.id, encoded=encoded)
        else:
            ids = tokenizer.encode(message.text or "", message.add_special_tokens, message.max_tokens)
        return Tokenized(id=message.id, token_ids=ids)
    except TextTooLongError:
        return Tokenized(id=message.id, is_too_long=True)
    except ChatTemplateError as error:
        return Tokenized(id=message.id, error=str(error))
    except Exception:  # ends this request only
        log.exception("a text could not be tokenized")
        return Tokenized(id=message.id, error="this text cannot be tokenized; the server's log says why")

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

from frame.core.chat_template import TEMPLATE, ChatTemplateError
from frame.core.messages import Message, Tokenize, Tokenized
from frame.core.tokenizer import Encoded, Tokenizer
from frame.entrypoints.limits import InvalidRequestError
from frame.entrypoints.tracing import TRACE

log = logging.getLogger(__name__)

T = TypeVar("T")
INLINE_CHARACTERS = 1024  # encoding this much takes less time than a thread switch and back would cost
THREADS = 2
MAX_DEATHS = 2  # of a tokenizer process over one text


class TextInput(Protocol):
    """Text to ids, awaitable. Raises ChatTemplateError for messages that the template refuses."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> list[int]: ...

    async def encode_inputs(self, inputs: list[list[str]], longest: int | None = None) -> list[Encoded]: ...

    def close(self) -> None: ...


class ThreadedInput:
    """Encodes in a small thread pool; the tokenizer releases the GIL."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special_tokens)
        return await self._off_loop(self._tokenizer.encode, text, add_special_tokens)

    async def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]) -> list[int]:
        if not tools and _is_short(messages, arguments):
            return self._tokenizer.encode_chat(messages, tools, arguments)
        return await self._off_loop(self._tokenizer.encode_chat, messages, tools, arguments)

    async def encode_inputs(self, inputs: list[list[str]], longest: int | None = None) -> list[Encoded]:
        if sum(len(text) for texts in inputs for text in texts) <= INLINE_CHARACTERS:
            return self._tokenizer.encode_inputs(inputs, longest)
        return await self._off_loop(self._tokenizer.encode_inputs, inputs, longest)

    async def _off_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


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

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return (await self._ask(text=text, add_special_tokens=add_special_tokens)).token_ids

    async def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]) -> list[int]:
        return (await self._ask(messages=messages, tools=tools, template_arguments=arguments)).token_ids

    async def encode_inputs(self, inputs: list[list[str]], longest: int | None = None) -> list[Encoded]:
        return (await self._ask(inputs=inputs, longest=longest)).encoded

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
            if reply.error is not None:
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
            return Tokenized(id=message.id, token_ids=tokenizer.encode_chat(message.messages, message.tools, message.template_arguments))
        if message.inputs is not None:
            return Tokenized(id=message.id, encoded=tokenizer.encode_inputs(message.inputs, message.longest))
        return Tokenized(id=message.id, token_ids=tokenizer.encode(message.text or "", message.add_special_tokens))
    except ChatTemplateError as error:
        return Tokenized(id=message.id, error=str(error))
    except Exception:  # ends this request only
        log.exception("a text could not be tokenized")
        return Tokenized(id=message.id, error="this text cannot be tokenized; the server's log says why")

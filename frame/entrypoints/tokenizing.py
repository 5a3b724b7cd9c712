"""Tokenizing off the event loop: in threads of this process, or in tokenizer processes. Short texts are encoded at once.

Knows no request and no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from frame.core.chat_template import ChatTemplateError
from frame.core.messages import Message, Tokenize, Tokenized
from frame.core.tokenizer import Tokenizer

T = TypeVar("T")
INLINE_CHARACTERS = 1024  # encoding this much takes less time than a thread switch and back would cost
THREADS = 2


class TextInput(Protocol):
    """Text to ids, awaitable. Raises ChatTemplateError for messages that the template refuses."""

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> list[int]: ...

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

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> list[int]:
        size = sum(len(content) if isinstance(content := m.get("content"), str) else INLINE_CHARACTERS for m in messages)
        if size <= INLINE_CHARACTERS and not tools:
            return self._tokenizer.encode_chat(messages, tools, arguments)
        return await self._off_loop(self._tokenizer.encode_chat, messages, tools, arguments)

    async def _off_loop(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class ProcessInput:
    """Encodes in tokenizer processes, in turn. `send(worker, message)` reaches worker number `worker`; `answer` takes their replies."""

    def __init__(self, workers: int, send: Callable[[int, Message], None]) -> None:
        self._turn = itertools.cycle(range(workers))
        self._send = send
        self._waiting: dict[str, asyncio.Future[list[int]]] = {}
        self._names = itertools.count()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return await self._ask(text=text, add_special_tokens=add_special_tokens)

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, arguments: dict[str, Any]
    ) -> list[int]:
        return await self._ask(messages=messages, tools=tools, template_arguments=arguments)

    async def _ask(self, **content: Any) -> list[int]:
        name = str(next(self._names))
        future = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._send(next(self._turn), Tokenize(id=name, **content))
        try:
            return await future
        finally:
            del self._waiting[name]

    def answer(self, reply: Tokenized) -> None:
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            if reply.error is not None:
                future.set_exception(ChatTemplateError(reply.error))
            else:
                future.set_result(reply.token_ids)

    def close(self) -> None:
        for future in self._waiting.values():
            future.cancel()


def tokenize(tokenizer: Tokenizer, message: Tokenize) -> Tokenized:
    """A tokenizer process's whole work."""
    try:
        if message.messages is not None:
            return Tokenized(id=message.id, token_ids=tokenizer.encode_chat(message.messages, message.tools, message.template_arguments))
        return Tokenized(id=message.id, token_ids=tokenizer.encode(message.text or "", message.add_special_tokens))
    except ChatTemplateError as error:
        return Tokenized(id=message.id, error=str(error))

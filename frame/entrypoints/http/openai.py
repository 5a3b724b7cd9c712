"""The OpenAI API: `/v1/chat/completions`, `/v1/completions`, `/v1/models`. Validates, starts, shapes the answer; decides nothing else."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from frame.core.messages import TokenLogprobs
from frame.entrypoints.answers import Answer, Stream
from frame.entrypoints.http.call import Call
from frame.entrypoints.http.chat import answer_parsers, begin_chat, thinking_tokens
from frame.entrypoints.http.failures import failure
from frame.entrypoints.http.logprobs import TextPlaces, chat_logprobs, completion_logprobs, prompt_logprobs
from frame.entrypoints.http.openai_schema import ChatRequest, CompletionRequest, GenerationRequest, check_choices
from frame.entrypoints.http.services import Access, Operation, Routes, Services
from frame.entrypoints.http.sse import DONE, ChunkWriter, finish_reason, usage_of

_chat_decoder = msgspec.json.Decoder(ChatRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


class Response(ABC):
    """What both kinds of response share while they are made."""

    def __init__(self, services: Services, request: GenerationRequest, answer: Answer, kind: str) -> None:
        self.services = services
        self.request = request
        self.answer = answer
        self.created = int(time.time())
        self.kind = kind
        self.name = ("chatcmpl-" if kind.startswith("chat") else "cmpl-") + uuid.uuid4().hex
        options = request.stream_options
        self.has_usage = bool(request.stream and options and options.include_usage)
        self.has_running_usage = bool(self.has_usage and options and options.continuous_usage_stats)
        chunk = "chat.completion.chunk" if kind.startswith("chat") else kind
        self._tier = {} if request.service_tier is None else {"service_tier": "default"}
        self.chunks = ChunkWriter(self.name, chunk, services.resolved.served_name, self.created, self.has_usage, self._tier)

    def num_generated(self) -> int:
        return sum(sequence.num_tokens for sequence in self.answer.sequences)

    def usage(self) -> dict[str, Any]:
        """Of the whole answer: each prompt counts once, however many sequences it has."""
        prompts = {sequence.prompt_index: sequence for sequence in reversed(self.answer.sequences)}
        cached = sum(s.cached for s in prompts.values())
        return usage_of(sum(len(s.prompt) for s in prompts.values()), self.num_generated(), cached)

    def final_usage(self) -> dict[str, Any]:
        """The same with what is only counted once, when every sequence has been read."""
        return self.usage()

    def running_usage(self) -> dict[str, Any] | None:
        return self.usage() if self.has_running_usage else None

    def closing(self) -> bytes:
        return (self.chunks.usage(self.final_usage()) if self.has_usage else b"") + DONE

    def prompt_scores(self, sequence: Stream) -> dict[str, Any]:
        """The field `prompt_logprobs` of a choice, if it was asked for."""
        found = sequence.prompt_logprobs
        if self.request.prompt_logprobs is None or found is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(found, self.services.need_tokenizer())}

    async def send(self, call: Call) -> None:
        """Answer the request, as it goes or at the end. Raises ApiError, DisconnectedError."""
        if self.request.stream:
            await self.services.stream(call, self.answer, self.write, self.closing)
            return
        await self.services.complete(self.answer)
        await call.respond_json(
            {
                "id": self.name,
                "object": self.kind,
                "created": self.created,
                "model": self.services.resolved.served_name,
                "choices": [self.choice(sequence) for sequence in self.answer.sequences],
                "usage": self.final_usage(),
                **self._tier,
            }
        )

    @abstractmethod
    def write(self, sequence: Stream) -> bytes:
        """The events of what is new."""

    @abstractmethod
    def choice(self, sequence: Stream) -> dict[str, Any]:
        """A sequence that has ended, whole."""


# chat --------------------------------------------------------------------------------------------------------------


async def chat_completions(call: Call, services: Services) -> None:
    """A chat answer, as OpenAI."""
    request = await call.json(_chat_decoder)
    answer = await begin_chat(call, services, request)
    try:
        await ChatResponse(services, request, answer).send(call)
    finally:
        services.client.abandon(answer)


class ChatResponse(Response):
    """A chat answer, whole or in deltas."""

    request: ChatRequest

    def __init__(self, services: Services, request: ChatRequest, answer: Answer) -> None:
        super().__init__(services, request, answer, "chat.completion")
        self._opened: set[int] = set()
        self._parsers = answer_parsers(services, request, answer)
        self._is_plain = not (self._parsers or request.logprobs or self.has_running_usage)

    def final_usage(self) -> dict[str, Any]:
        found = [thinking_tokens(self.services, self.request, s, self._parsers.get(s.index)) for s in self.answer.sequences]
        return {**self.usage(), "completion_tokens_details": {"reasoning_tokens": sum(found)}}

    def write(self, sequence: Stream) -> bytes:
        text, _, logprobs = sequence.take()
        index = sequence.index
        if sequence.finish is None and self._is_plain and index in self._opened:
            return self.chunks.text(index, text) if text else b""
        return self._opening(index) + self._rest(sequence, text, logprobs)

    def _opening(self, index: int) -> bytes:
        if index in self._opened:
            return b""
        self._opened.add(index)
        return self.chunks.full(index, {"role": "assistant", "content": ""}, usage=self.running_usage())

    def _rest(self, sequence: Stream, text: str, parts: list[TokenLogprobs]) -> bytes:
        finish = sequence.finish
        if finish is not None and finish.reason == "error":
            return b"data: " + failure(finish).body() + b"\n\n"
        parser = self._parsers.get(sequence.index)
        deltas: list[dict[str, Any]] = parser.feed(text, finish) if parser else [{"content": text}] if text else []
        if finish is not None and not deltas:
            deltas = [{}]
        if not deltas and parts:
            deltas = [{"content": ""}]
        logprobs = chat_logprobs(parts, self.services.need_tokenizer()) if parts else None
        reason = finish_reason(finish, parser is not None and parser.has_calls)
        events = []
        for place, delta in enumerate(deltas):
            is_last = place == len(deltas) - 1
            events.append(
                self.chunks.full(
                    sequence.index,
                    delta,
                    reason if is_last else None,
                    logprobs if is_last else None,
                    self.running_usage(),
                    finish.matched if finish is not None and is_last else None,
                )
            )
        return b"".join(events)

    def choice(self, sequence: Stream) -> dict[str, Any]:
        text, _, parts = sequence.take()
        parser = self._parsers.get(sequence.index)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if parser is not None:
            parser.feed(text, sequence.finish)
            message = parser.message()
        return {
            "index": sequence.index,
            "message": message,
            "logprobs": chat_logprobs(parts, self.services.need_tokenizer()) if self.request.logprobs else None,
            "finish_reason": finish_reason(sequence.finish, parser is not None and parser.has_calls),
            "matched_stop": sequence.finish.matched if sequence.finish else None,
            **self.prompt_scores(sequence),
        }


# completions -------------------------------------------------------------------------------------------------------


async def completions(call: Call, services: Services) -> None:
    """A text completion, as OpenAI."""
    request = await call.json(_completion_decoder)
    services.check_model(request.model)
    params, prompts = request.params(), request.prompts()
    check_choices(len(prompts), params.n)
    if request.echo or not (params.logprobs is None and params.prompt_logprobs is None):
        services.need_tokenizer()  # before anything is computed
    special = request.add_special_tokens
    answer = await services.begin(call, prompts, [params] * len(prompts), request, add_special_tokens=special)
    try:
        await CompletionResponse(services, request, answer).send(call)
    finally:
        services.client.abandon(answer)


class CompletionResponse(Response):
    """A text completion, whole or in pieces. With `echo` the prompt comes first; with `max_tokens: 0` it comes alone."""

    request: CompletionRequest

    def __init__(self, services: Services, request: CompletionRequest, answer: Answer) -> None:
        super().__init__(services, request, answer, "text_completion")
        self._places: dict[int, TextPlaces] = {}
        self._opened: set[int] = set()  # sequences whose prompt is out
        self._is_prompt_only = bool(request.echo and request.max_tokens == 0)
        self._is_plain = not (request.echo or request.logprobs is not None or self.has_running_usage)

    def num_generated(self) -> int:
        return 0 if self._is_prompt_only else super().num_generated()  # the one that the engine needs is not shown

    def write(self, sequence: Stream) -> bytes:
        finish = sequence.finish
        if finish is None and self._is_plain:
            text, _, _ = sequence.take()
            return self.chunks.text(sequence.index, text) if text else b""
        if finish is not None and finish.reason == "error":
            return b"data: " + failure(finish).body() + b"\n\n"
        text, logprobs = self._new(sequence)
        if not text and finish is None and logprobs is None:
            return b""
        matched = None if finish is None else finish.matched
        return self.chunks.full(sequence.index, text, finish_reason(finish), logprobs, self.running_usage(), matched)

    def choice(self, sequence: Stream) -> dict[str, Any]:
        text, logprobs = self._new(sequence)
        return {
            "index": sequence.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(sequence.finish),
            "matched_stop": sequence.finish.matched if sequence.finish else None,
            **self.prompt_scores(sequence),
        }

    def _new(self, sequence: Stream) -> tuple[str, dict[str, Any] | None]:
        """What is new of a sequence: text and logprobs, the prompt's before its first."""
        text, _, parts = sequence.take()
        if self._is_prompt_only:
            text, parts = "", []
        index = sequence.index
        skips = sequence.params.skip_special_tokens
        if self.request.echo and index not in self._opened:
            self._opened.add(index)
            text = self.services.need_tokenizer().decode(sequence.prompt, skips) + text
            parts = ([sequence.prompt_logprobs] if sequence.prompt_logprobs else []) + parts
        if self.request.logprobs is None:
            return text, None
        tokenizer = self.services.need_tokenizer()
        places = self._places.get(index)
        if places is None:
            places = self._places[index] = TextPlaces(tokenizer, skips)
        return text, completion_logprobs(parts, tokenizer, places)


# models ------------------------------------------------------------------------------------------------------------


async def models(call: Call, services: Services) -> None:
    """The served models."""
    await call.respond_json({"object": "list", "data": [_card(services)]})


async def model(call: Call, services: Services) -> None:
    """One model."""
    name = call.scope["path_params"]["name"]
    services.check_model(name)
    await call.respond_json(_card(services))


def _card(services: Services) -> dict[str, Any]:
    return {
        "id": services.resolved.served_name,
        "object": "model",
        "created": services.created,
        "owned_by": "frame",
        "root": services.resolved.served_name,
        "max_model_len": services.resolved.max_context,
    }


ROUTES: Routes = (
    Operation("/v1/chat/completions", ("POST",), Access.USER, chat_completions, ChatRequest),
    Operation("/v1/completions", ("POST",), Access.USER, completions, CompletionRequest),
    Operation("/v1/models", ("GET",), Access.USER, models),
    Operation("/v1/models/{name:path}", ("GET",), Access.USER, model),
)

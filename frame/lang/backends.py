"""Where a program's generations run: an `Engine` in process, a `Client` of a frame server, or any
OpenAI endpoint.

`make_backend` chooses by the object's type. A backend states its features; what it lacks is refused
by name. Must not know programs and states.
"""

from __future__ import annotations

import asyncio
import copy
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import msgspec

from frame.core.interfaces.sampling_params import SamplingParams

OnText = Callable[[str], None]


class BackendError(RuntimeError):
    """The endpoint failed or refused a request."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt: plain `text`, or `messages` whose last one, of the assistant, may be unfinished."""

    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()

    @property
    def has_images(self) -> bool:
        """Whether a message has parts, as those with images have."""
        return any(isinstance(message["content"], list) for message in self.messages)

    @property
    def is_continued(self) -> bool:
        """Whether the generation continues an assistant's message that has text already."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"


@dataclass(slots=True)
class Generated:
    """The texts of one call (`n` of them), and its token counts."""

    texts: list[str]
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    scores: list[float] = field(default_factory=list)  # of `select` by log-probability, one a choice


class Backend(Protocol):
    """What executes generations. All methods run in one event loop."""

    name: str
    features: frozenset[str]

    async def generate(self, prompt: Conversation, params: Mapping[str, Any], on_text: OnText | None) -> Generated:
        """Run to the end; `on_text` gets each piece of text. Cancelling the call stops the
        requests."""
        ...

    async def score(self, prompt: Conversation, choices: Sequence[str]) -> tuple[list[list[float]], Generated]:
        """Log-probabilities of each choice's tokens after the prompt."""
        ...

    async def close(self) -> None:
        """Give back what the calls of this run opened."""
        ...


class FrameBackend:
    """`Engine` or `Client`: both have the same methods; only chat templates are applied in
    different places."""

    features = frozenset({"role", "text", "regex", "schema", "ebnf", "choice", "logprob select", "continued message"})

    def __init__(self, target: Any) -> None:
        self._is_remote = hasattr(target, "post")
        self._target = target.copy() if self._is_remote else target  # connections of this run alone
        self.name = type(target).__name__
        if "image" in getattr(target, "modalities", ()):
            self.features = self.features | {"image"}

    async def generate(self, prompt: Conversation, params: Mapping[str, Any], on_text: OnText | None) -> Generated:
        sampling = msgspec.convert(dict(params), SamplingParams)
        ids: Any = self._messages(prompt) if prompt.has_images else await self._encode(prompt)
        if on_text is None or sampling.n > 1:
            output = await self._target.agenerate(ids, sampling)
        else:
            output = None
            async for delta in self._target.astream(ids, sampling):
                output = delta.output
                if delta.text:
                    on_text(delta.text)
        return self._generated([output] if sampling.n == 1 else output.outputs)

    def _messages(self, prompt: Conversation) -> list[dict[str, Any]]:
        """The messages of a prompt with images. Raises BackendError."""
        if prompt.is_continued:
            raise BackendError("a generation after text in assistant() cannot have images before it; generate in an empty assistant()")
        return [dict(message) for message in prompt.messages]

    async def score(self, prompt: Conversation, choices: Sequence[str]) -> tuple[list[list[float]], Generated]:
        if prompt.has_images:
            raise BackendError("select() by log-probability cannot have images before it; use method='constrained'")
        prefix = await self._encode(prompt)
        encoded = [await self._call(self._target.tokenizer.encode, choice, False) for choice in choices]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = await self._target.agenerate([prefix + ids for ids in encoded], params)
        scores = []
        for ids, output in zip(encoded, outputs, strict=True):
            if output.prompt_logprobs is None:
                raise BackendError(output.error or "the engine returned no log-probabilities of the prompt")
            scores.append([float(value) for value in output.prompt_logprobs.logprobs[-len(ids) :]])
        return scores, self._generated(outputs)

    async def close(self) -> None:
        if self._is_remote:
            await self._target.close_async()

    async def _encode(self, prompt: Conversation) -> list[int]:
        tokenizer = self._target.tokenizer
        if not prompt.messages:
            ids: list[int] = await self._call(tokenizer.encode, prompt.text)
            return ids
        arguments = {"continue_final_message": True, "add_generation_prompt": False} if prompt.is_continued else {}
        messages = [dict(message) for message in prompt.messages]
        if self._is_remote:
            reply = await self._call(self._target.post, "/tokenize", {"messages": messages, **arguments})
            return list(reply["tokens"])
        arguments.pop("add_generation_prompt", None)
        return list(tokenizer.encode_chat(messages, None, arguments))

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A blocking call over HTTP goes to a thread; in process it is short."""
        return await asyncio.to_thread(function, *arguments) if self._is_remote else function(*arguments)

    @staticmethod
    def _generated(outputs: Sequence[Any]) -> Generated:
        for output in outputs:
            if output.finish_reason in ("error", "abort"):
                raise BackendError(output.error or "the request was aborted")
        return Generated(
            [output.text for output in outputs],
            outputs[0].finish_reason,
            sum(output.prompt_tokens for output in outputs),
            sum(output.cached_tokens for output in outputs),
            sum(len(output.token_ids) for output in outputs),
        )


_OPENAI = ("max_tokens", "temperature", "top_p", "n", "seed", "stop", "frequency_penalty", "presence_penalty", "logit_bias")
_EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_regex", "stop_token_ids", "skip_special_tokens",
               "bad_words")  # fmt: skip
_STRUCTURED = {"regex": "regex", "choice": "choice", "ebnf": "grammar"}


class OpenAI:
    """Any OpenAI endpoint. `api` is "chat" (programs with roles) or "completions" (programs of
    plain text).

    `extensions=True` is for servers that take vLLM's request fields (frame, vLLM): grammars,
    `top_k`, unfinished assistant messages. `timeout` in seconds, of one answer or one pause in a
    stream.
    """

    def __init__(
        self, base_url: str, model: str, *, api: str = "chat", api_key: str | None = None, extensions: bool = False, timeout: float = 600.0
    ) -> None:
        if api not in ("chat", "completions"):
            raise ValueError(f"api is {api!r}; it must be 'chat' or 'completions'")
        self.name = f"OpenAI ({api})"
        self._model, self._is_chat, self._extensions = model, api == "chat", extensions
        self._path = "/chat/completions" if self._is_chat else "/completions"
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        context = ssl.create_default_context()  # read once for all runs, which takes 20 ms
        self._settings: dict[str, Any] = {"base_url": base_url.rstrip("/"), "headers": headers, "timeout": timeout, "verify": context}
        self._http: httpx.AsyncClient | None = None
        features = {"role", "schema", "image"} if self._is_chat else {"text"}
        if extensions:
            features |= {"schema", "regex", "ebnf", "choice", *_EXTENSIONS} | ({"continued message"} if self._is_chat else set())
        self.features = frozenset(features)

    async def generate(self, prompt: Conversation, params: Mapping[str, Any], on_text: OnText | None) -> Generated:
        body = self._body(prompt, params)
        if self._http is None:
            self._http = httpx.AsyncClient(**self._settings, limits=httpx.Limits(max_connections=None))
        try:
            if on_text is None or body.get("n", 1) > 1:
                response = await self._http.post(self._path, json=body)
                return self._whole(_checked(response.status_code, response.content))
            return await self._streamed(body, on_text)
        except httpx.HTTPError as error:
            raise BackendError(f"{self._settings['base_url']} did not answer ({type(error).__name__}: {error})") from error

    async def score(self, prompt: Conversation, choices: Sequence[str]) -> tuple[list[list[float]], Generated]:
        raise NotImplementedError  # the feature is not stated

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    def _body(self, prompt: Conversation, params: Mapping[str, Any]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self._model}
        body |= {"messages": list(prompt.messages)} if self._is_chat else {"prompt": prompt.text}
        if prompt.is_continued:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        named = (*_OPENAI, *(_EXTENSIONS if self._extensions else ()))
        if unknown := sorted(params.keys() - {*named, "json_schema", *(_STRUCTURED if self._extensions else ())}):
            raise BackendError(f"backend {self.name} does not support the sampling parameters {', '.join(unknown)}; leave them out")
        body |= {key: params[key] for key in named if key in params}
        if "json_schema" in params:
            schema = msgspec.json.decode(params["json_schema"])
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        grammar = {field: params[key] for key, field in _STRUCTURED.items() if key in params}
        return body | ({"structured_outputs": grammar} if grammar else {})

    async def _streamed(self, body: dict[str, Any], on_text: OnText) -> Generated:
        assert self._http is not None
        generated, pieces = Generated([""]), []
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", self._path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                _checked(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise BackendError(str(event["error"].get("message")))
                for choice in event.get("choices", ()):
                    text = (choice["delta"].get("content") if self._is_chat else choice["text"]) or ""
                    generated.finish_reason = choice.get("finish_reason") or generated.finish_reason
                    if text:
                        pieces.append(text)
                        on_text(text)
                _add_usage(generated, event.get("usage"))
        generated.texts = ["".join(pieces)]
        return generated

    def _whole(self, reply: dict[str, Any]) -> Generated:
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        texts = [(choice["message"].get("content") if self._is_chat else choice["text"]) or "" for choice in choices]
        generated = Generated(texts, choices[0].get("finish_reason"))
        _add_usage(generated, reply.get("usage"))
        return generated


def make_backend(target: Any) -> Backend:
    """A backend for one run of an `Engine`, a `Client`, an `OpenAI`, or an own object with these
    methods."""
    if isinstance(target, OpenAI):
        return copy.copy(target)  # it has opened nothing: each run has connections of its own
    if hasattr(target, "features") and hasattr(target, "generate"):
        return target  # type: ignore[no-any-return]
    if hasattr(target, "agenerate") and hasattr(target, "tokenizer"):
        return FrameBackend(target)
    raise TypeError(f"backend is {type(target).__name__}; give an Engine, a Client or frame.lang.OpenAI(base_url, model)")


def _checked(status: int, content: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    if status == httpx.codes.OK and isinstance(body, dict):
        return body
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    raise BackendError(f"the server answered {status}: {message or content[:200].decode(errors='replace')}")


def _add_usage(generated: Generated, usage: Mapping[str, Any] | None) -> None:
    if usage:
        generated.prompt_tokens, generated.completion_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        generated.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0) or 0

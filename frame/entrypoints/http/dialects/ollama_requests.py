"""The bodies of Ollama's requests, as chat and completion requests.

A field that cannot be served raises ApiError 400 with its name. Must not depend on the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import msgspec
from pydantic import Field, ValidationError, model_validator

from frame.core.errors import did_you_mean
from frame.entrypoints.http.chat.media_parts import from_base64
from frame.entrypoints.http.chat.request_fields import OLLAMA, ExtensionFields, check_object, check_string
from frame.entrypoints.http.chat.thinking_fields import check_effort
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import as_sent
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.request_body import RequestBody, RequestOptions, SamplingFields
from frame.entrypoints.http.services import Services
from frame.entrypoints.http.validation_errors import type_name, validation_error
from frame.entrypoints.media.media_service import MediaPart

LATEST = ":latest"  # the tag that Ollama's clients add to a model name without a tag
# option -> field of a chat request
OPTIONS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "seed", "stop": "stop",
           "num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
           "frequency_penalty": "frequency_penalty"}  # fmt: skip
# Options of the machine and the context, which are fixed at the start of the server. They are
# ignored. Numbers, and switches:
FIXED_NUMBERS = frozenset({"num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "num_gqa"})
FIXED_SWITCHES = frozenset({"numa", "use_mmap", "use_mlock", "low_vram", "vocab_only", "f16_kv", "logits_all"})
# Sampling options that are not supported, with the values that switch them off; None: any number.
NEUTRAL = {"mirostat": 0, "mirostat_eta": None, "mirostat_tau": None, "tfs_z": 1, "typical_p": 1, "repeat_last_n": -1,
           "penalize_newline": True}  # fmt: skip


class OllamaChat(ChatRequest):
    """A chat request without OpenAI's bound of the temperature, which Ollama does not have.
    `sent_options`: field -> the option that it comes from."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {**ChatRequest.FIELD_NAMES, "response_format": "format"}

    temperature: float | None = None
    sent_options: dict[str, str] = Field(default_factory=dict)

    def sent_name(self, parameter: str) -> str:
        return _sent_option(self.sent_options, super().sent_name(parameter))


class OllamaPrompt(OllamaChat):
    """The chat request of a prompt."""

    FIELD_NAMES: ClassVar[Mapping[str, str]] = {**OllamaChat.FIELD_NAMES, "prompt": "prompt", "messages": "prompt"}


class OllamaCompletion(CompletionRequest):
    """A completion request, likewise."""

    temperature: float | None = None
    sent_options: dict[str, str] = Field(default_factory=dict)

    def sent_name(self, parameter: str) -> str:
        sent = super().sent_name(parameter)
        return "format" if sent == "response_format" else _sent_option(self.sent_options, sent)


def _sent_option(options: Mapping[str, str], name: str) -> str:
    """What the client calls the field `name`."""
    return f"options.{options[name]}" if name in options else name


class Body(ExtensionFields):
    """Fields of both kinds of request. `think`: whether to reason, or the effort. `keep_alive` is
    ignored, because the model stays loaded."""

    model: str
    stream: bool = True
    think: bool | str | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_places(cls, value: Any) -> Any:
        """Raise ApiError 400 for a field of the other APIs that is an option here."""
        for option, name in OPTIONS.items() if isinstance(value, dict) else ():
            if name not in cls.model_fields and (sent := value.get(name)) is not None and sent is not False and sent not in ("", []):
                raise ApiError(400, f"{name} is not a field of this route; send options.{option}", name)
        return value

    def common(self, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a chat or completion request: `fields`, the options and the others. Raises
        ApiError."""
        if self.logprobs or self.top_logprobs:
            raise ApiError(400, "logprobs is not supported here; use /v1/chat/completions", "logprobs")
        sent = {OPTIONS[option]: option for option, value in (self.options or {}).items() if option in OPTIONS and value is not None}
        for field, value in _sampling(self.options or {}).items():
            if fields.setdefault(field, value) != value:
                place = f"options.{sent[field]}"
                raise ApiError(400, f"{place} and {field} are the same; send one of them", place)
        return {"model": name, "stream": self.stream, **self._format(), **fields, "sent_options": sent}

    def chat_fields(self) -> dict[str, Any]:
        """The fields of a chat request besides the options, with `think`. Raises ApiError 400."""
        fields = self.extension_fields()
        if self.think is not None:
            name, value = (
                ("reasoning_effort", check_effort(self.think, "think")) if isinstance(self.think, str) else ("enable_thinking", self.think)
            )
            if fields.setdefault(name, value) != value:
                raise ApiError(400, f"think and {name} contradict each other; send one of them", "think")
        return fields

    def _format(self) -> dict[str, Any]:
        if not self.format:
            return {}
        if isinstance(self.format, dict):
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format}}}
        if self.format != "json":
            raise ApiError(400, f"format is {self.format[:50]!r}; it must be json or a JSON schema", "format")
        return {"response_format": {"type": "json_object"}}


class ChatBody(Body):
    NESTED: ClassVar[Mapping[str, Shape]] = OLLAMA

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def to_chat_request(self, name: str) -> ChatRequest:
        """The chat request of this request. Raises ApiError 400."""
        messages = _messages(self.messages)
        request: ChatRequest = _validated(OllamaChat, messages=messages, tools=self.tools, **self.common(name, self.chat_fields()))
        return request


class GenerateBody(Body):
    """A request of `/api/generate`. `raw`: the prompt is used without the chat template."""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None

    def to_chat_request(self, name: str) -> ChatRequest:
        """The chat request of this request. Raises ApiError 400."""
        self._check()
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": _with_images(self.prompt, self.media())}]
        request: ChatRequest = _validated(OllamaPrompt, messages=messages, **self.common(name, self.chat_fields()))
        return request

    def to_completion_request(self, name: str) -> CompletionRequest:
        """The completion request of a raw prompt, or of one with a suffix. Raises ApiError 400."""
        self._check()
        own = {"prompt": self.prompt, "suffix": self.suffix, "add_special_tokens": not self.raw}
        fields = {name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None}
        request: CompletionRequest = _validated(OllamaCompletion, **own, **self.common(name, fields))
        return request

    def media(self) -> list[MediaPart]:
        """The images. Raises ApiError 400."""
        return _images(self.images, "images")

    def _check(self) -> None:
        if self.suffix and self.images:
            raise ApiError(400, "suffix and images exclude each other; keep one", "suffix")
        for name, remedy in {"template": "use raw", "context": "use /api/chat"}.items():
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported; {remedy}", name)


class _VectorBody(RequestOptions):
    """Fields of both routes of embeddings, which sample nothing. `keep_alive` is ignored."""

    model: str
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None

    def request_options(self) -> dict[str, Any]:
        """The fields that every request that runs the model has. Raises ApiError 400 for an option
        that is wrong or asks for sampling."""
        options = self.options or {}
        _sampling(options)
        for name in OPTIONS:
            if options.get(name) is not None:
                place = f"options.{name}"
                raise ApiError(400, f"{place} is not an option of this route, which samples nothing; leave it out", place)
        return {name: getattr(self, name) for name in RequestOptions.model_fields}


class EmbedBody(_VectorBody):
    input: str | list[str | int | list[int]]
    truncate: bool | None = None
    dimensions: int | None = None


class EmbeddingsBody(_VectorBody):
    """A request of the older route `/api/embeddings`."""

    prompt: str = ""


class ShowBody(RequestBody):
    model: str = ""
    name: str = ""
    verbose: bool | None = None


def served_name(model: str, services: Services) -> str:
    """The model name without the tag that a client added."""
    return model if model == services.resolved.served_name else model.removesuffix(LATEST)


def _validated(kind: Any, **fields: Any) -> Any:
    """A `kind` of these fields, whose types are checked here. Raises ApiError 400."""
    values = {name: value for name, value in fields.items() if value is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        api_error = validation_error(error.errors(include_url=False), values)
        raise as_sent(api_error, partial(_sent_option, fields["sent_options"])) from None


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for name, value in options.items():
        place = f"options.{name[:100]}"
        is_number, is_switch = type(value) in (int, float), isinstance(value, bool)
        if value is None or (is_number and name in FIXED_NUMBERS) or (is_switch and name in FIXED_SWITCHES):
            continue
        if name in FIXED_NUMBERS | FIXED_SWITCHES:
            remedy = "a number" if name in FIXED_NUMBERS else "true or false"
            raise ApiError(400, f"{place} is {type_name(value)}; send {remedy}", place)
        if name in NEUTRAL:
            neutral = NEUTRAL[name]
            if not is_number if neutral is None else value != neutral or is_switch != isinstance(neutral, bool):
                raise ApiError(400, f"{place} is not supported; leave it out", place)
        elif name not in OPTIONS:
            hint = did_you_mean(name, (*OPTIONS, *FIXED_NUMBERS, *FIXED_SWITCHES, *NEUTRAL)) or "; leave it out"
            raise ApiError(400, f"{place} is unknown{hint}", place)
        else:
            sampling[OPTIONS[name]] = value
    if sampling.get("max_tokens") in (-1, -2):  # the rest of the context
        del sampling["max_tokens"]
    if sampling.get("top_k") == 0 and sampling["top_k"] is not False:
        sampling["top_k"] = -1
    return sampling


def _messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in OpenAI's shape. Calls get ids, and results the ids of the calls in order."""
    result: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        one: dict[str, Any] = {"content": "", **{name: message[name] for name in ("role", "content") if message.get(name) is not None}}
        if "thinking" in message:
            one["reasoning_content"] = check_string(message["thinking"], f"{place}.thinking")
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list):
                raise ApiError(400, f"{place}.tool_calls: expected a list", f"{place}.tool_calls")
            calls = enumerate(message["tool_calls"])
            one["tool_calls"] = [_chat_call(call, f"call_{i}_{j}", f"{place}.tool_calls[{j}]") for j, call in calls]
            open_calls = [call["id"] for call in one["tool_calls"]]
        if images := _images(message.get("images"), f"{place}.images"):
            one["content"] = _with_images(check_string(one["content"], f"{place}.content"), images)
        if message.get("role") == "tool":
            call_id = check_string(message.get("tool_call_id") or "", f"{place}.tool_call_id")
            one["tool_call_id"] = call_id or (open_calls.pop(0) if open_calls else "")
            if name := message.get("tool_name"):
                one["name"] = check_string(name, f"{place}.tool_name")
        result.append(one)
    return result


def _images(images: Any, place: str) -> list[MediaPart]:
    if images is not None and not isinstance(images, list):
        raise ApiError(400, f"{place} is {type_name(images)}; send a list of images in base64", place)
    return [MediaPart("image", from_base64(data, f"{place}[{i}]"), f"{place}[{i}]") for i, data in enumerate(images or ())]


def _with_images(text: str, images: list[MediaPart]) -> str | list[Any]:
    """A message's content: the images, then the text."""
    return [*images, {"type": "text", "text": text}] if images else text


def _chat_call(call: Any, name: str, place: str) -> dict[str, Any]:
    """A tool call in OpenAI's shape. `name`: its id where the client gave none."""
    function = check_object(check_object(call, place).get("function"), f"{place}.function")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(check_object(arguments, f"{place}.function.arguments")).decode()
    function = {"name": check_string(function.get("name"), f"{place}.function.name"), "arguments": text}
    return {"id": call["id"] if isinstance(call.get("id"), str) else name, "type": "function", "function": function}

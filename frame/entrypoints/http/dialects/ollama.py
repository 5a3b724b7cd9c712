"""The Ollama API: `/api/chat`, `/api/generate`, `/api/embed`, and model information.

A field that cannot be served raises ApiError 400 with its name. A streamed response is one JSON
object per line. Must not depend on the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NotRequired

import msgspec
from pydantic import Field, ValidationError

from frame.core.errors import did_you_mean
from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import make_output_parsers, start_chat
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock, ContentBlocks, OutputParser
from frame.entrypoints.http.chat.request_fields import OLLAMA, check_effort, check_object, check_string
from frame.entrypoints.http.errors import ApiError, ErrorShape
from frame.entrypoints.http.failures import failure, sent_as
from frame.entrypoints.http.native.pooling import CUT_FIELD, EmbeddingRequest, compute_embeddings, encode_vectors, paced, value_array
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.protocol.fields import Shape
from frame.entrypoints.http.request_body import RequestBody
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import RequestPlan, start_request, stream_response, wait_complete
from frame.entrypoints.http.response_types import Version, array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.http.validation_errors import type_name, validation_error
from frame.entrypoints.version import package_version

# requests -----------------------------------------------------------------------------------------

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
    """A chat request without OpenAI's bound of the temperature, which Ollama does not have."""

    temperature: float | None = None


class OllamaCompletion(CompletionRequest):
    """A completion request, likewise."""

    temperature: float | None = None


class Body(RequestBody):
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

    def common(self, name: str) -> dict[str, Any]:
        """The fields of a chat or completion request. Raises ApiError."""
        if self.logprobs or self.top_logprobs:
            raise ApiError(400, "logprobs is not supported here; use /v1/chat/completions", "logprobs")
        return {"model": name, "stream": self.stream, **self._format(), **_sampling(self.options or {})}

    def thinking(self) -> dict[str, Any]:
        """The fields of a chat request that switch reasoning."""
        if isinstance(self.think, str):
            return {"reasoning_effort": check_effort(self.think, "think")}
        if self.think is None:
            return {}
        return {"chat_template_kwargs": {"enable_thinking": self.think, "thinking": self.think}}

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
        request: ChatRequest = _validated(OllamaChat, messages=messages, tools=self.tools, **self.thinking(), **self.common(name))
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
        messages = [*system, {"role": "user", "content": self.prompt}]
        request: ChatRequest = _validated(OllamaChat, messages=messages, **self.thinking(), **self.common(name))
        return request

    def to_completion_request(self, name: str) -> CompletionRequest:
        """The completion request of a raw prompt. Raises ApiError 400."""
        self._check()
        request: CompletionRequest = _validated(OllamaCompletion, prompt=self.prompt, add_special_tokens=False, **self.common(name))
        return request

    def _check(self) -> None:
        remedies = {"suffix": "leave it out", "template": "use raw", "context": "use /api/chat", "images": "this model takes text only"}
        for name, remedy in remedies.items():
            if getattr(self, name):
                raise ApiError(400, f"{name} is not supported; {remedy}", name)


class EmbedBody(RequestBody):
    model: str
    input: str | list[str | int | list[int]]
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: str | float | None = None
    options: dict[str, Any] | None = None


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
        raise name_option(validation_error(error.errors(include_url=False), values)) from None


def name_option(error: ApiError) -> ApiError:
    """The error with Ollama's option in place of the chat request's field."""
    if error.param == "response_format":
        return error.with_param("format")
    option = next((option for option, field in OPTIONS.items() if field == error.param), None)
    return error if option is None else error.with_param(f"options.{option}")


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
        if message.get("images"):
            raise ApiError(400, f"{place}.images is not supported; this model takes text only", f"{place}.images")
        one: dict[str, Any] = {"content": "", **{name: message[name] for name in ("role", "content") if message.get(name) is not None}}
        if "thinking" in message:
            one["reasoning_content"] = check_string(message["thinking"], f"{place}.thinking")
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list):
                raise ApiError(400, f"{place}.tool_calls: expected a list", f"{place}.tool_calls")
            calls = enumerate(message["tool_calls"])
            one["tool_calls"] = [_chat_call(call, f"call_{i}_{j}", f"{place}.tool_calls[{j}]") for j, call in calls]
            open_calls = [call["id"] for call in one["tool_calls"]]
        if message.get("role") == "tool":
            call_id = check_string(message.get("tool_call_id") or "", f"{place}.tool_call_id")
            one["tool_call_id"] = call_id or (open_calls.pop(0) if open_calls else "")
            if name := message.get("tool_name"):
                one["name"] = check_string(name, f"{place}.tool_name")
        result.append(one)
    return result


def _chat_call(call: Any, name: str, place: str) -> dict[str, Any]:
    """A tool call in OpenAI's shape. `name`: its id where the client gave none."""
    function = check_object(check_object(call, place).get("function"), f"{place}.function")
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(check_object(arguments, f"{place}.function.arguments")).decode()
    function = {"name": check_string(function.get("name"), f"{place}.function.name"), "arguments": text}
    return {"id": call["id"] if isinstance(call.get("id"), str) else name, "type": "function", "function": function}


# responses ----------------------------------------------------------------------------------------

OllamaFunction = declare("OllamaFunction", "name", arguments=dict[str, Any])
OllamaToolCall = declare("OllamaToolCall", "id", function=OllamaFunction)
OllamaMessage = declare("OllamaMessage", "content thinking?", role="assistant", tool_calls=NotRequired[array(OllamaToolCall)])
_Head = declare(
    "OllamaHead",
    "model done total_duration? load_duration? prompt_eval_duration? eval_duration? prompt_eval_count? eval_count?",
    created_at=str,
    done_reason=NotRequired[Literal["stop", "length", "load"]],
)
# The last object has `done_reason`, counts of tokens and durations in nanoseconds.
OllamaChatResponse = declare("OllamaChat", base=_Head, message=OllamaMessage)
OllamaCompletionResponse = declare("OllamaCompletion", "response thinking?", base=_Head)
OllamaEmbeddings = declare("OllamaEmbeddings", "model total_duration load_duration prompt_eval_count", embeddings=list[list[float]])
OllamaDetails = declare("OllamaDetails", "parent_model format family families parameter_size quantization_level")
OllamaCard = declare("OllamaCard", "name model modified_at size digest", details=OllamaDetails)
OllamaTags = declare("OllamaTags", models=array(OllamaCard))
OllamaDescription = declare("OllamaDescription", "modelfile parameters template model_info capabilities", details=OllamaDetails)
OllamaErrorResponse = declare("OllamaErrorResponse", "error", "The error body of the Ollama API.")


LINES = "application/x-ndjson"
_encode = msgspec.json.encode


def _error_body(error: ApiError) -> bytes:
    return _encode({"error": name_option(error).message})


def _error_line(error: ApiError) -> bytes:
    return _error_body(error) + b"\n"


ERRORS = ErrorShape(_error_body, _error_line, model=OllamaErrorResponse)

router = ApiRouter(access=Access.USER, errors=ERRORS)


@router.post("/api/chat", responses=responds_with(OllamaChatResponse, events=OllamaChatResponse, stream_type=LINES))
async def chat(body: ChatBody, context: ContextDep, services: ServicesDep) -> Any:
    """Create a chat completion, as Ollama."""
    name = served_name(body.model, services)
    if not body.messages:
        services.check_model(name, context.tenant)
        return _loaded(body.model, message={"role": "assistant", "content": ""})
    request = body.to_chat_request(name)
    state = await start_chat(context, services, request)
    parser = make_output_parsers(services, request, state).get(0)
    return await _send(context, services, state, ResponseLines(state, parser, body.model, _message), body.stream)


@router.post("/api/generate", responses=responds_with(OllamaCompletionResponse, events=OllamaCompletionResponse, stream_type=LINES))
async def generate(body: GenerateBody, context: ContextDep, services: ServicesDep) -> Any:
    """Complete a prompt, with the chat template unless `raw` is set."""
    name = served_name(body.model, services)
    if not body.prompt:
        services.check_model(name, context.tenant)
        return _loaded(body.model, response="")
    if body.raw:
        completion = body.to_completion_request(name)
        services.check_model(completion.model, context.tenant)
        params = completion.to_sampling_params()
        # OpenAI's default is 16, Ollama's the rest of the context
        if completion.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=None)
        plan = RequestPlan(completion.to_prompts(), [params], completion, add_special_tokens=False)
        state = await start_request(context, services, plan)
        parser = None
    else:
        request = body.to_chat_request(name)
        state = await start_chat(context, services, request)
        parser = make_output_parsers(services, request, state).get(0)
    return await _send(context, services, state, ResponseLines(state, parser, body.model, _response), body.stream)


def _loaded(model: str, **empty: Any) -> dict[str, Any]:
    """Respond to a request without a prompt, which asks Ollama to load the model."""
    return {"model": model, "created_at": _now(), **empty, "done": True, "done_reason": "load"}


async def _send(context: RequestContext, services: Services, state: RequestState, lines: ResponseLines, is_streamed: bool) -> None:
    if is_streamed:
        await stream_response(context, services, state, lines.write_events, lambda: b"", LINES.encode())
    else:
        await wait_complete(state)
        await context.respond(lines.build_response())


def _message(content: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A delta in the shape of `/api/chat`."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def _response(content: str = "", thinking: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A delta in the shape of `/api/generate`, which has no tool calls."""
    return {"response": content} | ({"thinking": thinking} if thinking else {})


class ResponseLines(BlockEventWriter):
    """Writes a response as lines or one object. `shape` makes a delta of the route."""

    def __init__(self, state: RequestState, parser: OutputParser | None, model: str, shape: Callable[..., dict[str, Any]]) -> None:
        self._state = state
        self._sequence = state.sequences[0]
        self._parser = parser
        self._model = model
        self._shape = shape
        self._blocks = ContentBlocks()

    def write_events(self, sequence: SequenceState) -> bytes:
        """The lines of the new output."""
        finish = sequence.finish
        if finish is not None and finish.reason == "error":
            return _error_line(failure(finish, sequence.request.sent_name))
        lines = self._blocks.read(sequence, self._parser, self)
        return lines if finish is None else lines + self._line(self._shape(), **self._end()) + b"\n"

    def build_response(self) -> bytes:
        """The response of a finished sequence."""
        self._blocks.read(self._sequence, self._parser, self)
        blocks = self._blocks.blocks
        texts = {kind: "".join(block.text for block in blocks if block.kind == kind) for kind in ("text", "reasoning")}
        calls = [_call(block) for block in blocks if block.kind == "call"]
        return self._line(self._shape(texts["text"], texts["reasoning"], calls), **self._end())

    def write_delta(self, block: ContentBlock, piece: str) -> bytes:
        if block.kind == "call":
            return b""  # a call is sent when it is complete
        piece_of = self._shape(piece) if block.kind == "text" else self._shape(thinking=piece)
        return self._line(piece_of, done=False) + b"\n"

    def write_stop(self, block: ContentBlock) -> bytes:
        return self._line(self._shape(calls=[_call(block)]), done=False) + b"\n" if block.kind == "call" else b""

    def _line(self, piece: dict[str, Any], **fields: Any) -> bytes:
        return _encode({"model": self._model, "created_at": _now(), **piece, **fields})

    def _end(self) -> dict[str, Any]:
        """The fields of the last object. Durations are in nanoseconds."""
        sequence, finish = self._sequence, self._sequence.finish
        now, times = time.perf_counter(), self._sequence.times
        first = times.first or now
        durations = {
            "total_duration": now - self._state.created,
            "load_duration": 0.0,
            "prompt_eval_duration": first - self._state.created,
            "eval_duration": now - first,
        }
        return {
            "done": True,
            "done_reason": "length" if finish is not None and finish.reason == "length" else "stop",
            **{name: int(seconds * 1e9) for name, seconds in durations.items()},
            "prompt_eval_count": len(sequence.prompt),
            "eval_count": sequence.num_tokens,
        }


def _call(block: ContentBlock) -> dict[str, Any]:
    return {"id": block.call_id, "function": {"name": block.name, "arguments": block.arguments}}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@router.post("/api/embed", responses=responds_with(OllamaEmbeddings))
async def embed(body: EmbedBody, context: ContextDep, services: ServicesDep) -> Any:
    """Create embeddings, as Ollama."""
    max_length = None if body.truncate is False else -1
    request = EmbeddingRequest(
        model=served_name(body.model, services), input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=max_length
    )
    started = time.perf_counter()
    with sent_as({CUT_FIELD: "truncate: true"}):
        vectors, count = await compute_embeddings(context, services, request)
    duration = int((time.perf_counter() - started) * 1e9)
    rows = value_array(encode_vectors(vectors, None), vectors.size)
    reply = {"model": body.model, "embeddings": rows, "total_duration": duration, "load_duration": 0, "prompt_eval_count": count}
    return paced(reply, vectors.size)


@router.get("/api/tags", responses=responds_with(OllamaTags))
@router.get("/api/ps", responses=responds_with(OllamaTags))
async def tags(services: ServicesDep) -> Any:
    """List the served model."""
    return {"models": [_card(services)]}


@router.post("/api/show", dependencies=[SMALL_BODY], responses=responds_with(OllamaDescription))
async def show(body: ShowBody, context: ContextDep, services: ServicesDep) -> Any:
    """Describe the served model and its capabilities."""
    services.check_model(served_name(body.model or body.name, services), context.tenant)
    resolved, family = services.resolved, _family(services)
    can = {"completion": resolved.task == "generate", "embedding": resolved.task == "embed", "tools": services.tool_calls is not None,
           "thinking": services.reasoning is not None}  # fmt: skip
    template = services.tokenizer.describe().get("chat_template") if services.tokenizer is not None else None
    return {
        "modelfile": "",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "details": _card(services)["details"],
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": resolved.max_context,
            f"{family}.embedding_length": resolved.model.hidden_size,
        },
        "capabilities": [name for name, is_there in can.items() if is_there],
    }


@router.get("/api/version", responses=responds_with(Version))
async def version() -> Any:
    """The version of the server."""
    return {"version": package_version()}


def _family(services: Services) -> str:
    return str(services.resolved.model.config.get("model_type") or services.resolved.model.architecture)


def _card(services: Services) -> dict[str, Any]:
    name, family = services.resolved.served_name, _family(services)
    details = {"parent_model": "", "format": "safetensors", "family": family, "families": [family], "parameter_size": "",
               "quantization_level": services.resolved.dtype}  # fmt: skip
    modified = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(services.created))
    return {"name": name, "model": name, "modified_at": modified, "size": 0, "digest": "", "details": details}


OllamaRoutes = make_extension(__name__, router)

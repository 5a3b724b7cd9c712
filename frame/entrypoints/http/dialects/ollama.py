"""The Ollama API: `/api/chat`, `/api/generate`, `/api/embed`, `/api/embeddings`, and model
information.

A streamed response is one JSON object per line. Must not depend on the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NotRequired

import msgspec

from frame.entrypoints.engine_client.response_state import RequestState, SequenceState
from frame.entrypoints.http.chat.chat_request import make_output_parsers, start_chat
from frame.entrypoints.http.chat.output_parser import BlockEventWriter, ContentBlock, ContentBlocks, OutputParser
from frame.entrypoints.http.chat.request_media import TextWithMedia
from frame.entrypoints.http.dialects.ollama_requests import (
    ChatBody,
    EmbedBody,
    EmbeddingsBody,
    GenerateBody,
    ShowBody,
    served_name,
)
from frame.entrypoints.http.errors import ApiError, ErrorShape
from frame.entrypoints.http.failures import as_sent, failure, sent_as
from frame.entrypoints.http.native.pooling import CUT_FIELD, EmbeddingRequest, compute_embeddings, paced, value_array
from frame.entrypoints.http.native.vector_encoding import encode_vectors
from frame.entrypoints.http.openai.completions_schema import fill_in_middle
from frame.entrypoints.http.protocol.api_route import SMALL_BODY, Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import RequestPlan, start_request, stream_response, wait_complete
from frame.entrypoints.http.response_types import Version, array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.version import package_version

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
OllamaEmbedding = declare("OllamaEmbedding", embedding=list[float])
OllamaDetails = declare("OllamaDetails", "parent_model format family families parameter_size quantization_level")
OllamaCard = declare("OllamaCard", "name model modified_at size digest", details=OllamaDetails)
OllamaTags = declare("OllamaTags", models=array(OllamaCard))
OllamaDescription = declare("OllamaDescription", "modelfile parameters template model_info capabilities", details=OllamaDetails)
OllamaErrorResponse = declare("OllamaErrorResponse", "error", "The error body of the Ollama API.")


LINES = "application/x-ndjson"
_encode = msgspec.json.encode


def _error_body(error: ApiError) -> bytes:
    return _encode({"error": error.message})


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
    """Complete a prompt, with the chat template unless `raw` or `suffix` is set."""
    name = served_name(body.model, services)
    if not (body.prompt or body.suffix):
        services.check_model(name, context.tenant)
        return _loaded(body.model, response="")
    if body.raw or body.suffix:
        completion = body.to_completion_request(name)
        services.check_model(completion.model, context.tenant)
        try:
            params = completion.to_sampling_params(services.resolved.default_params)
        except ApiError as error:
            raise as_sent(error, completion.sent_name) from None
        if completion.max_tokens is None:  # OpenAI's default is 16, Ollama's the rest of the context
            params = msgspec.structs.replace(params, max_tokens=None)
        prompts: list[Any] = [TextWithMedia(body.prompt, media) if (media := body.media()) else body.prompt]
        if body.suffix:
            params, prompts = fill_in_middle(services.need_tokenizer(), body.suffix, params, prompts)
        plan = RequestPlan(prompts, [params], completion, add_special_tokens=completion.add_special_tokens)
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
    options, max_length = body.request_options(), None if body.truncate is False else -1
    request = EmbeddingRequest(
        model=served_name(body.model, services), input=body.input, dimensions=body.dimensions, truncate_prompt_tokens=max_length, **options
    )
    started = time.perf_counter()
    with sent_as({CUT_FIELD: "truncate: true"}):
        vectors, count = await compute_embeddings(context, services, request)
    duration = int((time.perf_counter() - started) * 1e9)
    rows = value_array(encode_vectors(vectors, None), vectors.size)
    reply = {"model": body.model, "embeddings": rows, "total_duration": duration, "load_duration": 0, "prompt_eval_count": count}
    return paced(reply, vectors.size)


@router.post("/api/embeddings", responses=responds_with(OllamaEmbedding))
async def embeddings(body: EmbeddingsBody, context: ContextDep, services: ServicesDep) -> Any:
    """Create the embedding of one text, by the older route of Ollama."""
    options = body.request_options()
    request = EmbeddingRequest(model=served_name(body.model, services), input=body.prompt, truncate_prompt_tokens=-1, **options)
    with sent_as({"the input": "prompt", "input": "prompt"}):
        vectors, _ = await compute_embeddings(context, services, request)
    return {"embedding": vectors[0].tolist()}


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
           "thinking": services.reasoning is not None, "vision": "image" in services.modalities}  # fmt: skip
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

"""Routes of vLLM: batched chat, rendered prompts, pooling, version, load, tokenizer configuration.
Must not depend on the engine."""

from __future__ import annotations

import uuid
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from pydantic import Field

from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.engine_client.limits import InvalidRequestError, check_prompt
from frame.entrypoints.http.chat.chat_request import render_chat, start_chats
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import as_api_error, as_sent
from frame.entrypoints.http.native.pooling import (
    EmbeddingRequest,
    PoolingReply,
    check_encoding,
    compute_classes,
    compute_embeddings,
    compute_token_vectors,
    list_reply,
    send_bytes,
    to_prompts,
    value_array,
)
from frame.entrypoints.http.native.vector_encoding import encode_vectors
from frame.entrypoints.http.openai.completion_objects import ChatCompletion
from frame.entrypoints.http.openai.completions import ChatResponse, prepare_completion
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest, GenerationRequest
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import check_request, countable_tokens, encode_prompt, paced_await, paced_map
from frame.entrypoints.http.response_types import Version, array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.version import package_version

router = ApiRouter(access=Access.USER)

MAX_CONVERSATIONS = 256  # of one request
TOKEN_TASKS = ("token_embed", "encode")
# Fields of a tokenizer's configuration that may be paths.
FILES = ("name_or_path", "tokenizer_file", "vocab_file", "special_tokens_map_file")

ServerLoad = declare("ServerLoad", "server_load")
PooledOutput = declare(
    "PooledOutput",
    "index",
    "`data`: numbers, or base64 of little-endian float32; with `task` `token_embed` one of these for each token.",
    object="pooling",
    data=list[float] | str | list[list[float]] | list[str],
)
PooledList = declare("PooledList", base=PoolingReply, data=array(PooledOutput))
RenderedRequest = declare(
    "RenderedRequest",
    "request_id model token_ids features sampling_params stream cache_salt priority",
    "A prompt and its sampling parameters, as vLLM's render routes return them.",
)


class ChatBatchRequest(ChatRequest):
    """A chat request with a list of conversations, with one choice each."""

    messages: Annotated[list[list[dict[str, Any]]], Field(max_length=MAX_CONVERSATIONS)]  # type: ignore[assignment]

    def first(self) -> ChatRequest:
        """The request for the first conversation. Raises ApiError 400."""
        if not self.messages:
            raise ApiError(400, "messages is empty; send at least one conversation", "messages")
        if self.stream:
            raise ApiError(400, "a batch of conversations is not streamed; leave stream out", "stream")
        if self.n not in (None, 1):
            raise ApiError(400, f"n is {self.n}; it must be 1 in a batch of conversations", "n")
        fields = {name: getattr(self, name) for name in ChatRequest.model_fields}
        return ChatRequest(**{**fields, "messages": self.messages[0]})


class PoolingRequest(EmbeddingRequest):
    """`task`: `token_embed`, or its older name `encode`, returns a vector for each token."""

    task: str | None = None

    @property
    def returns_tokens(self) -> bool:
        return self.task in TOKEN_TASKS


@router.post("/v1/chat/completions/batch", responses=responds_with(ChatCompletion))
async def chat_batch(batch: ChatBatchRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Create chat completions for a list of conversations: one choice for each, in order."""
    request = batch.first()
    state = await start_chats(context, services, request, batch.messages)
    return await ChatResponse(services, request, state).send(context)


@router.post("/v1/chat/completions/render", responses=responds_with(RenderedRequest))
async def render_chat_request(request: ChatRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Return the prompt and the sampling parameters of a chat request without running it."""
    ids, params = await render_chat(context, services, request)
    return _PromptRenderer(context, services, request, params).render(ids)


@router.post("/v1/completions/render", responses=responds_with(array(RenderedRequest)))
async def render_completion_request(request: CompletionRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Return the prompts and the sampling parameters of a completion request without running it."""
    params, prompts = prepare_completion(request, context, services)
    special = request.add_special_tokens
    maximum = countable_tokens(services) if request.truncates else None

    async def encode(one: str | list[int]) -> list[int]:
        return one if isinstance(one, list) else await encode_prompt(services, one, special, maximum)

    ids = await paced_await(map(encode, prompts))
    return await paced_map(_PromptRenderer(context, services, request, params).render, ids)


class _PromptRenderer:
    """Makes the response for each prompt of a request. Raises ApiError for what the request could
    not run with."""

    def __init__(self, context: RequestContext, services: Services, request: GenerationRequest, params: SamplingParams) -> None:
        _, priority = check_request(services, context, [params], request)
        self._limits, self._request, self._params = services.client.limits, request, params
        self._fields = {
            "model": services.response_model(request.model),
            "features": None,
            "sampling_params": msgspec.to_builtins(params),
            "stream": bool(request.stream),
            "cache_salt": request.cache_salt,
            "priority": priority,
        }

    def render(self, ids: list[int]) -> dict[str, Any]:
        try:
            ids = self._request.truncated(ids, self._limits.max_context - (self._params.max_tokens or 1))
            check_prompt(self._limits, ids, self._params)
        except (ApiError, InvalidRequestError) as error:
            raise as_sent(as_api_error(error), self._request.sent_name) from None
        return {"request_id": f"render-{uuid.uuid4().hex}", "token_ids": ids, **self._fields}


@router.post("/pooling", responses=responds_with(PooledList))
async def pooling(request: PoolingRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Return the raw output of a pooling model for texts."""
    if request.returns_tokens and services.resolved.task == "embed":
        return await _pool_tokens(request, context, services)
    if request.task not in (None, services.resolved.task):
        raise ApiError(400, f"task is {request.task!r}; this server's task is {services.resolved.task}", "task")
    if services.resolved.task == "classify":
        check_encoding(request)
        vectors, count = await compute_classes(context, services, request, to_prompts(request, services))
    else:
        vectors, count = await compute_embeddings(context, services, request)
    if request.is_bytes:
        return await send_bytes(context, services, request, vectors, count)
    encoded = enumerate(encode_vectors(vectors, request.encoding_format, request.embed_dtype))
    data = ({"index": index, "object": "pooling", "data": vector} for index, vector in encoded)
    return list_reply(services.response_model(request.model), f"pool-{uuid.uuid4().hex}", data, count, vectors.size)


async def _pool_tokens(request: PoolingRequest, context: RequestContext, services: Services) -> Any:
    if request.is_bytes:
        sentence = f"encoding_format {request.encoding_format} is not for task {request.task}, whose texts differ in length; use base64"
        raise ApiError(400, sentence, "encoding_format")
    if request.normalize is None and request.use_activation is None:
        request.use_activation = True  # as vLLM
    each, count = await compute_token_vectors(context, services, request, "pool-")
    num_values = sum(vectors.size for vectors in each)
    data = (
        {
            "index": index,
            "object": "pooling",
            "data": value_array(encode_vectors(vectors, request.encoding_format, request.embed_dtype), num_values),
        }
        for index, vectors in enumerate(each)
    )
    model, name = services.response_model(request.model), f"pool-{uuid.uuid4().hex}"
    return list_reply(model, name, data, count, num_values, is_nested=True)


@router.get("/version", responses=responds_with(Version))
async def version() -> Any:
    """The version of the server."""
    return {"version": package_version()}


@router.get("/load", responses=responds_with(ServerLoad))
async def load(services: ServicesDep) -> Any:
    """The number of running and waiting requests."""
    return {"server_load": services.client.num_outstanding}


@router.get("/tokenizer_info", responses=responds_with(dict[str, Any]))
async def tokenizer_info(services: ServicesDep) -> Any:
    """The tokenizer's configuration and chat template, without paths of the server."""
    settings = services.need_tokenizer().describe()
    for name in FILES:
        if isinstance(settings.get(name), str):
            settings[name] = PurePath(settings[name]).name
    return settings


VllmRoutes = make_extension(__name__, router)

"""Routes of vLLM: batched chat, rendered prompts, pooling, version, load, tokenizer configuration.
Must not depend on the engine."""

from __future__ import annotations

import uuid
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from pydantic import Field

from frame.entrypoints.engine_client.limits import InvalidRequestError, check_prompt
from frame.entrypoints.http.chat.chat_request import render_chat, start_chats
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.failures import as_api_error, as_sent
from frame.entrypoints.http.native.pooling import (
    EmbeddingRequest,
    PoolingReply,
    compute_embeddings,
    compute_vectors,
    encode_vectors,
    list_reply,
    to_prompts,
)
from frame.entrypoints.http.openai.completion_objects import ChatCompletion
from frame.entrypoints.http.openai.completions import ChatResponse, prepare_completion
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest, GenerationRequest
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep, ServicesDep, make_extension, responds_with
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.request_starter import check_request, countable_tokens, encode_prompt
from frame.entrypoints.http.response_types import Version, array, declare
from frame.entrypoints.http.services import Services
from frame.entrypoints.version import package_version

router = ApiRouter(access=Access.USER)

MAX_CONVERSATIONS = 256  # of one request
# Fields of a tokenizer's configuration that may be paths.
FILES = ("name_or_path", "tokenizer_file", "vocab_file", "special_tokens_map_file")

ServerLoad = declare("ServerLoad", "server_load")
PooledOutput = declare(
    "PooledOutput", "index", "`data`: numbers, or base64 of little-endian float32.", object="pooling", data=list[float] | str
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
    task: str | None = None


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
    return _rendered(context, services, request, ids, params)


@router.post("/v1/completions/render", responses=responds_with(array(RenderedRequest)))
async def render_completion_request(request: CompletionRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Return the prompts and the sampling parameters of a completion request without running it."""
    params, prompts = prepare_completion(request, context, services)
    special = request.add_special_tokens
    maximum = countable_tokens(services) if request.truncates else None
    ids = [one if isinstance(one, list) else await encode_prompt(services, one, special, maximum) for one in prompts]
    return [_rendered(context, services, request, one, params) for one in ids]


def _rendered(context: RequestContext, services: Services, request: GenerationRequest, ids: list[int], params: Any) -> dict[str, Any]:
    """The response for one prompt. Raises ApiError for what the request could not run with."""
    _, priority = check_request(services, context, [params], request)
    limits = services.client.limits
    try:
        ids = request.truncated(ids, limits.max_context - (params.max_tokens or 1))
        check_prompt(limits, ids, params)
    except (ApiError, InvalidRequestError) as error:
        raise as_sent(as_api_error(error), request.sent_name) from None
    return {
        "request_id": f"render-{uuid.uuid4().hex}",
        "model": services.response_model(request.model),
        "token_ids": ids,
        "features": None,
        "sampling_params": msgspec.to_builtins(params),
        "stream": bool(request.stream),
        "cache_salt": request.cache_salt,
        "priority": priority,
    }


@router.post("/pooling", responses=responds_with(PooledList))
async def pooling(request: PoolingRequest, context: ContextDep, services: ServicesDep) -> Any:
    """Return the raw output of a pooling model for texts."""
    if request.task not in (None, services.resolved.task):
        raise ApiError(400, f"task is {request.task!r}; this server's task is {services.resolved.task}", "task")
    if services.resolved.task == "classify":
        vectors, count = await compute_vectors(context, services, request, to_prompts(request, services), ("classify",))
    else:
        vectors, count = await compute_embeddings(context, services, request)
    encoded = enumerate(encode_vectors(vectors, request.encoding_format))
    data = ({"index": index, "object": "pooling", "data": vector} for index, vector in encoded)
    return list_reply(services.response_model(request.model), f"pool-{uuid.uuid4().hex}", data, count, vectors.size)


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

"""Routes that clients of vLLM call: batches of conversations, rendered prompts, pooled vectors, version, load, tokenizer configuration.

Each is a thin translation onto the chat and pooling paths. Knows no engine.
"""

from __future__ import annotations

import time
import uuid
from pathlib import PurePath
from typing import Annotated, Any

import msgspec

from frame.entrypoints.http.chat.chat_request import begin_chats, render_chat
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native.pooled import usage, vectors_of
from frame.entrypoints.http.openai.completions import ChatResponse
from frame.entrypoints.http.openai.completions_schema import ChatRequest, CompletionRequest
from frame.entrypoints.http.openai.embeddings import EmbeddingRequest, embedded, prompts_of, written
from frame.entrypoints.http.operations.metrics import package_version
from frame.entrypoints.http.request_context import Call
from frame.entrypoints.http.services import Access, Operation, Routes, Services, paced

MOST_CONVERSATIONS = 256  # of one request
FILES = ("name_or_path", "tokenizer_file", "vocab_file", "special_tokens_map_file")  # of a tokenizer's configuration: may be paths


class ChatBatchRequest(ChatRequest, kw_only=True):
    """A chat request whose `messages` are a list of conversations. Not streamed, and one choice for each."""

    messages: Annotated[list[list[dict[str, Any]]], msgspec.Meta(max_length=MOST_CONVERSATIONS)]  # type: ignore[assignment]

    def first(self) -> ChatRequest:
        """The request for the first conversation alone; the others differ from it in nothing but the messages. Raises ApiError."""
        if not self.messages:
            raise ApiError(400, "messages is empty; send at least one conversation", "messages")
        if self.stream:
            raise ApiError(400, "a batch of conversations is not streamed; leave stream out", "stream")
        if self.n not in (None, 1):
            raise ApiError(400, f"n is {self.n}; it must be 1 in a batch of conversations", "n")
        fields = {name: getattr(self, name) for name in ChatRequest.__struct_fields__}
        return ChatRequest(**{**fields, "messages": self.messages[0]})


class PoolingRequest(EmbeddingRequest, kw_only=True):
    task: str | None = None


_chat_decoder = msgspec.json.Decoder(ChatRequest)
_chat_batch_decoder = msgspec.json.Decoder(ChatBatchRequest)
_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_pooling_decoder = msgspec.json.Decoder(PoolingRequest)


async def chat_batch(call: Call, services: Services) -> None:
    """Chat answers for a list of conversations: one choice for each, in their order."""
    batch = await call.json(_chat_batch_decoder)
    request = batch.first()
    answer = await begin_chats(call, services, request, batch.messages)
    try:
        await ChatResponse(services, request, answer).send(call)
    finally:
        services.client.abandon(answer)


async def render_chat_request(call: Call, services: Services) -> None:
    """The prompt and the sampling parameters of a chat request, which is not run."""
    request = await call.json(_chat_decoder)
    ids, params = await render_chat(services, request)
    await call.respond_json(_rendered(services, request, ids, params))


async def render_completion_request(call: Call, services: Services) -> None:
    """The same of a text completion, for each of its prompts."""
    request = await call.json(_completion_decoder)
    services.check_model(request.model)
    params, prompts = request.params(), request.prompts()
    services.check_count(len(prompts), "prompt")
    special = request.add_special_tokens
    ids = [one if isinstance(one, list) else await services.encode(one, special) async for one in paced(prompts)]
    await call.respond_json([_rendered(services, request, one, params) for one in ids])


def _rendered(services: Services, request: ChatRequest | CompletionRequest, ids: list[int], params: Any) -> dict[str, Any]:
    return {
        "request_id": f"render-{uuid.uuid4().hex}",
        "model": services.resolved.served_name,
        "token_ids": ids,
        "features": None,
        "sampling_params": msgspec.to_builtins(params),
        "stream": bool(request.stream),
        "cache_salt": request.cache_salt,
        "priority": request.rank(),
    }


async def pooling(call: Call, services: Services) -> None:
    """What a model that embeds or classifies makes of texts, as it is."""
    request = await call.json(_pooling_decoder)
    if request.task not in (None, services.resolved.task):
        raise ApiError(400, f"task is {request.task!r}; this server's model is served to {services.resolved.task}", "task")
    if services.resolved.task == "classify":
        vectors, count = await vectors_of(call, services, request, prompts_of(request, services), ("classify",))
    else:
        vectors, count = await embedded(call, services, request)
    await call.respond_json(
        {
            "id": f"pool-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": services.resolved.served_name,
            "data": [
                {"index": index, "object": "pooling", "data": vector}
                for index, vector in enumerate(written(vectors, request.encoding_format))
            ],
            "usage": usage(count),
        }
    )


async def version(call: Call, services: Services) -> None:
    """The version of the server."""
    await call.respond_json({"version": package_version()})


async def load(call: Call, services: Services) -> None:
    """How many requests are running or waiting."""
    await call.respond_json({"server_load": services.client.num_outstanding})


async def tokenizer_info(call: Call, services: Services) -> None:
    """The tokenizer's configuration with its chat template, without the server's folders."""
    found = services.need_tokenizer().describe()
    for name in FILES:
        if isinstance(found.get(name), str):
            found[name] = PurePath(found[name]).name
    await call.respond_json(found)


ROUTES: Routes = (
    Operation("/v1/chat/completions/batch", ("POST",), Access.USER, chat_batch, ChatBatchRequest),
    Operation("/v1/chat/completions/render", ("POST",), Access.USER, render_chat_request, ChatRequest),
    Operation("/v1/completions/render", ("POST",), Access.USER, render_completion_request, CompletionRequest),
    Operation("/pooling", ("POST",), Access.USER, pooling, PoolingRequest),
    Operation("/version", ("GET",), Access.USER, version),
    Operation("/load", ("GET",), Access.USER, load),
    Operation("/tokenizer_info", ("GET",), Access.USER, tokenizer_info),
)

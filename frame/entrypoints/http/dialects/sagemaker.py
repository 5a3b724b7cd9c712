"""`/ping` and `/invocations`, the two routes of a SageMaker container. A body goes to the route whose fields it has. Knows no engine."""

from __future__ import annotations

import msgspec

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native import classes, relevance
from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.openai import completions as openai
from frame.entrypoints.http.openai import embeddings
from frame.entrypoints.http.request_context import Call
from frame.entrypoints.http.services import Access, Handler, Operation, Routes, Services

# fields that tell a body's route -> its handler; the first that are there
HANDLERS: tuple[tuple[tuple[str, ...], Handler], ...] = (
    (("messages",), openai.chat_completions),
    (("prompt",), openai.completions),
    (("query", "documents"), relevance.rerank),
    (("text_1", "text_2"), relevance.score),
    (("queries", "items"), relevance.score),
    (("text",), native.generate),
    (("input_ids",), native.generate),
)
_keys_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def invocations(call: Call, services: Services) -> None:
    """Any request for the model: chat, completion, embedding, reranking, scoring, classifying or generating."""
    data = await call.body()
    call.unread(data)
    found = await call.json(_keys_decoder)
    call.unread(data)
    await _handler(found, services)(call, services)


def _handler(found: dict[str, msgspec.Raw], services: Services) -> Handler:
    if "input" in found:
        return classes.classify if services.resolved.task == "classify" else embeddings.embeddings
    for names, handler in HANDLERS:
        if all(name in found for name in names):
            return handler
    raise ApiError(400, "the body has the fields of no route; send messages, prompt, input, text, or query and documents")


ROUTES: Routes = (
    Operation("/ping", ("GET", "POST"), Access.OPEN, native.ready),
    Operation("/invocations", ("POST",), Access.USER, invocations),
)

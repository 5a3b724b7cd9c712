"""RequestOptions: the bodies of all routes that run the model have the same four fields, and a
priority comes of each."""

from __future__ import annotations

from typing import Any

import pytest

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native.tokenizing import DetokenizeRequest, TokenizeRequest
from frame.entrypoints.http.openai.completions_schema import CompletionRequest
from frame.entrypoints.http.request_body import RequestOptions, parse_body
from tests.entrypoints.inprocess import serving
from tests.entrypoints.published import ROUTES

RUNNING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/score",
           "/v1/classify", "/v1/moderations", "/generate", "/api/chat", "/api/generate", "/api/embed", "/api/embeddings")  # fmt: skip


BODIES = {route.path: route.body_model for route in ROUTES if route.path in RUNNING}


@pytest.mark.parametrize("path", RUNNING)
def test_every_body_that_runs_the_model_has_them(path: str) -> None:
    request = BODIES[path]
    assert request is not None
    assert issubclass(request, RequestOptions)


def test_bodies_that_run_nothing_have_none() -> None:
    assert not any(issubclass(each, RequestOptions) for each in (TokenizeRequest, DetokenizeRequest))


def test_priority() -> None:
    assert (RequestOptions().resolve_priority(), RequestOptions(priority=-3).resolve_priority()) == (0, -3)
    assert CompletionRequest(prompt="x", service_tier="flex").resolve_priority() == -1
    assert CompletionRequest(prompt="x", service_tier="flex", priority=4).resolve_priority() == 4
    with pytest.raises(ApiError, match="service_tier is 'gold'"):
        parse_body(CompletionRequest, {"prompt": "x", "service_tier": "gold"})


OLLAMA: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"prompt": "hi"},
    "/api/generate ": {"prompt": "hi", "raw": True},
}


@pytest.mark.parametrize("path", OLLAMA)
async def test_ollamas_routes_take_the_extensions_of_chat(path: str) -> None:
    body = {"model": "frame-tiny", "stream": False, **OLLAMA[path]}
    more = {"seed": 5, "priority": 3, "timeout": 9.0, "cache_salt": "x", "regex": "[a-c]+", "top_k": 4}
    async with serving() as server:
        reply = await server.post(path.strip(), {**body, **more, "options": {"num_predict": 2, "seed": 5, "min_p": 0.5}})
        assert reply.status == 200, reply.body
        sent = server.sent[-1]
        assert (sent.params.seed, sent.params.top_k, sent.params.min_p, sent.params.regex) == (5, 4, 0.5, "[a-c]+")
        assert (sent.priority, sent.deadline, sent.namespace) == (3, 9.0, ":x")


@pytest.mark.parametrize("path", OLLAMA)
async def test_ollamas_errors_name_what_was_sent(path: str) -> None:
    body = {"model": "frame-tiny", "stream": False, **OLLAMA[path]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0}, "temperature is not a field of this route; send options.temperature"),
        ({"max_tokens": 3}, "max_tokens is not a field of this route; send options.num_predict"),
        ({"stop": ["a"]}, "stop is not a field of this route; send options.stop"),
        ({"top_p": 0.5}, "top_p is not a field of this route; send options.top_p"),
        ({"seed": 5, "options": {"seed": 6}}, "options.seed and seed are the same; send one of them"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be"),
        ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty is 0.0; it must be"),
        ({"options": {"repeat_penalty": "x"}}, "options.repeat_penalty is a string; send a number"),
        ({"top_k": "x"}, "top_k is a string; send a whole number"),
        ({"options": {"num_predict": 0}}, "options.num_predict is 0"),
        ({"format": "json", "regex": "a"}, "format and regex exclude each other; keep one"),
    ]
    async with serving() as server:
        for change, sentence in cases:
            reply = await server.post(path.strip(), body | change)
            assert reply.status == 400, change
            assert reply.json()["error"].startswith(sentence), (change, reply.body)
        for empty in ({"temperature": None}, {"stop": []}, {"top_p": False}):
            reply = await server.post(path.strip(), body | empty | {"options": {"num_predict": 1}})
            assert reply.status == 200, reply.body

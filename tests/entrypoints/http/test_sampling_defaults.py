"""`sampling.defaults` holds for each protocol; what a request sends comes first."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.entrypoints.grpc.test_service import connected
from tests.entrypoints.inprocess import serving

DEFAULTS = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.25, "presence_penalty": 0.5}
SETTINGS = {"sampling": {"defaults": DEFAULTS}}
HI = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 2},
    "/v1/chat/completions": {**HI, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "frame-tiny", **HI, "max_tokens": 2},
    "/generate": {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}},
    "/api/chat": {"model": "frame-tiny", "stream": False, **HI, "options": {"num_predict": 2}},
    "/api/generate": {"model": "frame-tiny", "stream": False, "prompt": "hi", "raw": True, "options": {"num_predict": 2}},
    "/v2/chat": {"model": "frame-tiny", **HI, "max_tokens": 2},
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_without_parameters_has_the_defaults(path: str) -> None:
    async with serving(SETTINGS) as server:
        reply = await server.post(path, BODIES[path])
        assert reply.status == 200, reply.body
        params = server.sent[-1].params
        assert {name: getattr(params, name) for name in DEFAULTS} == DEFAULTS
        assert params.max_tokens == 2
        if path == "/v1/responses":
            assert (reply.json()["temperature"], reply.json()["top_p"]) == (0.5, 0.9)
    async with serving() as server:
        assert (await server.post(path, BODIES[path])).status == 200
        assert (server.sent[-1].params.temperature, server.sent[-1].params.top_k) == (1.0, -1)


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/v1/completions", {"temperature": 1.0, "top_k": 0, "top_p": None}),
        ("/v1/chat/completions", {"temperature": 1, "top_k": -1}),
        ("/v1/responses", {"temperature": 1, "top_k": -1}),
        ("/v1/messages", {"temperature": 1, "top_k": -1}),
        ("/generate", {"sampling_params": {"max_new_tokens": 2, "temperature": 1, "top_k": -1, "top_p": None}}),
        ("/api/chat", {"options": {"num_predict": 2, "temperature": 1, "top_k": -1}}),
    ],
)
async def test_what_is_sent_comes_first(path: str, sent: dict[str, Any]) -> None:
    """Values equal to those of a server without defaults too; null leaves a parameter out."""
    async with serving(SETTINGS) as server:
        reply = await server.post(path, {**BODIES[path], **sent})
        assert reply.status == 200, reply.body
        params = server.sent[-1].params
        assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, -1, 0.9, 0.1)


async def test_grpc() -> None:
    async with connected(SETTINGS) as (server, client):
        ids = {"ids": [5, 6, 7]}
        _ = [r async for r in client.call("Generate", {"token_ids": ids, "sampling_params": {"max_tokens": 2, "temperature": 1.0}})]
        params = server.sent[-1].params
        assert (params.temperature, params.top_k, params.repetition_penalty) == (1.0, 7, 1.25)


async def test_handoffs_between_servers_with_other_defaults_are_refused() -> None:
    from frame.entrypoints.http.protocol.continuation import identify

    async with serving(SETTINGS) as server:
        mine = server.services.resolved
        other = mine.model_copy(update={"sampling_defaults": {}})
        same = mine.model_copy(update={"model": dataclasses.replace(mine.model)})
        assert identify(mine) == identify(same) != identify(other)

"""The size of a request is checked before memory is allocated for it, and one key cannot fill the
queue.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.openai.completions_schema import MAX_ARGUMENT_PARTS
from frame.entrypoints.http.protocol.bodies import MIN_BODY, SMALL_BODY, TOKEN_BYTES, prompt_limit, value_limit
from frame.entrypoints.http.request_starter import COUNTED_TOKENS, MAX_TOOL_BYTES
from tests.entrypoints.inprocess import serving

SAMPLING = {"max_new_tokens": 1}
HI = [{"role": "user", "content": "hi"}]


async def test_prompts_are_counted_before_parameters_are_created(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = native._params
    monkeypatch.setattr(native, "_params", lambda *arguments: made.append(arguments) or make(*arguments))
    async with serving({"server": {"max_sequences_per_request": 64}}) as server:
        reply = await server.post("/generate", {"text": [""] * 65, "sampling_params": [SAMPLING] * 65})
        assert (reply.status, reply.json()["error"]["param"], made) == (400, "text", [])
        assert "65 sequences" in reply.json()["error"]["message"]
        assert (await server.post("/generate", {"input_ids": [[5]] * 64, "sampling_params": SAMPLING})).status == 200
        assert len(made) == 1  # shared by all prompts


@pytest.mark.parametrize(("body", "param"), [
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": [[5]] * 65}, "prompt"),
    ({"prompt": ["a"] * 33, "n": 2}, "n"),
    ({"prompt": "a", "n": 65}, "n"),
])  # fmt: skip
async def test_sequences_of_one_request_are_bounded(body: dict[str, Any], param: str) -> None:
    async with serving({"server": {"max_sequences_per_request": 64}}) as server:
        reply = await server.post("/v1/completions", {"max_tokens": 1, **body})
        assert (reply.status, reply.json()["error"]["param"]) == (400, param), reply.body
        assert (await server.post("/v1/completions", {"max_tokens": 1, "prompt": ["a"] * 32, "n": 2})).status == 200


async def test_one_key_cannot_fill_the_queue(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    async with serving({"server": {"api_keys": str(keys)}, "scheduler": {"max_running_requests": 4, "max_queued_requests": 12}}) as server:
        long = {"prompt": [[5]] * 8, "max_tokens": 400, "ignore_eos": True}
        first = asyncio.create_task(server.post("/v1/completions", long, x_api_key="one"))
        async with asyncio.timeout(10):
            # No event signals it
            while server.services.client.num_outstanding < 8:  # noqa: ASYNC110
                await asyncio.sleep(0)
        refused = await server.post("/v1/completions", {"prompt": [5], "max_tokens": 1}, x_api_key="one")
        assert (refused.status, refused.json()["error"]["code"]) == (429, "too_many_requests_of_key")
        assert (await server.post("/v1/completions", {"prompt": [[5]] * 4, "max_tokens": 1}, x_api_key="two")).status == 200
        assert (await first).status == 200
        assert (await server.post("/v1/completions", {"prompt": [[5]] * 9}, x_api_key="two")).status == 400


def test_limits_follow_the_context() -> None:
    assert prompt_limit(512) == MIN_BODY
    assert prompt_limit(2**20) == TOKEN_BYTES * 2**20
    assert value_limit(2**20) == 2**21  # twice the ids of a full context


async def test_bodies_without_prompts_have_a_small_limit() -> None:
    async with serving() as server:
        big = b'{"rid": "' + b"x" * SMALL_BODY + b'"}'
        assert (await server.request("POST", "/abort_request", big)).status == 413
        assert (await server.request("POST", "/v1/completions", b'{"prompt": "' + b"x" * MIN_BODY + b'"}')).status == 413


async def test_long_texts_are_refused_by_every_route_that_tokenizes() -> None:
    text, tools = "x" * (8 * COUNTED_TOKENS), [{"type": "function", "function": {"name": "f", "description": "x" * MAX_TOOL_BYTES}}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * MAX_ARGUMENT_PARTS + "1]"}}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": ["a", text]}, "prompt"),
        ("/generate", {"text": text}, "text"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/v1/chat/completions", {"messages": HI, "tools": tools}, "tools"),
        ("/v1/chat/completions", {"messages": [*HI, {"role": "assistant", "tool_calls": [call]}]}, "messages"),
        ("/v1/responses", {"input": text}, "input"),
        ("/tokenize", {"text": text}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/tokenize", {"messages": HI, "tools": tools}, "tools"),
        ("/detokenize", {"tokens": [5] * (COUNTED_TOKENS + 1)}, "tokens"),
    ]
    async with serving() as server:
        for path, body, param in cases:
            reply = await server.post(path, body)
            assert (reply.status, reply.json()["error"]["param"]) == (400, param), (path, reply.body[:300])
        assert (await server.post("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 1})).status == 400
        assert (await server.post("/tokenize", {"text": "hello world " * 20_000})).json()["count"] > 512

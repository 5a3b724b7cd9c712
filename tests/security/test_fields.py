"""Every field has a limit, and no response contains a folder of the server."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.interfaces import sampling_params as limits
from frame.entrypoints.http.protocol.bodies import MAX_MESSAGES
from frame.entrypoints.http.request_starter import MAX_NAME_CHARS, MAX_TOOLS
from tests.entrypoints.inprocess import serving

MESSAGES = [{"role": "user", "content": "x"}]
LONG = "x" * 300_000
TOOL = {"type": "function", "function": {"name": "f"}}

TOO_MUCH: list[tuple[str, dict[str, Any]]] = [
    ("n", {"n": 10**9}),
    ("n", {"n": 0}),
    ("max_tokens", {"max_tokens": 10**15}),
    ("logprobs", {"logprobs": True, "top_logprobs": 10**6}),
    ("stop", {"stop": ["a"] * (limits.MAX_STOP + 1)}),
    ("stop", {"stop": "a" * (limits.MAX_STOP_CHARS + 1)}),
    ("stop_token_ids", {"stop_token_ids": [5] * (limits.MAX_STOP_IDS + 1)}),
    ("bad_words", {"bad_words": ["a"] * (limits.MAX_BAD_WORDS + 1)}),
    ("bad_words", {"bad_words": ["a" * (limits.MAX_BAD_WORD_CHARS + 1)]}),
    ("logit_bias", {"logit_bias": {str(i): 1.0 for i in range(limits.MAX_BIASES + 1)}}),
    ("logit_bias", {"logit_bias": {"9" * 10_000: 1.0}}),
    ("custom", {"custom": {str(i): "x" for i in range(limits.MAX_CUSTOM + 1)}}),
    ("custom", {"custom": {"x": LONG}}),
    ("regex", {"regex": LONG}),
    ("ebnf", {"ebnf": LONG}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"description": LONG}}}}),
    ("rid", {"rid": "x" * (MAX_NAME_CHARS + 1)}),
    ("cache_salt", {"cache_salt": "x" * (MAX_NAME_CHARS + 1)}),
    ("messages", {"messages": MESSAGES * (MAX_MESSAGES + 1)}),
    ("tools", {"tools": [TOOL] * (MAX_TOOLS + 1)}),
    ("timeout", {"timeout": 0}),
    ("priority", {"priority": 2**40}),
    ("temperature", {"temperature": 1e308}),
    ("seed", {"seed": 2**70}),
]


@pytest.mark.parametrize(("name", "change"), TOO_MUCH, ids=[f"{name}-{i}" for i, (name, _) in enumerate(TOO_MUCH)])
async def test_fields_have_limits(name: str, change: dict[str, Any]) -> None:
    async with serving() as server:
        reply = await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **change})
        assert reply.status == 400, reply.body[:300]
        message = reply.json()["error"]["message"]
        assert name in message
        assert len(message) < 500  # the value is not repeated
        assert (await server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})).status == 200


async def test_timeout_header_ends_a_request() -> None:
    async with serving() as server:
        body = {"messages": MESSAGES, "max_tokens": 1}
        for wrong in ("soon", "nan", "inf", "-1", "0", "1_0"):
            reply = await server.post("/v1/chat/completions", body, x_request_timeout=wrong)
            assert (reply.status, "x-request-timeout" in reply.json()["error"]["message"]) == (400, True)
        assert (await server.post("/v1/chat/completions", body, x_request_timeout="30")).status == 200
        late = {**body, "max_tokens": 400, "ignore_eos": True, "timeout": 1e-9}
        reply = await server.post("/v1/chat/completions", late)
        assert (reply.status, reply.json()["error"]["code"]) == (504, "deadline_exceeded")

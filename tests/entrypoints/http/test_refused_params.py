"""Requests with a parameter whose logits processor the server does not use."""

from __future__ import annotations

from typing import Any

import pytest

from frame.config.selection import ResolveError
from tests.entrypoints.inprocess import serving

PENALTIES, BAD_WORDS = ("logits_processor/penalties", "logits_processor/bad-words")
SETTINGS = {"sampling": {"processors": ["builtin"]}, "plugins": {"deny": [PENALTIES, BAD_WORDS]}}
PROMPT = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
DENIED = "leave it out, or change the server: plugins.deny excludes it (try plugins.deny: [{}])"

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/completions", {**PROMPT, "frequency_penalty": 0.5}, "frequency_penalty", "penalties"),
    ("/v1/chat/completions", {**CHAT, "presence_penalty": -1}, "presence_penalty", "penalties"),
    ("/v1/chat/completions", {**CHAT, "repetition_penalty": 1.1}, "repetition_penalty", "penalties"),
    ("/v1/completions", {**PROMPT, "bad_words": ["a"]}, "bad_words", "bad-words"),
    ("/generate", {"input_ids": [5, 6], "sampling_params": {"frequency_penalty": 0.5}}, "sampling_params.frequency_penalty", "penalties"),
]


async def test_a_parameter_of_a_denied_processor_is_refused_with_its_name_and_the_remedy() -> None:
    async with serving(SETTINGS) as server:
        for path, body, param, name in REFUSED:
            reply = await server.post(path, body)
            error = reply.json()["error"]
            other = BAD_WORDS if name == "penalties" else PENALTIES
            assert (reply.status, error["param"]) == (400, param)
            assert error["message"] == f"{param} needs the logits processor {name}, which this server does not use; {DENIED.format(other)}"
        custom = await server.post("/v1/completions", {**PROMPT, "custom": {"shout": "1"}})
        assert custom.status == 400
        assert custom.json()["error"]["message"].startswith("custom holds 'shout', which no logits processor of this server reads")
        served = {**PROMPT, "logit_bias": {"3": 1.0}, "min_tokens": 2, "frequency_penalty": 0, "repetition_penalty": 1.0}
        assert (await server.post("/v1/completions", served)).status == 200


async def test_a_list_without_a_processor_refuses_its_parameter() -> None:
    async with serving({"sampling": {"processors": ["min-tokens"]}}) as server:
        reply = await server.post("/v1/completions", {**PROMPT, "logit_bias": {"3": 1.0}})
        assert reply.json()["error"]["message"] == (
            "logit_bias needs the logits processor logit-bias, which this server does not use; leave it out, or change the server: "
            "add logit-bias to sampling.processors"
        )
        assert (await server.post("/v1/completions", {**PROMPT, "min_tokens": 2})).status == 200


async def test_a_denied_processor_that_is_named_stops_the_start() -> None:
    with pytest.raises(ResolveError, match="plugins.deny excludes it .try plugins.deny: ..."):
        async with serving({"sampling": {"processors": ["penalties"]}, "plugins": {"deny": [PENALTIES]}}):
            pass

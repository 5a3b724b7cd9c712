"""Requests of every kind over HTTP get the same answers with drafts as without, and usage counts
the drafted tokens. The engine's tokens are the fake runner's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from frame.core.interfaces.batch import SlotSetup
from frame.testing.drafters import ScriptedDrafter
from frame.testing.fake_runner import continuation
from tests.entrypoints.inprocess import serving

BASE: dict[str, Any] = {"model": "frame-tiny", "prompt": "Count to ten.", "max_tokens": 24, "temperature": 0.8, "seed": 3}
REQUESTS = {
    "plain": BASE,
    "n": {**BASE, "n": 3, "seed": 5},
    "stream": {**BASE, "stream": True, "stream_options": {"include_usage": True}},
    "logprobs": {**BASE, "logprobs": 2},
    "min_tokens": {**BASE, "min_tokens": 20, "temperature": 0},
}


async def ask(script: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers without what differs from run to run, and the usage of each."""
    async with serving() as served:
        if script is not None:
            served.engine.scheduler.speculation.enable(ScriptedDrafter(script), 4)
        texts: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        first = (await served.post("/v1/completions", BASE)).json()["choices"][0]["text"]
        for name, body in {**REQUESTS, "stop": {**BASE, "stop": [first[9:13]]}}.items():
            reply = await served.post("/v1/completions", body)
            assert reply.status == 200, reply.body
            events = [json.loads(line[6:]) for line in reply.body.decode().split("\n") if line.startswith("data: {")] or [reply.json()]
            choices = [choice for event in events for choice in event["choices"]]
            texts[name] = ["".join(c["text"] for c in choices), [c["finish_reason"] for c in choices][-1], choices[0].get("logprobs")]
            usage[name] = events[-1]["usage"]
        return texts, usage


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Any], dict[str, Any]]:
    return asyncio.run(ask(None))


@pytest.mark.parametrize("num_right", [2, 4])
def test_answers_do_not_depend_on_drafts(plain: Any, num_right: int) -> None:
    def script(setup: SlotSetup, tokens: Any, maximum: int) -> list[int]:
        draft = continuation(tokens, setup.params, setup.seed, 2048, maximum)
        return [token if i < num_right else (token + 1) % 2048 for i, token in enumerate(draft)]

    texts, usage = asyncio.run(ask(script))
    assert texts == plain[0]
    for name, found in usage.items():
        drafted = found.pop("completion_tokens_details")
        assert found == plain[1][name]
        assert drafted["accepted_prediction_tokens"] >= 2
        assert (drafted["rejected_prediction_tokens"] > 0) == (num_right == 2)


def test_request_says_how_many_tokens_are_drafted() -> None:
    def script(setup: SlotSetup, tokens: Any, maximum: int) -> list[int]:
        return continuation(tokens, setup.params, setup.seed, 2048, maximum)

    async def run() -> None:
        async with serving() as served:
            served.engine.scheduler.speculation.enable(ScriptedDrafter(script), 4)
            drafted = {}
            for maximum in (0, 1, None):
                reply = await served.post("/v1/completions", {**BASE, "num_speculative_tokens": maximum})
                drafted[maximum] = reply.json()["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0)
            assert drafted[0] == 0 < drafted[1] < drafted[None]
            values = {"max_new_tokens": 8, "num_speculative_tokens": 0}
            assert (await served.post("/generate", {"text": "a", "sampling_params": values})).status == 200
            refused = await served.post("/v1/completions", {**BASE, "num_speculative_tokens": 17})
            assert refused.status == 400
            assert refused.json()["error"]["message"] == "num_speculative_tokens is 17; it must be from 0 (no drafts) to 16"

    asyncio.run(run())

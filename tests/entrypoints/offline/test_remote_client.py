"""`frame.Client` against a real server: the offline engine's own tests run over it, and the two
give the same outputs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from frame import Client, Engine, SamplingParams
from frame.core.messages import TokenLogprobs
from frame.entrypoints.engine_client.limits import InvalidRequestError
from frame.entrypoints.offline.prompts import EngineError
from frame.entrypoints.offline.remote_format import decode_vectors, make_error, parse_line
from tests.entrypoints.offline.test_engine import (  # run here with the fixture below
    GREEDY,
    KEYS,
    test_arrays_are_token_ids,
    test_async_forms,
    test_cache_is_seen_and_flushed,
    test_forms_of_prompts,
    test_half_a_surrogate_pair_and_an_unknown_command_are_refused,
    test_logprobs,
    test_one_stop_string_needs_no_list,
    test_parameters_one_or_each,
    test_stop_strings_and_n,
    test_streaming_adds_up,
    test_what_is_no_prompt_is_refused,
    test_wrong_parameters_are_refused_by_name,
)
from tests.entrypoints.serving import RunningServer, wait_until

__all__ = [
    "test_arrays_are_token_ids", "test_async_forms", "test_cache_is_seen_and_flushed", "test_forms_of_prompts",
    "test_half_a_surrogate_pair_and_an_unknown_command_are_refused", "test_logprobs", "test_one_stop_string_needs_no_list",
    "test_parameters_one_or_each", "test_stop_strings_and_n", "test_streaming_adds_up", "test_what_is_no_prompt_is_refused",
    "test_wrong_parameters_are_refused_by_name",
]  # fmt: skip


@pytest.fixture
def engine(server: RunningServer) -> Iterator[Client]:
    with Client(server.url) as client:
        yield client


class Near:
    """Numbers but for their last digits, which the shapes of batches move."""

    def __init__(self, numbers: list[float | None]) -> None:
        self.numbers = np.array([0.0 if number is None else number for number in numbers])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and np.allclose(self.numbers, other.numbers, atol=1e-4)

    __hash__ = None  # type: ignore[assignment]


def plain(value: Any) -> Any:
    if not isinstance(value, TokenLogprobs):
        return value
    return value.token_ids, Near(value.logprobs), [[token for token, _ in top] for top in value.top]


def test_outputs_equal_the_offline_engines(engine: Client, checkpoint: Path) -> None:
    prompts = ["The quick", [5, 6, 7], [{"role": "user", "content": "hi"}]]
    params = [
        SamplingParams(max_tokens=9, temperature=0.8, seed=3, n=2, logprobs=2, prompt_logprobs=1),
        {"max_tokens": 6, "temperature": 0.0},
        {"max_tokens": 8, "seed": 11, "frequency_penalty": 0.5, "stop": ["zq"], "logit_bias": {7: 2.0}},
    ]
    with Engine(model=str(checkpoint), **KEYS) as offline:
        wanted, found = (one.generate(prompts, params) for one in (offline, engine))
    for ours, theirs in zip(wanted, found, strict=True):
        assert len(ours.outputs) == len(theirs.outputs)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            for name in ("text", "token_ids", "finish_reason", "matched", "prompt_tokens", "logprobs", "prompt_logprobs"):
                assert plain(getattr(one, name)) == plain(getattr(other, name)), name


def test_no_limit_means_the_contexts_end(engine: Client) -> None:
    output = engine.generate([5] * 490, SamplingParams(ignore_eos=True))
    assert len(output.token_ids) == 512 - 490


def test_leaving_early_stops_the_work(engine: Client) -> None:
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    for _ in engine.stream("The quick", endless):
        break

    async def cancelled() -> None:
        task = asyncio.create_task(engine.agenerate("The quick", endless))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.aclose()

    asyncio.run(cancelled())
    with Client(engine._settings["base_url"]) as other:
        wait_until(lambda: other.info["running"] == 0 == other.info["outstanding"])
    with pytest.raises(EngineError, match="closed"):
        engine.generate("x")


def test_errors_are_those_of_the_engine(engine: Client) -> None:
    with pytest.raises(InvalidRequestError, match="not to embed"):
        engine.embed("text")
    for stream in (engine.stream("x", {"max_tokens": 10_000}),):
        with pytest.raises(InvalidRequestError, match="max_tokens"):
            next(stream)
    assert list(engine.stream([])) == []
    with pytest.raises(EngineError, match="is it running there"):
        Client("http://127.0.0.1:9").generate("x")
    assert isinstance(make_error(None, 502), EngineError)
    assert isinstance(make_error({"error": {"type": "overloaded_error", "message": "full"}}, 503), EngineError)
    assert parse_line(": ping") is parse_line("data: [DONE]") is None


def test_vectors_in_base64() -> None:
    assert decode_vectors([]).shape == (0, 0)
    row = {"embedding": "AACAPwAAAEA="}
    np.testing.assert_array_equal(decode_vectors([row, row]), [[1, 2], [1, 2]])


def test_a_key_goes_along(checkpoint: Path) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        return httpx.Response(200, json={"success": True})

    client = Client("http://x/v1", api_key="secret")
    client._http = httpx.Client(transport=httpx.MockTransport(reply), base_url="http://x", headers=client._http.headers)
    client.flush_cache()
    assert client.control("start_profile", num_steps=3) == {"success": True}
    assert GREEDY.max_tokens == 10

"""`kv_transfer_params` of requests and responses, over an engine with a fake model and no tiers:
what a prefill server returns, and how a decode server continues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from frame.config.schema import DisaggregationSection
from frame.core.interfaces.kv_tier import KVTransfer
from frame.host.authenticated_link import KEY_VARIABLE
from tests.entrypoints.inprocess import InProcess, serving

PROMPT = [5 + number % 50 for number in range(70)]  # four pages and a part
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 1, "return_token_ids": True, "ignore_eos": True}
BEGIN: dict[str, Any] = {**BODY, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "remote_host": None}}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * 32)


@asynccontextmanager
async def disaggregated(mode: str | None, **sections: Any) -> AsyncIterator[InProcess]:
    """A server of this mode. The engine has no tier, which CI may lack the library for."""
    async with serving(sections) as server:
        resolved = server.services.resolved
        section = DisaggregationSection.model_validate({"mode": mode, "host": "192.0.2.7", "port": 5601})
        cache = resolved.user.cache.model_copy(update={"min_load_tokens": 32})
        user = resolved.user.model_copy(update={"disaggregation": section, "cache": cache})
        server.services.resolved = resolved.model_copy(update={"user": user})
        yield server


async def begin(body: dict[str, Any] = BEGIN, path: str = "/v1/completions") -> Any:
    """What a prefill server returns for a decode server."""
    async with disaggregated("prefill") as server:
        reply = await server.post(path, body)
        assert reply.status == 200, reply.body
        return reply.json().get("kv_transfer_params")


async def test_a_prefill_server_returns_where_the_blocks_are() -> None:
    async with disaggregated("prefill") as server:
        reply = (await server.post("/v1/completions", {**BEGIN, "seed": 3})).json()
        (message,) = server.sent
    params = reply["kv_transfer_params"]
    assert message.transfer == KVTransfer(params["remote_request_id"], num_blocks=4)
    shown = {name: params[name] for name in ("do_remote_decode", "do_remote_prefill", "remote_block_ids", "remote_host", "remote_port")}
    expected = {"do_remote_decode": False, "do_remote_prefill": True, "remote_block_ids": [0, 1, 2, 3]}
    assert shown == {**expected, "remote_host": "192.0.2.7", "remote_port": 5601}
    assert params["first_token_ids"] == reply["choices"][0]["token_ids"]
    assert (params["seed"], params["cached_tokens"], params["weight_version"]) == (3, 0, "default")
    assert len(params["signature"]) == 64


async def test_a_decode_server_continues_with_the_first_token() -> None:
    async with disaggregated(None) as server:
        expected = (await server.post("/v1/completions", {**BODY, "seed": 3})).json()
    params = await begin({**BEGIN, "seed": 3})
    for stream in (False, True):
        async with disaggregated("decode") as server:
            reply = await server.post("/v1/completions", {**BODY, "seed": 3, "stream": stream, "kv_transfer_params": params})
            assert reply.status == 200, reply.body
            (message,) = server.sent
            if not stream:
                actual = reply.json()
                assert actual["choices"] == expected["choices"]
                assert actual["usage"] == expected["usage"]
                assert "kv_transfer_params" not in actual
        assert message.transfer == KVTransfer(params["remote_request_id"], "192.0.2.7", 5601, 4)
        assert (message.output_len, message.token_ids, message.params.seed) == (1, PROMPT + params["first_token_ids"], 3)


async def test_the_seed_is_that_of_the_prefill_server() -> None:
    params = await begin()
    async with disaggregated("decode") as server:
        await server.post("/v1/completions", {**BODY, "kv_transfer_params": params})
        assert server.sent[0].params.seed == params["seed"]


async def test_cached_tokens_are_those_of_the_prefill_server() -> None:
    async with disaggregated("prefill") as server:
        for _ in range(2):
            params = (await server.post("/v1/completions", BEGIN)).json()["kv_transfer_params"]
    assert params["cached_tokens"] == 64
    for changes in ({}, {"logprobs": 1}):
        async with disaggregated("decode") as server:
            reply = (await server.post("/v1/completions", {**BODY, **changes, "kv_transfer_params": params})).json()
            assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_log_probabilities_of_the_first_token_are_computed_again() -> None:
    params = await begin()
    async with disaggregated("decode") as server:
        reply = (await server.post("/v1/completions", {**BODY, "logprobs": 1, "kv_transfer_params": params})).json()
        assert server.sent[0].output_len == 0
    assert len(reply["choices"][0]["logprobs"]["tokens"]) == 6
    assert reply["choices"][0]["token_ids"][:1] == params["first_token_ids"]


@pytest.mark.parametrize("changes", [{"regex": "[0-9]{6}"}, {"logit_bias": {"7": 100}}], ids=["grammar", "bias"])
async def test_what_limits_tokens_limits_the_first_one(changes: dict[str, Any]) -> None:
    """Also where the prefill server was not told."""
    params = await begin()
    async with disaggregated("decode") as server:
        reply = await server.post("/v1/completions", {**BODY, **changes, "kv_transfer_params": params})
        assert reply.status == 200, reply.body
        assert server.sent[0].output_len == 0


async def test_a_stop_string_that_the_first_token_completes() -> None:
    params = await begin()
    async with disaggregated("decode") as server:
        text = (await server.post("/v1/completions", {**BODY, "kv_transfer_params": params})).json()["choices"][0]["text"]
        reply = (await server.post("/v1/completions", {**BODY, "stop": text[0], "kv_transfer_params": params})).json()
        choice = reply["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", text[0])
        assert not server.services.client.num_sequences


async def test_a_request_for_one_token_ends_at_once() -> None:
    params = await begin()
    async with disaggregated("decode") as server:
        choice = (await server.post("/v1/completions", {**BODY, "max_tokens": 1, "kv_transfer_params": params})).json()["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"]) == (params["first_token_ids"], "length")


async def test_an_end_token_is_computed_again() -> None:
    first = (await begin())["first_token_ids"]
    async with disaggregated("prefill") as server:
        body = {**BEGIN, "temperature": 0}
        first = (await server.post("/v1/completions", body)).json()["kv_transfer_params"]["first_token_ids"]
        params = (await server.post("/v1/completions", {**body, "stop_token_ids": first})).json()["kv_transfer_params"]
    assert params["first_token_ids"] == []
    async with disaggregated("decode") as server:
        body = {**BODY, "temperature": 0, "stop_token_ids": first, "kv_transfer_params": params}
        choice = (await server.post("/v1/completions", body)).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", first[0])


async def test_chats_too() -> None:
    messages = [{"role": "user", "content": "word " * 60}]
    params = await begin({"messages": messages, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}, "/v1/chat/completions")
    async with disaggregated("decode") as server:
        reply = await server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, "kv_transfer_params": params})
        assert reply.status == 200, reply.body
        assert server.sent[0].output_len == 1


async def test_a_short_prompt_is_not_divided() -> None:
    assert await begin({**BEGIN, "prompt": PROMPT[:31]}) is None
    assert await begin({**BEGIN, "prompt": PROMPT[:32]}) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"signature": "0" * 64},
        {"signature": None},
        {"remote_host": "192.0.2.8"},
        {"remote_port": 5602},
        {"remote_request_id": "other"},
        {"remote_block_ids": [0, 1]},
        {"first_token_ids": [7]},
        {"seed": 1},
        {"cached_tokens": 64},
        {"weight_version": "other"},
    ],
    ids="-".join,
)
async def test_parameters_that_were_changed_are_refused(change: dict[str, Any]) -> None:
    params = await begin({**BEGIN, "seed": 3})
    async with disaggregated("decode") as server:
        reply = await server.post("/v1/completions", {**BODY, "kv_transfer_params": {**params, **change}})
        assert reply.status == 400
        assert reply.json()["error"]["param"] == "kv_transfer_params"
        assert "was not issued to this API key for this prompt" in reply.json()["error"]["message"]
        assert not server.sent


async def test_parameters_of_another_prompt_salt_or_secret_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    params = await begin()
    async with disaggregated("decode") as server:
        for change in ({"prompt": [*PROMPT[:-1], 7]}, {"cache_salt": "other"}):
            assert (await server.post("/v1/completions", {**BODY, **change, "kv_transfer_params": params})).status == 400
        monkeypatch.setenv(KEY_VARIABLE, "j" * 32)
        reply = await server.post("/v1/completions", {**BODY, "kv_transfer_params": params})
        assert reply.status == 400
        assert KEY_VARIABLE in reply.json()["error"]["message"]


async def test_parameters_of_another_key_are_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{'a' * 16}\n{'b' * 16}\n")
    keys = {"server": {"api_keys": str(tmp_path / "keys")}}
    async with disaggregated("prefill", **keys) as server:
        params = (await server.post("/v1/completions", BEGIN, authorization=f"Bearer {'a' * 16}")).json()["kv_transfer_params"]
    async with disaggregated("decode", **keys) as server:
        statuses = [
            (await server.post("/v1/completions", {**BODY, "kv_transfer_params": params}, authorization=f"Bearer {key * 16}")).status
            for key in "ab"
        ]
    assert statuses == [200, 400]


async def test_a_prompt_is_computed_again_with_other_weights(caplog: pytest.LogCaptureFixture) -> None:
    params = await begin()
    async with disaggregated("decode") as server:
        server.services.client.commands.weight_version = "step-2"  # type: ignore[union-attr]
        reply = await server.post("/v1/completions", {**BODY, "kv_transfer_params": params})
        assert reply.status == 200
        assert server.sent[0].transfer is None
        assert server.sent[0].output_len == 0
    assert "has the weights default and this server has the weights step-2" in caplog.text


@pytest.mark.parametrize(
    ("mode", "change", "text"),
    [
        (None, {}, "--disaggregation-mode prefill"),
        ("decode", {}, "--disaggregation-mode prefill"),
        ("prefill", {"kv_transfer_params": {"do_remote_prefill": True}}, "--disaggregation-mode decode"),
        ("prefill", {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}}, "send one of them"),
        ("prefill", {"kv_transfer_params": {"do_remote_decode": True, "remote_blocks": 3}}, "remote_blocks is not a known field"),
        ("prefill", {"n": 2}, "2 sequences"),
        ("prefill", {"prompt": [PROMPT, PROMPT]}, "2 sequences"),
        ("prefill", {"prompt_logprobs": 1}, "log-probabilities of the prompt"),
        ("prefill", {"stream": True}, "send stream: false"),
    ],
)
async def test_what_cannot_be_served_is_refused(mode: str | None, change: dict[str, Any], text: str) -> None:
    async with disaggregated(mode) as server:
        reply = await server.post("/v1/completions", {**BEGIN, **change})
        assert reply.status == 400
        assert text in reply.json()["error"]["message"]
        await asyncio.sleep(0)
        assert not server.services.client.num_outstanding
        reply = await server.post("/v1/completions", {**BODY, "kv_transfer_params": {"do_remote_decode": False}})
        assert reply.status == 200

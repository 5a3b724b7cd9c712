"""A prefill server and a decode server with the real library: outputs are those of one server, and
what fails is computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from tests.disaggregation.servers import Deployment, ask, deploy, make_body, wait_empty
from tests.entrypoints.serving import wait_until

pytest.importorskip("nixl_cu13")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers() -> Iterator[Deployment]:
    with deploy() as deployment:
        yield deployment


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    body = make_body(number, stream=number % 3 == 0)
    if number % 5:
        return "/v1/completions", body
    prompt = body.pop("prompt")
    text = " ".join(f"word{token}" for token in prompt[:30])
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": f"{number} {text}"}]}


@pytest.mark.parametrize("num_requests", [40, pytest.param(300, marks=pytest.mark.soak)])
def test_outputs_are_those_of_one_server(servers: Deployment, num_requests: int) -> None:
    """Temperatures 0 and 1, streamed and not, text and chat; usage too."""

    def compare(number: int) -> None:
        path, body = body_of(number)
        expected, actual = (ask(server, body, path=path) for server in (servers.whole, servers.router))
        for _, _, _, usage in (expected, actual) if path.startswith("/v1/chat") else ():
            usage.pop("prompt_tokens_details")  # chats share a prefix, whose first computation may be under way
        assert actual == expected, (path, body)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compare, range(num_requests)))
    assert servers.router.metric("frame_router_prefills_total") >= num_requests // 2
    assert servers.decode.metric("frame_kv_transfers_total") > num_requests // 4
    assert servers.decode.metric("frame_kv_tier_loaded_tokens_total") > 10 * num_requests
    wait_empty(servers.prefill)
    wait_until(lambda: servers.decode.metric("frame_kv_tier_requests_waiting") == 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_logprobs": 1},
        {"n": 2},
        {"echo": True},
        {"logprobs": 2},
        {"max_tokens": 1},
        {"prompt": [[9, 10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26, 27, 28]]},
        {"prompt": "x"},
        {"min_tokens": 4, "stop": ["e", "a"]},
        {"regex": "[a-z]{3,9}", "temperature": 0},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"temperature": 9},
        {"prompt": []},
        {"max_tokens": 10000},
    ],
    ids="-".join,
)
def test_requests_of_every_kind(servers: Deployment, changes: dict[str, Any]) -> None:
    body = make_body(1000 + len(str(changes)), **{"max_tokens": 8, **changes})
    assert ask(servers.router, body)[0:3] == ask(servers.whole, body)[0:3]


def test_handles_that_are_not_valid(servers: Deployment) -> None:
    """Forged ones are refused; used and expired ones are computed."""
    body = make_body(2001, max_tokens=6)
    expected = ask(servers.whole, body)
    begun = servers.prefill.post("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}).json()
    handle = begun["kv_transfer_params"]
    assert handle["do_remote_prefill"] is True
    changes: list[dict[str, Any]] = [
        {"signature": "0" * 64},
        {"signature": None},
        {"remote_port": 1},
        {"remote_host": "192.0.2.1"},
        {"remote_request_id": "other"},
        {"first_token_ids": [9]},
        {"cached_tokens": 3},
    ]
    for change in changes:
        status, message = ask(servers.decode, {**body, "kv_transfer_params": {**handle, **change}})
        assert status == 400
        assert "was not issued to this API key for this prompt" in message
    other = {**make_body(2002), "kv_transfer_params": handle}
    assert ask(servers.decode, other)[0] == 400
    salted = {**body, "cache_salt": "other", "kv_transfer_params": handle}
    assert ask(servers.decode, salted)[0] == 400
    for _ in range(2):  # used once; the second time the prompt is cached or computed
        assert ask(servers.decode, {**body, "kv_transfer_params": handle}) == expected
    wait_empty(servers.prefill)
    servers.decode.post("/flush_cache", {})
    assert ask(servers.decode, {**body, "kv_transfer_params": handle})[:3] == expected[:3]
    for server, change in ((servers.whole, handle), (servers.whole, {"do_remote_decode": True}), (servers.prefill, handle)):
        status, message = ask(server, {**body, "kv_transfer_params": change})
        assert status == 400
        assert "--disaggregation-mode" in message


def test_a_lease_that_no_decode_server_reads_expires(servers: Deployment) -> None:
    body = make_body(2003, max_tokens=6)
    begun = servers.prefill.post("/v1/completions", {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}).json()
    wait_until(lambda: servers.prefill.metric("frame_kv_leases") == 1)
    wait_empty(servers.prefill)
    assert servers.prefill.metric("frame_kv_expired_leases_total") >= 1
    assert ask(servers.decode, {**body, "kv_transfer_params": begun["kv_transfer_params"]})[:3] == ask(servers.whole, body)[:3]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_is_killed_under_streams(servers: Deployment, role: str) -> None:
    """Every response is that of one server, or an error that names the cause; then a new server
    takes the place of the killed one."""
    bodies = [make_body(3000 + number + 100 * (role == "decode"), max_tokens=60, stream=number % 4 != 0) for number in range(8)]
    victim = getattr(servers, role)
    with ThreadPoolExecutor(8) as pool:
        expected = list(pool.map(partial(ask, servers.whole), bodies))
        running = [pool.submit(ask, servers.router, body) for body in bodies]
        wait_until(lambda: victim.metric("frame_requests_running") >= 1 or any(each.done() for each in running), 60.0)
        victim.kill()
        results = [each.result() for each in running]
    failed = [result for result, one in zip(results, expected, strict=True) if result[:3] != one[:3]]
    causes = (victim.url, "no replica is healthy")  # the second of requests that came later
    assert all(len(result) == 2 and result[0] in (502, 503) and any(cause in result[1] for cause in causes) for result in failed), failed
    if role == "prefill":
        assert not failed, "a decode server computes what a prefill server has lost"
    setattr(servers, role, servers.start(role, "--port", victim.url.rpartition(":")[2]))
    wait_until(lambda: httpx.get(servers.router.url + "/health").json()["replicas"][victim.url] == "ok", 60.0)
    for number in range(3100 + 50 * (role == "decode"), 3110 + 50 * (role == "decode")):
        assert ask(servers.router, make_body(number))[:3] == ask(servers.whole, make_body(number))[:3]
    wait_empty(servers.prefill)

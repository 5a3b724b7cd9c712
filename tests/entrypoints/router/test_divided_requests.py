"""The router in front of prefill and decode servers: the requests that it makes of one, and what it
does when a server is lost or refuses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import HttpServer, bound_port
from frame.entrypoints.router.connections import open_client
from frame.entrypoints.router.divided_requests import make_decode_body, make_prefill_body, read_divisible
from frame.entrypoints.router.first_bytes import FirstBytes
from frame.entrypoints.router.metrics import RouterMetrics
from frame.entrypoints.router.proxy import Proxy
from frame.entrypoints.router.replicas import Backends
from frame.interfaces.routing import RoutingContext
from frame.parallel.replica_choice import ReplicaChooser
from frame.plugins.routing_policies.prefix_load import PrefixLoad

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "some text", "max_tokens": 20, "temperature": 0.5}
HANDLE = {"do_remote_prefill": True, "signature": "x"}


def divide(path: str = PATH, **body: Any) -> dict[str, Any] | None:
    fields = read_divisible("POST", path, json.dumps(body).encode())
    return None if fields is None else json.loads(make_prefill_body(fields, path))


def test_a_prefill_server_computes_one_token() -> None:
    assert divide(**BODY, stream=True, stream_options={"include_usage": True}, min_tokens=4) == {
        **BODY, "max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True},
    }  # fmt: skip
    chat = divide("/v1/chat/completions", messages=[], max_completion_tokens=9)
    assert chat is not None
    assert (chat["max_tokens"], chat["max_completion_tokens"]) == (1, 1)


def test_values_stay_as_they_came() -> None:
    body = b'{"prompt": [1, 2],  "seed": 12345678901234567890, "temperature": 1.0e0, "x": "\\u00e9"}'
    fields = read_divisible("POST", PATH, body)
    assert fields is not None
    decode = make_decode_body(fields, json.dumps({"kv_transfer_params": HANDLE}).encode())
    assert decode is not None
    assert b'"seed":12345678901234567890,"temperature":1.0e0,"x":"\\u00e9"' in decode
    assert json.loads(decode)["kv_transfer_params"] == HANDLE


@pytest.mark.parametrize(
    "change",
    [
        {"n": 2}, {"best_of": 3}, {"echo": True}, {"prompt_logprobs": 0}, {"suffix": "x"}, {"max_tokens": 1}, {"max_tokens": "many"},
        {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"kv_transfer_params": {}}, {"lora_path": "a"}, {"n": True},
    ],
    ids=str,
)  # fmt: skip
def test_requests_that_go_to_one_server(change: dict[str, Any]) -> None:
    assert divide(**BODY) is not None
    assert divide(**{**BODY, **change}) is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": 1', b"[" * 5000, b'{"prompt": "x", "n": "\xff"}'])
def test_bodies_that_cannot_be_read_go_to_one_server(body: bytes) -> None:
    assert read_divisible("POST", PATH, body) is None


def test_other_routes_go_to_one_server() -> None:
    assert read_divisible("POST", "/v1/embeddings", json.dumps(BODY).encode()) is None
    assert read_divisible("GET", PATH, json.dumps(BODY).encode()) is None


@pytest.mark.parametrize(
    "response", [b"", b"{", b"{}", *(b'{"kv_transfer_params": %b}' % each for each in (b"null", b'"x"', b"[{}]", b"1"))]
)
def test_responses_without_a_handle(response: bytes) -> None:
    fields = read_divisible("POST", PATH, json.dumps(BODY).encode())
    assert fields is not None
    assert make_decode_body(fields, response) is None


class FakeServer:
    """Keeps the bodies of its requests. `status` and `reply`: of its responses; None: it closes the
    connection. `is_hanging`: it does not respond, not even to health checks. `refuses_handles`: it
    answers 400 to a handle. `is_silent`: it responds to health checks alone."""

    def __init__(self, reply: Any, status: int | None = 200) -> None:
        self.reply, self.status, self.is_hanging, self.refuses_handles = reply, status, False, False
        self.is_silent = False
        self.bodies: list[Any] = []
        self.url = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
        body = await reader.readexactly(length)
        is_check = head.startswith(b"GET /health ")
        if not is_check:
            self.bodies.append(json.loads(body))
        if self.is_hanging or (self.is_silent and not is_check):
            await asyncio.sleep(30)
        if is_check or self.status is not None:
            content = b"{}" if is_check else json.dumps(self.reply).encode()
            is_refused = self.refuses_handles and b"kv_transfer_params" in body
            status = 200 if is_check else 400 if is_refused else self.status
            writer.write(b"HTTP/1.1 %d x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content))
            await writer.drain()
        writer.close()


@asynccontextmanager
async def routed(
    prefill: list[FakeServer], decode: list[FakeServer], prefill_timeout: float = 60.0
) -> AsyncIterator[tuple[httpx.AsyncClient, RouterMetrics]]:
    for each in (*prefill, *decode):
        await each.start()
    async with open_client() as behind:
        first, second = (
            Backends([each.url for each in servers], behind, interval=0.2, chooser=ReplicaChooser(PrefixLoad(RoutingContext())))
            for servers in (prefill, decode)
        )
        application = Proxy(second, behind, max_body=1 << 20, prefill=first)
        application.prefill_timeout = prefill_timeout
        listener = bound_port("127.0.0.1", 0, "")
        server = HttpServer(application, ConnectionLimits(512, 30.0))
        serving = asyncio.create_task(server.serve([listener]))
        watching = asyncio.create_task(first.watch())
        await server.listening.wait()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20) as client:
            yield client, application.metrics
        watching.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
    for each in (*prefill, *decode):
        each.stop()


def count(metrics: RouterMetrics, outcome: str) -> bool:
    return f'frame_router_prefills_total{{outcome="{outcome}"}} 1.0' in metrics.render().decode()


def suspended(metrics: RouterMetrics) -> FirstBytes:
    """Of the only prefill server."""
    (backend,) = metrics._groups[1].all
    return backend.first_bytes


async def test_a_request_is_divided() -> None:
    prefill, decode = FakeServer({"kv_transfer_params": HANDLE}), FakeServer({"text": "x"})
    async with routed([prefill], [decode]) as (client, metrics):
        response = await client.post(PATH, json=BODY)
        assert (response.status_code, response.json()) == (200, {"text": "x"})
        assert count(metrics, "transferred")
        assert 'frame_router_replica_healthy{replica="' + prefill.url in metrics.render().decode()
        await client.post("/flush_cache", json={})
    assert prefill.bodies == [{**BODY, "max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}, {}]
    assert decode.bodies == [{**BODY, "kv_transfer_params": HANDLE}, {}]


@pytest.mark.parametrize(
    ("reply", "status", "outcome"),
    [({}, 200, "whole"), ({"error": {}}, 400, "whole"), ({"error": {}}, 503, "lost"), ({}, None, "lost")],
)
async def test_a_decode_server_computes_what_a_prefill_server_does_not(reply: Any, status: int | None, outcome: str) -> None:
    prefill, decode = FakeServer(reply, status), FakeServer({"text": "x"})
    async with routed([prefill], [decode]) as (client, metrics):
        assert (await client.post(PATH, json=BODY)).status_code == 200
        assert count(metrics, outcome)
    assert decode.bodies == [BODY]


async def test_another_prefill_server_is_asked() -> None:
    servers = [FakeServer({}, None), FakeServer({"kv_transfer_params": HANDLE})]
    decode = FakeServer({"text": "x"})
    async with routed(servers, [decode]) as (client, _):
        for _ in range(4):
            assert (await client.post(PATH, json=BODY)).status_code == 200
    assert {json.dumps(body) for body in decode.bodies} == {json.dumps({**BODY, "kv_transfer_params": HANDLE})}


async def test_a_prefill_server_that_hangs_is_left() -> None:
    prefill, decode = FakeServer({}), FakeServer({"text": "x"})
    async with routed([prefill], [decode]) as (client, _):
        prefill.is_hanging = True
        assert (await client.post(PATH, json=BODY)).status_code == 200
    assert decode.bodies == [BODY]


async def test_a_prefill_server_that_answers_health_checks_alone_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """It gets no requests for a while, and then one at a time until it answers."""
    silent, decode = FakeServer({"kv_transfer_params": HANDLE}), FakeServer({"text": "x"})
    silent.is_silent = True
    async with routed([silent], [decode], prefill_timeout=0.5) as (client, metrics):
        responses = await asyncio.gather(*(client.post(PATH, json=BODY) for _ in range(5)))
        assert {response.status_code for response in responses} == {200} and len(silent.bodies) == 5
        assert f"the prefill server {silent.url} failed: no answer in time" in caplog.text
        began = time.monotonic()
        assert (await client.post(PATH, json=BODY)).status_code == 200
        assert time.monotonic() - began < 0.4 and len(silent.bodies) == 5
        assert 'frame_router_prefills_total{outcome="lost"} 6.0' in metrics.render().decode()
        assert 'frame_router_replica_suspended{replica="' + silent.url + '"} 1.0' in metrics.render().decode()
        suspended(metrics).suspended_until = 0.0
        await asyncio.gather(*(client.post(PATH, json=BODY) for _ in range(5)))
        assert len(silent.bodies) == 6  # on trial
        suspended(metrics).suspended_until = 0.0
        silent.is_silent = False
        for _ in range(2):
            await client.post(PATH, json=BODY)
    assert decode.bodies == [BODY] * 11 + [{**BODY, "kv_transfer_params": HANDLE}] * 2


def test_a_body_with_a_name_twice_goes_to_one_server() -> None:
    """Which refuses it: names that look so in a text are none."""
    for twice in (b'{"prompt": "a", "prompt" : "b"}', b'{"a": {"prompt": 1}, "prompt": "a", "seed": 1,"seed":1}'):
        assert read_divisible("POST", PATH, twice) is None
    for once in ({"prompt": 'say "x": 1', "x": {"prompt": 1, "y": '"prompt": 2'}}, {"prompt": 'a\\"', '"': 2, "z": [{"z": 1}]}):
        assert read_divisible("POST", PATH, json.dumps(once).encode()) is not None


async def test_another_decode_server_gets_the_same_handle() -> None:
    prefill = FakeServer({"kv_transfer_params": HANDLE})
    decode = [FakeServer({}, None), FakeServer({"text": "x"})]
    async with routed([prefill], decode) as (client, _):
        for _ in range(4):
            assert (await client.post(PATH, json=BODY)).status_code == 200
    assert all(body["kv_transfer_params"] == HANDLE for server in decode for body in server.bodies)
    assert len(prefill.bodies) == 4


@pytest.mark.parametrize(("status", "num_servers"), [(200, 1), (200, 2), (400, 1), (422, 1)])
async def test_a_handle_that_is_refused_is_left_out(status: int, num_servers: int) -> None:
    """The client gets the response to its own body, which is sent once."""
    prefill = FakeServer({"kv_transfer_params": HANDLE})
    decode = [FakeServer({"text": "x"}, status) for _ in range(num_servers)]
    for each in decode:
        each.refuses_handles = True
    async with routed([prefill], decode) as (client, metrics):
        response = await client.post(PATH, json=BODY)
        assert (response.status_code, response.json()) == (status, {"text": "x"})
        assert count(metrics, "refused") and not count(metrics, "transferred")
    assert [body for each in decode for body in each.bodies if "kv_transfer_params" not in body] == [BODY]
    assert sum(len(each.bodies) for each in decode) == 2


async def test_what_no_decode_server_answers_is_counted() -> None:
    prefill, decode = FakeServer({"kv_transfer_params": HANDLE}), FakeServer({"text": "x"}, 503)
    async with routed([prefill], [decode]) as (client, metrics):
        assert (await client.post(PATH, json=BODY)).status_code == 503
        assert count(metrics, "unused") and not count(metrics, "transferred")


async def test_a_clients_own_handle_is_refused_to_the_client() -> None:
    prefill, decode = FakeServer({}), FakeServer({"text": "x"})
    decode.refuses_handles = True
    async with routed([prefill], [decode]) as (client, _):
        assert (await client.post(PATH, json={**BODY, "kv_transfer_params": HANDLE})).status_code == 400
    assert (len(prefill.bodies), len(decode.bodies)) == (0, 1)

"""`frame router` and replicas whose informational responses or headers do not end: they delay no
other client, and the replica counts as having failed."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from frame.entrypoints.router.connections import MAX_INFORMATIONAL
from tests.entrypoints.router.fake_replica import FakeReplica, check_reply, raw_replica, routed

CONTINUED = b"HTTP/1.1 102 Processing\r\n\r\n" * 160_000  # 4 MB
START = b"HTTP/1.1 200 OK\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n2\r\nOK\r\n0\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"
SENTENCE = f"it sent more than {MAX_INFORMATIONAL} informational (1xx) responses to one request"


@pytest.mark.parametrize(
    ("response", "status", "expected"),
    [(START + b"a:\r\n" * 129 + b"\r\n", 502, "sent more than 128 headers to request mine"),
     (START + b"a:\r\n" * 129, 502, ""),  # and then the connection ends
     (START + b"a: " + b"b" * 65536 + b"\r\n\r\n", 502, "sent headers of more than 65536 bytes to request mine"),
     (START + b"a: " + b"b" * 70000, 502, "sent headers of more than 65536 bytes to request mine"),
     (START + b"a: b\nc: d\r\ncontent-length: 0\r\n\r\n", 502, "a header line that does not end with CR LF"),
     (b"HTTP/1.1 200 OK\n\n", 502, "a header line that does not end with CR LF"),
     (START + b"a:\r\n" * 127 + b"content-length: 0\r\n\r\n", 200, ""),
     (START + b"content-type: text/plain\r\ncontent-length: 2\r\n\r\n\n\n", 200, "\n\n"),  # LF in a body
     (b"HTTP/1.1 103 Early Hints\r\na: b\r\n\r\n" * MAX_INFORMATIONAL + OK, 200, "OK"),
     (START + CHUNKED + b"x:\r\n" * 128 + b"\r\n", 200, "OK"),
     (START + CHUNKED + b"x:\r\n" * 130 + b"\r\n", None, "")],
)  # fmt: skip
async def test_heads_of_responses_are_bounded(response: bytes, status: int | None, expected: str) -> None:
    async with raw_replica(response, is_closed=True) as url, routed(urls=(url,)) as (client, _, _):
        await check_reply(client, "/v1/responses", {"input": "x"}, status, expected)


async def test_informational_responses_without_an_end_delay_no_other_client() -> None:
    async with raw_replica(CONTINUED + OK) as url, routed(urls=(url,)) as (client, backends, _):
        slowest = 0.0
        posts = [asyncio.create_task(client.post("/v1/responses", json={"input": "x"})) for _ in range(8)]
        while not all(post.done() for post in posts):
            begin = time.thread_time()  # what the loop computes, whatever else the machine does
            await asyncio.sleep(0.001)
            slowest = max(slowest, time.thread_time() - begin)
        for post in posts:
            reply = await post
            assert (reply.status_code, SENTENCE in reply.text) == (502, True), reply.text
        deadline = time.monotonic() + 60
        while not backends.all[0].is_healthy and time.monotonic() < deadline:  # a check took too long on a busy machine
            await backends.check(backends.all[0])
        assert backends.all[0].is_healthy  # its checks succeed
        assert slowest < 0.5  # of about 3 s before: 16 of 160,000 responses are parsed


async def test_a_request_goes_from_such_a_replica_to_another() -> None:
    replica = FakeReplica()
    async with raw_replica(CONTINUED) as url, routed(replica, urls=(url,)) as (client, _, metrics):
        replies = [await client.post("/generate", json={"text": str(number)}) for number in range(6)]
        assert [reply.status_code for reply in replies] == [200] * 6
        assert replica.requests == 6
        assert b'outcome="retried"} 0' not in metrics.render()


async def test_a_health_check_that_gets_them_has_failed() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(CONTINUED + OK)
            await writer.drain()
        writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with routed(urls=(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",)) as (_, backends, _):
        begin = time.monotonic()
        await backends.check(backends.all[0], is_suspect=True)
        assert not backends.all[0].is_healthy
        assert time.monotonic() - begin < 0.8
    server.close()


async def test_a_target_is_quoted_as_text() -> None:
    async with routed(FakeReplica()) as (client, _, _):
        reply = await client.request("OPTIONS", "/", extensions={"target": b"*"})
        assert reply.status_code == 400
        assert "the request's target is '*'; send" in reply.json()["error"]["message"]

"""Hostile gRPC calls over real sockets: messages that are large, hold many fields or never end,
calls without a key, connections without calls. Other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frame.entrypoints.grpc import calls, health, reading
from frame.entrypoints.grpc.reading import check_fields
from frame.entrypoints.grpc.schema import SERVICE
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.protocol.bodies import MAX_NODES, MAX_VALUES, MIN_BODY
from tests.entrypoints.grpc.raw_calls import (
    CONTINUATION,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    RawConnection,
    frame,
    head,
    literal,
    prefix,
)
from tests.entrypoints.grpc.test_service import Client, S, listening
from tests.entrypoints.inprocess import InProcess

Code = grpc.StatusCode
PART = prefix(3_000_000) + b"x" * 1000  # of a message, whose rest does not come
CHECK = "/grpc.health.v1.Health/Check"


@asynccontextmanager
async def two_keys(folder: Path, **settings: Any) -> AsyncIterator[tuple[InProcess, str]]:
    (folder / "keys").write_text("one\ntwo\n")
    async with listening({"server": {"api_keys": str(folder / "keys"), **settings}}) as opened:
        yield opened


async def refused(call: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def count_tokens(address: str, key: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        return len((await Client(channel, key).call("Tokenize", {"text": "hi"}, timeout=20)).token_ids)


async def test_messages_are_bounded_as_bodies_are(tmp_path: Path) -> None:
    async with two_keys(tmp_path) as (server, address), grpc.aio.insecure_channel(address) as channel:
        call = Client(channel, "one").call
        code, details = await refused(call("Tokenize", {"text": "x" * (MIN_BODY + 1)}))
        assert code == Code.RESOURCE_EXHAUSTED and "larger than max" in details
        for name, request in (
            ("Tokenize", {"chat": {"messages": [{}] * (MAX_NODES + 1)}}),
            ("Embed", {"texts": [""] * (MAX_NODES + 1)}),
            ("Abort", {"ids": [""] * (MAX_NODES + 1)}),
        ):
            code, details = await refused(call(name, request))
            assert code == Code.INVALID_ARGUMENT and f"more than {MAX_NODES} fields" in details
        code, details = await refused(call("Detokenize", {"token_ids": [5] * (MAX_VALUES + 1)}))
        assert code == Code.INVALID_ARGUMENT and f"more than {MAX_VALUES} values" in details
        server.app.bodies.held = server.app.bodies.maximum - 100  # HTTP's bodies hold the rest of the pool
        code, details = await refused(call("Tokenize", {"text": "x" * 200}))
        assert code == Code.UNAVAILABLE and "as many bytes" in details
        assert (await call("Tokenize", {"text": "hi"})).token_ids
        assert server.app.bodies.held == server.app.bodies.maximum - 100


def test_fields_are_counted_on_the_bytes() -> None:
    request, reply = S["GenerateRequest"], S["EmbedReply"]
    bias = {"logit_bias": {3: 1.5, -4: 2.0}, "stop": ["a", ""], "custom": {"a": "b"}, "seed": -(2**62), "temperature": 1.5}
    whole = request(token_ids={"ids": [1, -1, 2**31 - 1]}, sampling_params=bias, priority=-1).SerializeToString()
    check_fields(request, whole, 3)
    with pytest.raises(ApiError, match="more than 2 values"):
        check_fields(request, whole, 2)
    floats = reply(vectors=[{"values": [0.5] * 10}, {"values": []}]).SerializeToString()
    check_fields(reply, floats, 10)
    with pytest.raises(ApiError, match="more than 9 values"):
        check_fields(reply, floats, 9)
    check_fields(request, b"", 0)
    for end in range(1, len(whole)):  # a part is a shorter message, or none; it is never read beyond its end
        try:
            check_fields(request, whole[:end], 3)
        except ApiError as error:
            assert "not a valid frame.v1.GenerateRequest" in error.message
    for wrong in (b"\x80" * 1000, b"\x12\xff\xff\xff\xff\x0f", b"\x0b\x0c", b"\x09abc", b"\x0d"):
        with pytest.raises(ApiError, match="not a valid"):
            check_fields(request, wrong, 3)


@pytest.mark.slow
async def test_messages_that_do_not_end_take_no_place_of_others(tmp_path: Path) -> None:
    """Few are read at once, for a limited time; a key's others wait, those of other keys do not."""
    async with two_keys(tmp_path, client_timeout=1.0, max_body_bytes=MIN_BODY) as (server, address):
        slow = await RawConnection.open(address)
        for _ in range(12):
            slow.call(f"/{SERVICE}/Tokenize", PART, "one")
        slow.call(f"/{SERVICE}/Tokenize", b"", "one", is_complete=True)  # no message
        assert await asyncio.wait_for(count_tokens(address, "two"), 20)
        assert len(slow.ended) < 12
        await slow.wait_ended(13)
        assert await count_tokens(address, "one")
        assert server.app.bodies.held == 0
        await slow.close()


async def test_sessions_have_a_limit_for_each_key(tmp_path: Path) -> None:
    """Each may receive a message at any time. Reflection is one."""
    async with two_keys(tmp_path, max_body_bytes=MIN_BODY) as (_, address):
        held = await RawConnection.open(address)
        paths = (f"/{SERVICE}/GenerateStream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for number in range(20):
            held.call(paths[number % 2], PART, "one")
        await held.wait_ended(14)
        async with grpc.aio.insecure_channel(address) as channel:
            command = S["GenerateCommand"](generate={"token_ids": {"ids": [5]}, "sampling_params": {"max_tokens": 2, "ignore_eos": True}})

            async def commands() -> AsyncIterator[Any]:
                yield command

            replies = [reply async for reply in Client(channel, "two").call("GenerateStream", commands())]
            assert replies[-1].finish.reason == "length"
        assert len(held.ended) == 14  # of 12 places one key has half
        await held.close()


async def test_calls_without_a_key_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_OPEN_READS", 4)
    monkeypatch.setattr(health, "WRITE_TIMEOUT", 0.2)
    async with two_keys(tmp_path) as (_, address):
        keyless = await RawConnection.open(address)
        paths = (f"/{SERVICE}/Tokenize", f"/{SERVICE}/GenerateStream", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        for path in paths:
            keyless.call(path, PART)
        await keyless.wait_ended(3)
        for _ in range(8):
            keyless.call(CHECK, PART)
        await keyless.wait_ended(3 + 4)  # the oldest ones, for newer ones
        deaf = await RawConnection.open(address, window=0)  # reads no response
        for _ in range(health.MAX_CHECKS_PER_CONNECTION + 5):
            deaf.call(CHECK, prefix(0), is_complete=True)
        await deaf.wait_ended(5)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            checked = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
            assert checked.status == health_pb2.HealthCheckResponse.SERVING
            code, details = await refused(stub.Check(health_pb2.HealthCheckRequest(service="x" * 5000), timeout=20))
            assert code == Code.RESOURCE_EXHAUSTED and "it may have 4096" in details
        for connection in (keyless, deaf):
            await connection.close()


async def test_connections_are_limited_and_do_not_stay_idle(tmp_path: Path) -> None:
    async with two_keys(tmp_path, max_connections=8, client_timeout=1.0) as (_, address):
        host, _, port = address.rpartition(":")

        async def live(data: bytes) -> None:
            """Until the server closes the connection."""
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            try:
                while await reader.read(65_536):
                    pass
            except OSError:
                pass
            writer.close()

        for data in (b"", PREFACE, b"GET / HTTP/1.1\r\n\r\n"):
            several = [asyncio.create_task(live(data)) for _ in range(20)]
            done, _ = await asyncio.wait(several, timeout=20, return_when=asyncio.FIRST_COMPLETED)
            assert done
            await asyncio.wait_for(asyncio.gather(*several), 30)
        quiet = [await RawConnection.open(address) for _ in range(20)]
        closed = [asyncio.create_task(each.is_closed.wait()) for each in quiet]
        async with asyncio.timeout(20):
            while sum(task.done() for task in closed) < 12:  # noqa: ASYNC110 - several events
                await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*closed), 30)  # the rest, which makes no call
        assert await count_tokens(address, "two")
        for each in quiet:
            await each.close()


@pytest.mark.slow
async def test_calls_that_are_reset_cancel_none_of_others(tmp_path: Path) -> None:
    """grpc cancels calls of any client where too many have not been seen by Python."""
    async with two_keys(tmp_path) as (_, address):
        hostile = [await RawConnection.open(address) for _ in range(4)]
        reset = (8).to_bytes(4, "big")
        block = head(f"/{SERVICE}/Tokenize", "wrong")
        async with grpc.aio.insecure_channel(address) as channel:
            assert (await Client(channel, "two").call("Tokenize", {"text": "hi"})).token_ids
            for burst in range(5):
                for each in hostile:
                    streams = range(4000 * burst + 1, 4000 * (burst + 1), 2)
                    each.write(b"".join(frame(HEADERS, END_HEADERS, at, block) + frame(RST_STREAM, 0, at, reset) for at in streams))
                await asyncio.sleep(0.02)
                made = [Client(channel, "two").call("Tokenize", {"text": "hi"}, timeout=60) for _ in range(5)]
                assert all(reply.token_ids for reply in await asyncio.gather(*made))
        for each in hostile:
            await each.close()


async def test_calls_with_many_metadata_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc bounds the metadata of one frame only."""
    seen: list[int] = []

    def headers_of(metadata: Any) -> Any:
        seen.append(len(metadata))
        return real(metadata)

    real = calls.headers_of
    monkeypatch.setattr(calls, "headers_of", headers_of)
    async with two_keys(tmp_path) as (_, address):
        hostile = await RawConnection.open(address)
        some = literal("x-a", "b") * 100
        for path in (f"/{SERVICE}/Tokenize", CHECK):
            stream = hostile.take_stream()
            parts = [frame(HEADERS, 0, stream, head(path, "one")), *[frame(CONTINUATION, 0, stream, some)] * 50]
            hostile.write(b"".join(parts) + frame(CONTINUATION, END_HEADERS, stream, some))
        await hostile.wait_ended(2)
        assert await count_tokens(address, "two")
        assert max(seen) <= calls.MAX_METADATA
        await hostile.close()


async def test_a_client_that_does_not_read_does_not_delay_the_end() -> None:
    def flood(address: str) -> socket.socket:
        """A connection whose buffers are full of the server's replies to PINGs."""
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=1.0)
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
        with suppress(TimeoutError):
            while True:
                connection.sendall(frame(PING, 0, 0, b"12345678") * 1000)
        return connection

    async with listening() as (_, address):
        connection = await asyncio.to_thread(flood, address)
        began = time.monotonic()
    assert time.monotonic() - began < 10
    connection.close()

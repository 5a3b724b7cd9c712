"""The gRPC service, by grpcio's own client over real sockets: replies, one call with many requests,
errors, keys, cancelling."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from frame.core.errors import ConfigurationError
from frame.entrypoints.grpc import health as health_module
from frame.entrypoints.grpc import schema as schema_module
from frame.entrypoints.grpc.health import MAX_WATCHES_PER_CONNECTION
from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.server import GrpcServer
from frame.entrypoints.grpc.service import MAX_REPLIES
from tests.entrypoints.adapter_engine import make_adapter
from tests.entrypoints.inprocess import InProcess, serving
from tests.entrypoints.serving import RunningServer

Code = grpc.StatusCode
S = Schema()
IDS = {"ids": [5, 6, 7]}
KINDS = {"Generate": "unary_stream", "GenerateStream": "stream_stream"}


class Client:
    """Calls by name, with classes of the description."""

    def __init__(self, channel: Any, key: str | None = None) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    def call(self, name: str, request: Any, **more: Any) -> Any:
        method = S.methods[name]
        make = getattr(self._channel, KINDS.get(name, "unary_unary"))
        reads, writes = S[method.input_type.name], S[method.output_type.name]
        call = make(f"/{SERVICE}/{name}", request_serializer=reads.SerializeToString, response_deserializer=writes.FromString)
        return call(reads(**request) if isinstance(request, dict) else request, metadata=self._metadata, **more)


@asynccontextmanager
async def listening(sections: dict[str, Any] | None = None) -> AsyncIterator[tuple[InProcess, str]]:
    async with serving(sections) as server:
        grpc_server = GrpcServer(server.services, "127.0.0.1", 0, server.app.bodies)
        await grpc_server.start()
        try:
            yield server, grpc_server.address
        finally:
            await grpc_server.stop()


@asynccontextmanager
async def connected(sections: dict[str, Any] | None = None, key: str | None = None) -> AsyncIterator[tuple[InProcess, Client]]:
    async with listening(sections) as (server, address), grpc.aio.insecure_channel(address) as channel:
        yield server, Client(channel, key)


def params(**values: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "temperature": 0, "ignore_eos": True, **values}


async def read_commands(written: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    """The commands of a queue, up to None."""
    while (command := await written.get()) is not None:
        yield S["GenerateCommand"](**command)


async def until_empty(server: InProcess) -> None:
    """All work has been stopped; the engine says so."""
    async with asyncio.timeout(20):
        while True:
            info = (await server.services.client.send_command("server_info")).data
            if info["running"] == info["waiting"] == server.services.client.num_outstanding == 0:
                break
    await server.services.client.send_command("check_integrity")


async def test_replies_are_those_of_the_http_api() -> None:
    async with connected() as (server, client):
        whole = (await server.post("/generate", {"text": "The quick", "sampling_params": params(max_new_tokens=5)})).json()
        replies = [r async for r in client.call("Generate", {"text": "The quick", "sampling_params": params(), "id": "mine"})]
        assert "".join(r.text for r in replies) == whole["text"]
        assert [i for r in replies for i in r.token_ids] == whole["output_ids"]
        last = replies[-1]
        assert (last.finish.reason, last.completion_tokens, last.id) == ("length", 5, "mine")
        assert last.prompt_tokens == whole["meta_info"]["prompt_tokens"]
        pair = [r async for r in client.call("Generate", {"token_ids": IDS, "sampling_params": params(n=2, temperature=1, seed=2**40)})]
        assert {r.index for r in pair if r.finish.reason == "length"} == {0, 1}
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        assert [r async for r in client.call("Generate", {"chat": chat, "sampling_params": params()})][-1].finish.reason == "length"
        ids = await client.call("Tokenize", {"text": "The quick"})
        assert len(ids.token_ids) == last.prompt_tokens
        assert (await client.call("Detokenize", {"token_ids": ids.token_ids, "skip_special_tokens": True})).text == "The quick"
        assert len((await client.call("Tokenize", {"chat": chat})).token_ids) > 1
        info = await client.call("ServerInfo", {})
        assert (info.model, info.ready, info.max_context) == ("frame-tiny", True, 512)


def test_schema_of_logprobs_and_stops() -> None:
    from frame.core.messages import Finish, TokenLogprobs

    made = S["Logprobs"]()
    assert len(list(schema_module.add_logprobs(made, [TokenLogprobs([1, 2], [None, -0.5], [[], [(2, -0.5), (3, -1.0)]])]))) == 2
    assert math.isnan(made.logprobs[0])
    assert (made.logprobs[1], list(made.top[1].token_ids), len(made.top[0].token_ids)) == (-0.5, [2, 3], 0)
    assert schema_module.finish_of(S, Finish("stop", 7)).token_id == 7
    assert schema_module.finish_of(S, Finish("stop", "END")).text == "END"
    given = S["SamplingParams"](stop=["a"], logit_bias={3: 1.5}, temperature=0, custom={"a": "b"})
    assert schema_module.plain(given) == {"stop": ["a"], "logit_bias": {3: 1.5}, "temperature": 0, "custom": {"a": "b"}}


async def test_many_requests_over_one_call() -> None:
    async with connected() as (server, client):
        written: asyncio.Queue[Any] = asyncio.Queue()
        control = server.services.client.send_command
        await control("pause")  # until everything has been asked for
        endless = {"token_ids": IDS, "sampling_params": params(max_tokens=400)}
        for i in range(6):
            written.put_nowait({"generate": {"id": f"r{i}", "token_ids": IDS, "sampling_params": params(max_tokens=3 + i)}})
        written.put_nowait({"generate": {"id": "long", **endless}})
        written.put_nowait({"generate": {"id": "long", **endless}})  # the id is taken
        written.put_nowait({"generate": {"id": "bad", "token_ids": IDS, "sampling_params": {"top_p": 7}}})
        counts: dict[str, int] = {}
        ends: dict[str, list[Any]] = {}
        async for reply in client.call("GenerateStream", read_commands(written)):
            counts[reply.id] = counts.get(reply.id, 0) + len(reply.token_ids)
            if reply.HasField("finish"):
                ends.setdefault(reply.id, []).append(reply.finish)
            if reply.id == "bad":
                written.put_nowait({"abort": {"ids": ["long", "unknown"]}})
            if reply.finish.reason == "abort":
                await control("resume")
                written.put_nowait(None)
        assert {name: count for name, count in counts.items() if name.startswith("r")} == {f"r{i}": 3 + i for i in range(6)}
        assert {finish.reason for name, (finish, *_) in ends.items() if name.startswith("r")} == {"length"}
        assert sorted((finish.reason, finish.status) for finish in ends["long"]) == [("abort", ""), ("error", "ALREADY_EXISTS")]
        assert ends["bad"][0].status == "INVALID_ARGUMENT"
        assert "top_p" in ends["bad"][0].error
        await until_empty(server)


async def test_an_aborted_request_ends_each_of_its_sequences() -> None:
    async with connected() as (server, client):
        written: asyncio.Queue[Any] = asyncio.Queue()
        request = {"id": "four", "token_ids": IDS, "sampling_params": params(max_tokens=400, n=4)}
        written.put_nowait({"generate": request})
        ends = []
        async for reply in client.call("GenerateStream", read_commands(written)):
            if not ends and reply.token_ids:
                written.put_nowait({"abort": {"ids": ["four"]}})
                written.put_nowait(None)
            if reply.HasField("finish"):
                ends.append((reply.index, reply.finish.reason))
        assert sorted(ends) == [(index, "abort") for index in range(4)]
        await until_empty(server)


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
async def test_cancelling_stops_the_work(name: str) -> None:
    async with connected() as (server, client):
        request = {"token_ids": IDS, "sampling_params": params(max_tokens=400)}
        await server.services.client.send_command("pause")  # nothing ends by itself

        async def commands() -> AsyncIterator[Any]:
            for i in range(3):
                yield S["GenerateCommand"](generate={**request, "id": str(i)})
            await asyncio.Event().wait()

        call = client.call(name, request if name == "Generate" else commands())
        async with asyncio.timeout(20):
            while server.services.client.num_outstanding < (1 if name == "Generate" else 3):  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        call.cancel()
        await until_empty(server)


@pytest.mark.parametrize(
    ("request_", "code", "part"),
    [
        ({}, Code.INVALID_ARGUMENT, "send text, token_ids or chat"),
        ({"token_ids": {}}, Code.INVALID_ARGUMENT, "empty"),
        ({"chat": {}}, Code.INVALID_ARGUMENT, "messages is empty; send at least one message"),
        ({"token_ids": {"ids": [10**9]}}, Code.INVALID_ARGUMENT, "vocabulary"),
        ({"token_ids": IDS, "id": "x" * 300}, Code.INVALID_ARGUMENT, "id has 300 characters"),
        ({"token_ids": IDS, "sampling_params": {"n": 0}}, Code.INVALID_ARGUMENT, "n is 0"),
        ({"token_ids": IDS, "sampling_params": {"max_tokens": 0}}, Code.INVALID_ARGUMENT, "max_tokens is 0; it must be at least 1"),
        ({"token_ids": {"ids": [5] * 600}}, Code.INVALID_ARGUMENT, "context"),
        ({"token_ids": IDS, "sampling_params": {"n": 10_000_000}}, Code.INVALID_ARGUMENT, ""),
    ],
)
async def test_errors_have_a_status_and_a_sentence(request_: dict[str, Any], code: Any, part: str) -> None:
    async with connected() as (server, client):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.call("Generate", request_):
                pass
        assert caught.value.code() == code
        assert part in caught.value.details()
        await until_empty(server)


async def test_a_command_of_neither_kind_ends_the_call() -> None:
    async with connected() as (server, client):

        async def commands() -> AsyncIterator[Any]:
            yield S["GenerateCommand"](generate={"id": "a", "token_ids": IDS, "sampling_params": params(max_tokens=400)})
            yield S["GenerateCommand"]()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in client.call("GenerateStream", commands()):
                pass
        assert caught.value.code() == Code.INVALID_ARGUMENT
        assert caught.value.details() == "a command is neither generate nor abort; send one of them"
        await until_empty(server)


@pytest.mark.parametrize("name", ["Generate", "GenerateStream", "Tokenize"])
async def test_bytes_that_are_no_message_are_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def each() -> AsyncIterator[bytes]:
        yield b"\xff\xff"

    async with listening() as (server, address), grpc.aio.insecure_channel(address) as channel:
        call = getattr(channel, KINDS.get(name, "unary_unary"))(f"/{SERVICE}/{name}")
        started = call(each() if name == "GenerateStream" else b"\xff\xff")
        assert await started.code() == Code.INVALID_ARGUMENT
        assert "the bytes are not a valid frame.v1." in await started.details()
        await until_empty(server)
    assert not caplog.records  # what a client sends is no fault of the server


async def test_deadline_draining_and_full() -> None:
    async with connected({"scheduler": {"max_running_requests": 1, "max_queued_requests": 1}}) as (server, client):
        long = {"token_ids": IDS, "sampling_params": params(max_tokens=400)}
        await server.services.client.send_command("pause")
        with pytest.raises(grpc.aio.AioRpcError) as late:
            async for _ in client.call("Generate", long, timeout=0.3):
                pass
        assert late.value.code() == Code.DEADLINE_EXCEEDED
        await until_empty(server)
        held = [client.call("Generate", long) for _ in range(2)]
        async with asyncio.timeout(10):
            while server.services.client.num_outstanding < 2:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as full:
            async for _ in client.call("Generate", long):
                pass
        assert full.value.code() == Code.UNAVAILABLE
        assert dict(full.value.trailing_metadata())["retry-after"] == "1"
        for call in held:
            call.cancel()
        await until_empty(server)
        server.services.draining = True
        with pytest.raises(grpc.aio.AioRpcError) as draining:
            async for _ in client.call("Generate", long):
                pass
        assert "shutting down" in draining.value.details()


async def test_keys() -> None:
    async with listening({"server": {"api_key": "secret"}}) as (_, address), grpc.aio.insecure_channel(address) as channel:
        for key in (None, "wrong"):
            for name in ("ServerInfo", "Generate", "Abort"):
                call = Client(channel, key).call(name, {})
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read() if name == "Generate" else await call
                assert caught.value.code() == Code.UNAUTHENTICATED
        assert (await Client(channel, "secret").call("Tokenize", {"text": "hi"})).token_ids
        for name, request in (("Abort", {"all": True}), ("ServerInfo", {})):  # a user's key opens nothing of the operators'
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Client(channel, "secret").call(name, request)
            assert caught.value.code() == Code.PERMISSION_DENIED
        checked = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_admin_key_alone_opens_methods_of_operators() -> None:
    sections = {"server": {"api_key": "secret", "admin_key": "operator"}}
    async with listening(sections) as (_, address), grpc.aio.insecure_channel(address) as channel:
        client = Client(channel, "operator")
        assert (await client.call("ServerInfo", {})).ready
        await client.call("Abort", {"all": True})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("Tokenize", {"text": "hi"})
        assert caught.value.code() == Code.UNAUTHENTICATED


async def test_watches_without_a_key_are_limited_and_take_no_place_of_calls() -> None:
    """200 watches of one connection, more than calls may run: the other calls run, and so does
    another connection's watch.

    gRPC starts the calls of a channel in any order, so which of the watches are accepted is not
    fixed.
    """
    limits = {"server": {"api_key": "secret", "max_connections": 64}}
    async with listening(limits) as (_, address), grpc.aio.insecure_channel(address, options=[("a", 1)]) as hostile:
        request = health_pb2.HealthCheckRequest()
        watches = [health_pb2_grpc.HealthStub(hostile).Watch(request) for _ in range(200)]
        ends = await asyncio.gather(*(asyncio.wait_for(watch.read(), 20) for watch in watches), return_exceptions=True)
        refused = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
        assert len(ends) - len(refused) == MAX_WATCHES_PER_CONNECTION
        assert any("8 watches" in end.details() for end in refused)
        for end in refused:  # by the server's limit of streams (RST_STREAM), or by that of watches
            assert end.code() == (Code.RESOURCE_EXHAUSTED if "8 watches" in end.details() else Code.UNAVAILABLE)
        async with grpc.aio.insecure_channel(address, options=[("b", 2)]) as channel:
            replies = await asyncio.gather(*(Client(channel, "secret").call("Tokenize", {"text": "hi"}, timeout=20) for _ in range(32)))
            assert all(reply.token_ids for reply in replies)
            watch = health_pb2_grpc.HealthStub(channel).Watch(request)
            assert (await asyncio.wait_for(watch.read(), 20)).status == health_pb2.HealthCheckResponse.SERVING
        for each in watches:
            each.cancel()


async def test_watches_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "MAX_WATCH_TIME", 0.1)
    async with listening() as (server, address), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        async with asyncio.timeout(20):
            statuses = [reply.status async for reply in stub.Watch(health_pb2.HealthCheckRequest(service="none"))]
            assert statuses == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]
            monkeypatch.setattr(health_module, "MAX_WATCH_TIME", 60.0)
            watch = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            server.services.draining = True
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watch.cancel()


async def test_calls_are_bounded(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")

    async def nothing() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    limits = {"server": {"api_keys": str(keys), "max_connections": 8}}
    async with listening(limits) as (_, address), grpc.aio.insecure_channel(address) as channel:
        held = [Client(channel, "one").call("GenerateStream", nothing()) for _ in range(5)]
        ends = [asyncio.ensure_future(call.read()) for call in held]
        async with asyncio.timeout(20):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert (await Client(channel, "two").call("Tokenize", {"text": "hi"})).token_ids  # a key has half of the places
            assert sum(end.done() for end in ends) == 1
            with pytest.raises(grpc.aio.AioRpcError, match="max_connections"):
                await Client(channel, "one").call("Tokenize", {"text": "hi"})
            for call in held:
                call.cancel()
            await asyncio.wait(ends)
            while True:  # until the server has heard of it
                try:
                    await Client(channel, "one").call("Tokenize", {"text": "hi"})
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)


async def test_a_keys_share_is_one_over_http_and_grpc() -> None:
    limits = {"server": {"api_key": "secret", "max_requests_per_key": 3}}
    async with connected(limits, "secret") as (server, client):
        await server.services.client.send_command("pause")  # nothing ends by itself
        held = client.call("Generate", {"token_ids": IDS, "sampling_params": params(n=2)})
        async with asyncio.timeout(20):
            while server.services.client.num_outstanding < 2:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        body = {"input_ids": IDS["ids"], "sampling_params": {"max_new_tokens": 5, "n": 2}}
        reply = await server.post("/generate", body, x_api_key="secret")
        assert (reply.status, reply.json()["error"]["code"]) == (429, "too_many_requests_of_key")
        with pytest.raises(grpc.aio.AioRpcError, match="2 requests of this key are running or waiting, and it may have 3") as refused:
            await client.call("Generate", {"token_ids": IDS, "sampling_params": params(n=2)}).read()
        assert refused.value.code() == Code.RESOURCE_EXHAUSTED

        async def commands() -> AsyncIterator[Any]:
            for n, name in ((2, "two"), (4, "four")):
                yield S["GenerateCommand"](generate={"id": name, "token_ids": IDS, "sampling_params": params(n=n)})

        ends = {reply.id: reply.finish async for reply in client.call("GenerateStream", commands())}
        assert ends["two"].status == "RESOURCE_EXHAUSTED"
        assert (ends["four"].status, "and a key may have 3 at once" in ends["four"].error) == ("INVALID_ARGUMENT", True)
        held.cancel()
        await until_empty(server)
        await server.services.client.send_command("resume")
        assert (await server.post("/generate", body, x_api_key="secret")).status == 200  # all places came back


async def test_more_replies_than_wait_for_a_reader() -> None:
    async with connected() as (server, client):

        async def commands() -> AsyncIterator[Any]:
            for i in range(3 * MAX_REPLIES):
                yield S["GenerateCommand"](generate={"id": str(i), "token_ids": IDS, "sampling_params": {"top_p": 7}})

        call = client.call("GenerateStream", commands())
        assert len({reply.id async for reply in call}) == 3 * MAX_REPLIES
        await until_empty(server)


async def test_a_call_has_a_span() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from frame.entrypoints.tracing import Tracing
    from frame.interfaces.tracing import TracerContext
    from frame.plugins.tracers.otlp import OtlpTracer

    exporter = InMemorySpanExporter()
    async with connected() as (server, client):
        server.services.tracing = Tracing(type("Kept", (OtlpTracer,), {"make_exporter": lambda *_: exporter})(TracerContext()))
        assert [r async for r in client.call("Generate", {"token_ids": IDS, "sampling_params": params()})]
        server.services.tracing.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {f"{SERVICE}/Generate", "tokenize"}
    assert spans[f"{SERVICE}/Generate"].attributes["gen_ai.usage.output_tokens"] == 5


async def test_a_taken_port_is_an_error() -> None:
    async with listening() as (server, address):
        with pytest.raises(ConfigurationError, match="--grpc-port"):
            GrpcServer(server.services, "127.0.0.1", int(address.rpartition(":")[2]), server.app.bodies)


def test_description_is_that_of_the_proto(tmp_path: Path) -> None:
    folder = Path(schema_module.__file__).parent
    made = tmp_path / "made"
    compiler = [sys.executable, "-m", "grpc_tools.protoc"]
    subprocess.run([*compiler, "-I.", f"--descriptor_set_out={made}", "frame.proto"], cwd=folder, check=True)
    kept = descriptor_pb2.FileDescriptorSet.FromString((folder / schema_module.DESCRIPTION).read_bytes())
    assert kept == descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()), "frame.proto says how to compile it"


def test_a_real_server_by_reflection(checkpoint: Path) -> None:
    """As grpcurl does: the server says which services there are and what they look like."""
    with RunningServer(checkpoint, "--grpc-port", "0", "--max-model-len", "512", "--max-total-tokens", "1024") as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            ask = reflection_pb2.ServerReflectionRequest
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            listed, described = stub.ServerReflectionInfo(iter([ask(list_services=""), ask(file_containing_symbol=SERVICE)]))
            assert SERVICE in {service.name for service in listed.list_services_response.service}
            file = descriptor_pb2.FileDescriptorProto.FromString(described.file_descriptor_response.file_descriptor_proto[0])
            assert {method.name for method in file.service[0].method} == set(S.methods)
            replies = list(Client(channel).call("Generate", {"token_ids": IDS, "sampling_params": params()}))
            assert sum(len(reply.token_ids) for reply in replies) == 5
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        assert server.stop() == 0


async def test_a_client_that_does_not_read_is_given_up() -> None:
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with (
        listening({"server": {"max_unread_tokens": 200}}) as (server, address),
        grpc.aio.insecure_channel(address, options=narrow) as channel,
    ):
        wordy = {"token_ids": IDS, "sampling_params": params(n=16, max_tokens=480, logprobs=20)}
        call = Client(channel).call("Generate", wordy)
        replies = aiter(call)
        await anext(replies)
        await until_empty(server)  # though nothing more was read
        with pytest.raises(grpc.aio.AioRpcError, match="more than 200 of its tokens wait") as caught:
            async for _ in replies:
                pass
        assert caught.value.code() == Code.DEADLINE_EXCEEDED
        assert server.services.client.stats.generated_tokens < 16 * 480


async def test_the_model_may_be_an_adapter(tmp_path: Path) -> None:
    async with listening({"adapters": {"enabled": True}}) as (server, address), grpc.aio.insecure_channel(address) as channel:
        assert server.services.adapters is not None
        named = await server.services.adapters.load_folder("sql", str(make_adapter(tmp_path / "sql")))
        call = Client(channel).call("Generate", {"token_ids": IDS, "model": "sql", "sampling_params": {"max_tokens": 2}})
        assert [reply async for reply in call]
        assert dict(await call.trailing_metadata())["x-frame-adapter"] == f"sql@{named.version.digest[:12]}"
        assert [message.adapter for message in server.sent] == [named.version.digest]
        call = Client(channel).call("Generate", {"token_ids": IDS, "model": "other"})
        with pytest.raises(grpc.aio.AioRpcError) as error:
            [reply async for reply in call]
        assert error.value.code() is Code.NOT_FOUND
        endless = {"max_tokens": 400, "ignore_eos": True}
        cancelled = Client(channel).call("Generate", {"token_ids": IDS, "model": "sql", "sampling_params": endless})
        await cancelled.read()
        cancelled.cancel()
        while named.version.num_users:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)

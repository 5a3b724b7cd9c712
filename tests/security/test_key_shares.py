"""Keys share a full server: whatever two of them hold over HTTP and gRPC, a third is served."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from frame.entrypoints.grpc.schema import SERVICE, Schema
from frame.entrypoints.grpc.server import GrpcServer
from tests.entrypoints.inprocess import InProcess, serving

IDS = [5, 6, 7]
PLACES = {"max_running_requests": 4, "max_queued_requests": 20}
S = Schema()


async def status_over_http(server: InProcess, key: str) -> int:
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    return (await server.post("/generate", body, x_api_key=key)).status


async def status_over_grpc(channel: Any, key: str) -> int:
    writes, reads = S["GenerateRequest"].SerializeToString, S["GenerateReply"].FromString
    call = channel.unary_stream(f"/{SERVICE}/Generate", request_serializer=writes, response_deserializer=reads)
    request = S["GenerateRequest"](token_ids={"ids": IDS}, sampling_params={"max_tokens": 2, "ignore_eos": True})
    try:
        async for _ in call(request, metadata=[("x-api-key", key)]):
            pass
    except grpc.aio.AioRpcError as error:
        return {grpc.StatusCode.RESOURCE_EXHAUSTED: 429, grpc.StatusCode.UNAVAILABLE: 503}[error.code()]
    return 200


async def test_two_keys_cannot_fill_the_queue_for_a_third(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\nthree\n")
    async with serving({"server": {"api_keys": str(file)}, "scheduler": PLACES}) as server:
        grpc_server = GrpcServer(server.services, "127.0.0.1", 0, server.app.bodies)
        await grpc_server.start()
        async with grpc.aio.insecure_channel(grpc_server.address) as channel:
            await server.services.client.send_command("pause")
            asked = {}
            for key in ("one", "two", "three"):
                sending = [status_over_http(server, key) for _ in range(10)] + [status_over_grpc(channel, key) for _ in range(10)]
                asked[key] = [asyncio.create_task(each) for each in sending]
                if key == "three":
                    break
                await until_taken(server, asked)
                assert any(task.done() for task in asked[key])  # this key has all that it can get
            await until_taken(server, asked)
            await server.services.client.send_command("resume")
            statuses = {key: await asyncio.gather(*tasks) for key, tasks in asked.items()}
        await grpc_server.stop()
    served = {key: found.count(200) for key, found in statuses.items()}
    assert {status for found in statuses.values() for status in found} == {200, 429}  # no key sees a full queue
    assert served["one"] == 12  # half of all places
    assert served["three"] >= 4  # a sixth of the half that is divided among three keys
    assert sum(served.values()) == 24


async def until_taken(server: InProcess, asked: dict[str, list[asyncio.Task[int]]]) -> None:
    """Every request has been refused, or holds a place."""
    async with asyncio.timeout(20):
        while True:
            await asyncio.sleep(0.01)
            if sum(not task.done() for tasks in asked.values() for task in tasks) == server.services.client.num_outstanding:
                return

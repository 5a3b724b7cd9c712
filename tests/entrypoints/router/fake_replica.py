"""A replica that answers real HTTP, and a router over replicas. Used by the tests of the router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from frame.entrypoints.handoff import FleetKey
from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import HttpServer, bound_port
from frame.entrypoints.router.connections import open_client
from frame.entrypoints.router.metrics import RouterMetrics
from frame.entrypoints.router.proxy import Proxy
from frame.entrypoints.router.replicas import Backends
from frame.entrypoints.router.requests import read_prompt
from frame.interfaces.routing import RoutingContext, RoutingPolicy
from frame.parallel.replica_choice import ReplicaChooser
from frame.plugins.routing_policies.prefix_load import PrefixLoad

CACHE = 400  # prefixes of 256 bytes that a replica keeps


class FakeReplica:
    """A server with a prefix cache. A prompt's time follows from what the cache lacks. The kind
    `die` ends the server before an answer, `break` in the middle of one, `hang` never answers."""

    def __init__(self, slowness: float = 0.0) -> None:
        self.slowness, self.status, self.is_endless = slowness, 200, False
        self.token_pause = 0.002  # seconds
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.hits = self.blocks = self.requests = self.running = self.maximum = 0
        self.half_event = b""  # the last bytes before a `break`
        self.adapters: tuple[str, ...] = ()  # models that an adapter serves
        self.models: list[str] = []
        self.keys: list[str] = []
        self.targets: list[tuple[bytes, bytes]] = []
        self.addresses: list[list[str]] = []  # X-Forwarded-For of each request
        self.ports: set[int] = set()  # of connections
        self.url, self._server, self._task = "", None, None  # type: ignore[var-annotated]

    async def start(self) -> None:
        listener = bound_port("127.0.0.1", 0, "")
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = HttpServer(self, ConnectionLimits(256, 30.0))
        self._task = asyncio.create_task(self._server.serve([listener]))
        await self._server.listening.wait()

    async def kill(self) -> None:
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        self._server.should_exit = self._server.force_exit = True
        self._task.cancel()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message.get("body", b"")
        while message.get("more_body"):
            body += (message := await receive()).get("body", b"")
        if self.is_endless:
            await send({"type": "http.response.start", "status": self.status, "headers": [(b"content-encoding", b"gzip")]})
            while not self._server.should_exit:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                await asyncio.sleep(0)
            return
        if scope["path"] == "/health":
            await self._send(send, self.status if self.status != 429 else 200, b"{}")
            return
        self.requests += 1
        self.ports.add(scope["client"][1])
        self.running += 1
        self.maximum = max(self.maximum, self.running)
        headers = dict(scope["headers"])
        self.keys.append(headers.get(b"authorization", b"").decode())
        self.addresses.append([value.decode() for name, value in scope["headers"] if name == b"x-forwarded-for"])
        self.targets.append((headers[b"host"], scope["raw_path"] + b"?" + scope["query_string"]))
        try:
            await self._reply(scope, body, send)
        finally:
            self.running -= 1

    async def _reply(self, scope: Any, body: bytes, send: Any) -> None:
        if self.status != 200:
            await self._send(send, self.status, b'{"error": {"message": "full"}}')
            return
        if scope["path"].startswith("/v1/responses"):
            await self._send(send, 404, b'{"error": {"message": "no such response"}}')
            return
        prompt = read_prompt(body).blocks
        missing = [block for block in prompt if block not in self.cache]
        self.hits, self.blocks = self.hits + len(prompt) - len(missing), self.blocks + len(prompt)
        for block in prompt:
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > CACHE:
            self.cache.popitem(last=False)
        await asyncio.sleep(self.slowness * (1 + len(missing)))
        fields = json.loads(body) if body else {}
        kind, model = fields.get("kind"), fields.get("model", "")
        self.models.append(model)
        named = [(b"x-frame-adapter", f"{model}@1".encode())] if model in self.adapters else []
        if kind == "hang":
            await asyncio.sleep(60)
        if kind == "die":
            self._dying = asyncio.create_task(self.kill())
            await asyncio.sleep(60)
        stream = kind == "break" or b'"stream":true' in body.replace(b" ", b"")
        kind = "break" if kind == "break whole" else kind
        content_type = b"text/event-stream" if stream else b"application/json"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", content_type), *named]})
        for number in range(3):
            await send({"type": "http.response.body", "body": b'data: {"token": %d}\n\n' % number, "more_body": True})
            await asyncio.sleep(self.token_pause)
        if kind == "break":
            await send({"type": "http.response.body", "body": self.half_event, "more_body": True})
            await asyncio.sleep(0.002)
            self._dying = asyncio.create_task(self.kill())
            await asyncio.sleep(60)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _send(self, send: Any, status: int, body: bytes) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def routed(
    *replicas: FakeReplica,
    pause: float = 60.0,
    urls: tuple[str, ...] = (),
    policy: RoutingPolicy | None = None,
    key: FleetKey | None = None,
) -> AsyncIterator[tuple[httpx.AsyncClient, Backends, RouterMetrics]]:
    """A client of a router over the replicas, and over those at `urls`."""
    await asyncio.gather(*(replica.start() for replica in replicas))
    async with open_client() as behind:
        backends = Backends(
            [*urls, *(replica.url for replica in replicas)],
            behind,
            interval=0.2,
            chooser=ReplicaChooser(policy or PrefixLoad(RoutingContext())),
        )
        application = Proxy(backends, behind, max_body=1 << 20, pause=pause, key=key)
        listener = bound_port("127.0.0.1", 0, "")
        server = HttpServer(application, ConnectionLimits(512, 30.0))
        serving = asyncio.create_task(server.serve([listener]))
        await server.listening.wait()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=20, limits=httpx.Limits(max_connections=None)) as client:
            yield client, backends, application.metrics
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
    for replica in replicas:
        await replica.kill()


@asynccontextmanager
async def raw_replica(reply: bytes, is_closed: bool = False, further: bytes = b"", pause: float = 0.0) -> AsyncIterator[str]:
    """The URL of a replica that sends these bytes after each head of a request, and after a `pause`
    in seconds `further` ones. `is_closed`: then it closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                is_check = head.startswith(b"GET /health ")
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" if is_check else reply + (b"" if pause else further))
                await writer.drain()
                if pause and not is_check:
                    await asyncio.sleep(pause)
                    writer.write(further)
                if is_closed:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def check_reply(client: httpx.AsyncClient, path: str, body: dict[str, str], status: int | None, text: str) -> None:
    """A request, named `mine`, gets this status and text; None: the connection ends within it."""
    response = client.post(path, json=body, headers={"x-request-id": "mine"})
    if status is None:
        with pytest.raises(httpx.RemoteProtocolError):
            await response
        return
    reply = await response
    assert (reply.status_code, text in reply.text, "SECRET" in reply.text) == (status, True, False), reply.text

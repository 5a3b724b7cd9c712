"""`frame router`: requests that belong to one replica, and those that no replica gets."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.entrypoints.router.fake_replica import FakeReplica, routed


async def test_what_is_pinned_outlives_the_first_replica() -> None:
    """Files, batches and sessions are made on the first replica that serves: after an upgrade
    nothing runs at the first address. What another one has is found there."""

    class Keeper(FakeReplica):
        """Stores the bodies of POST, and answers 404 for others."""

        kept: set[bytes]

        async def _reply(self, scope: Any, body: bytes, send: Any) -> None:
            kept = self.__dict__.setdefault("kept", set())
            if scope["method"] == "POST" and scope["path"] == "/v1/files":
                kept.add(body)
            name = scope["path"].rpartition("/")[2].encode()
            await self._send(send, 200 if scope["path"] == "/v1/files" or name in kept else 404, self.url.encode())
    second, third = Keeper(), Keeper()
    async with routed(second, third, urls=("http://127.0.0.1:9",)) as (client, backends, _):
        await asyncio.gather(*(backends.check(backend, is_suspect=True) for backend in backends.all))
        assert (await client.post("/v1/files", content=b"a")).text == second.url
        backends.all[1].state = "draining"
        assert (await client.post("/v1/files", content=b"b")).text == third.url
        backends.all[1].state = "serving"
        for name, owner in ((b"a", second), (b"b", third)):
            reply = await client.get(f"/v1/files/{name.decode()}")
            assert (reply.status_code, reply.text) == (200, owner.url)
        assert (await client.get("/v1/batches/c")).status_code == 404
        for backend in backends.all:
            backend.state = "lost"
        assert (await client.post("/v1/files", content=b"c")).status_code == 503


async def test_a_websocket_is_refused() -> None:
    async with routed(FakeReplica()) as (client, _, _):
        reply = await client.get("/v1/realtime", headers={"connection": "upgrade", "upgrade": "websocket"})
        assert reply.status_code == 400
        assert "passes no WebSockets on" in reply.json()["error"]["message"]
        assert (await client.get("/v1/models", headers={"connection": "upgrade", "upgrade": "h2c"})).status_code == 200

"""Operators' routes: who may use them where, on which sockets, and what they answer."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.config.schema import FrameConfig
from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.http.app import App
from frame.entrypoints.http.operations import states
from frame.entrypoints.http.operations.admin import router
from frame.entrypoints.http.protocol.api_route import Access
from frame.entrypoints.http.protocol.listening import CONNECTIONS, AdminListener
from frame.entrypoints.keys import check_exposure
from tests.entrypoints.inprocess import InProcess, serving
from tests.entrypoints.serving import RunningServer

KEY = {"authorization": "Bearer user"}
ADMIN = {"authorization": "Bearer op-key"}


async def statuses(server: InProcess, **headers: str) -> set[int]:
    found = set()
    for operation in (*router.api_routes, *states.router.api_routes):
        if operation.access is not Access.ADMIN:
            continue
        for method in operation.methods:
            given = [(b"content-type", b"application/json"), *((k.encode(), v.encode()) for k, v in headers.items())]
            found.add((await server.request(method, operation.path, b"", given)).status)
    return found


async def test_open_server_has_them_for_everybody() -> None:
    async with serving() as server:
        assert await statuses(server) <= {200, 400, 409}  # no folder for profiles, none of weights


@pytest.mark.parametrize("more", [{}, {"admin_port": 0}, {"admin_socket": "/nowhere/s"}, {"admin_port": 0, "admin_key": "op-key"}])
async def test_a_users_key_opens_none(more: dict[str, Any]) -> None:
    async with serving({"server": {"api_key": "user", **more}}) as server:
        assert await statuses(server, **KEY) == {403}
        assert await statuses(server) == {401}
        assert await statuses(server, **ADMIN) <= {401, 403}
        assert (await server.request("GET", "/v1/models", headers=[(b"authorization", b"Bearer user")])).status == 200


async def test_admin_key_opens_them_and_nothing_else() -> None:
    async with serving({"server": {"api_key": "user", "admin_key": "op-key"}}) as server:
        assert await statuses(server) == await statuses(server, **KEY) == {401}
        assert await statuses(server, **ADMIN) <= {200, 400, 409}
        assert (await server.request("GET", "/v1/models", headers=[(b"authorization", b"Bearer op-key")])).status == 401
        info = await server.request("GET", "/server_info", headers=[(b"authorization", b"Bearer op-key")])
        assert b"op-key" not in info.body
        assert b'"user"' not in info.body.replace(b'"user":', b"")


async def test_own_listener_serves_nothing_else() -> None:
    async with serving({"server": {"api_key": "user", "admin_port": 0}}) as server:
        server.app = App(server.services, is_admin=True)
        assert await statuses(server) <= {200, 400, 409}
        assert (await server.request("GET", "/metrics")).status == 200
        assert (await server.request("GET", "/health/ready")).status == 200
        assert (await server.post("/generate", {"text": "x"})).status == 404


async def test_profile_needs_a_folder_and_a_bound() -> None:
    async with serving() as server:
        refused = await server.request("POST", "/start_profile")
        assert (refused.status, "--profile-dir" in refused.body.decode()) == (409, True)
        for steps in (0, -1, 10**9):
            assert (await server.post("/start_profile", {"num_steps": steps})).status == 400


@pytest.mark.parametrize(
    ("server", "part"),
    [({"admin_port": 1, "admin_host": "0.0.0.0"}, "admin key"), ({"admin_key": " "}, "server.admin_key is empty")],
)
def test_exposed_without_a_key_is_refused(server: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigurationError, match=part):
        check_exposure(FrameConfig.model_validate({"server": server}).server)


def test_socket_file_is_private_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "admin"
    first = AdminListener(ServerSection(admin_socket=str(path)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.sockets[0].listen()
    with pytest.raises(ConfigurationError, match="choose another --admin-socket"):
        AdminListener(ServerSection(admin_socket=str(path)))
    first.sockets[0].close()  # as a killed server leaves it
    second = AdminListener(ServerSection(admin_socket=str(path)))
    second.close()
    assert not path.exists()
    with pytest.raises(ConfigurationError, match="choose another --admin-socket"):
        AdminListener(ServerSection(admin_socket=str(tmp_path / "no" / "folder")))
    assert AdminListener(ServerSection()).sockets == []


async def test_too_many_connections_name_the_listeners_own_bound() -> None:
    async def read(each: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
        return await asyncio.wait_for(each[0].read(), 30)

    async with serving() as server:
        listener = AdminListener(ServerSection(admin_port=0, max_connections=4096))
        listener.start(server.app)
        port = listener.sockets[0].getsockname()[1]
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(CONNECTIONS + 1)]
        try:
            reply = await read(opened[-1])
            assert reply.startswith(b"HTTP/1.1 503")
            assert f"{CONNECTIONS} connections are open, all that the admin listener takes".encode() in reply
        finally:
            for _, writer in opened:
                writer.close()
            await listener.stop()
            listener.close()


def test_both_listeners_of_a_real_server(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "admin"
    flags = ("--api-key", "user", "--admin-port", "0", "--admin-socket", str(path), "--max-model-len", "512", "--max-total-tokens", "1024")
    with RunningServer(checkpoint, *flags) as server:
        url = next(line.split()[-1] for line in server.lines if "admin routes on http" in line)
        for client in (httpx.Client(base_url=url), httpx.Client(base_url="http://x", transport=httpx.HTTPTransport(uds=str(path)))):
            with client:
                assert client.post("/flush_cache").json()["success"]
                assert client.get("/server_info").json()["max_total_tokens"] == 1024
                assert client.get("/v1/models").status_code == 404
        assert httpx.post(server.url + "/flush_cache", headers=KEY).status_code == 403
        assert httpx.get(server.url + "/v1/models", headers=KEY).status_code == 200
        assert server.stop() == 0
    assert not path.exists()

"""The page's live data: what it tells of requests, who reads it, and that pages share it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from frame.entrypoints.http.operations import cache_feed, live_feed
from tests.entrypoints.inprocess import InProcess, serving
from tests.security.test_totals import BOB, keys

BODY = {"text": "a prompt " * 30, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The engine's commands so far."""
    from frame.entrypoints.engine_client.commands import EngineCommands

    actions: list[str] = []
    send = EngineCommands.send_command

    async def record(self: EngineCommands, action: Any, arguments: dict[str, Any]) -> Any:
        actions.append(action)
        return await send(self, action, arguments)

    monkeypatch.setattr(EngineCommands, "send_command", record)
    return actions


async def live(server: InProcess, **headers: str) -> Any:
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    return (await server.request("GET", "/page/live.json", b"", pairs)).json()


async def live_with(server: InProcess, count: int, **headers: str) -> Any:
    """The data once the engine has so many requests."""
    for _ in range(3000):  # each read asks the engine anew
        if len((shown := await live(server, **headers))["requests"]) >= count:
            return shown
        await asyncio.sleep(0.01)
    raise AssertionError("the engine did not get the requests")


async def test_many_pages_share_one_reply(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "SHARED_SECONDS", 60.0)
    monkeypatch.setattr(cache_feed, "SHARED_SECONDS", 60.0)
    async with serving() as server:
        every = await asyncio.gather(*(live(server) for _ in range(10)))
        assert all(each == every[0] for each in every)
        await asyncio.gather(*(server.request("GET", "/page/cache.json") for _ in range(10)))
        assert asked == ["outline_requests", "outline_cache"]


async def test_requests_and_their_phases_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "SHARED_SECONDS", 0.0)
    async with serving() as server:
        assert (await server.post("/pause_generation", {})).status == 200
        requests = [asyncio.create_task(server.post("/generate", BODY)) for _ in range(3)]
        shown = await live_with(server, 3)
        assert shown["phases"]["queued"] == 3
        assert {request["phase"] for request in shown["requests"]} == {"queued"}
        assert all(request["rid"] for request in shown["requests"])
        assert shown["tenants"] == [{"tenant": "", "running": 0, "waiting": 3, "pages": 0}]
        assert (await server.post("/continue_generation", {})).status == 200
        assert {reply.status for reply in await asyncio.gather(*requests)} == {200}
        shown = await live(server)
        assert shown["requests"] == [] and not any(shown["phases"].values())
        assert server.services.history is not None
        server.services.history.take_sample(1e6)
        latency = (await live(server))["latency"]
        assert latency["ttft"][3] == 3 and latency["ttft"][0] > 0


async def test_history_is_kept_by_the_server() -> None:
    async with serving() as server:
        assert server.services.history is not None
        for second in range(3):
            server.services.history.take_sample(float(second))
        for _ in range(2):  # a page that is opened again
            told = (await server.request("GET", "/page/history.json")).json()
            assert (len(told["rows"]), told["sample"], told["interval"]) == (3, 3, 5.0)
            assert len(told["columns"]) == len(told["rows"][0])
            assert told["rows"][0][told["columns"].index("ttft_p50")] is None


async def test_a_key_of_several_reads_no_history_and_no_requests(tmp_path: Path) -> None:
    async with serving(keys(tmp_path, "alice-key", "bob-key")) as server:
        assert server.services.history is not None
        server.services.history.take_sample(1.0)
        assert (await server.request("GET", "/page/history.json", b"", BOB)).json()["rows"] == []
        assert (await server.request("GET", "/page/history.json")).status == 401
        assert {name for name, value in (await live(server, authorization="Bearer bob-key")).items() if value is not None} == {"time"}


async def test_holders_of_shared_keys_read_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "SHARED_SECONDS", 0.0)
    async with serving(keys(tmp_path, "alice-key", "bob-key", share_cache=True, admin_key="operator")) as server:
        assert (await server.request("POST", "/pause_generation", b"{}", [(b"authorization", b"Bearer operator")])).status == 200
        request = asyncio.create_task(server.post("/generate", {**BODY, "rid": "alice-s-secret"}, authorization="Bearer alice-key"))
        shown = await live_with(server, 1, authorization="Bearer bob-key")
        assert shown["phases"]["queued"] == 1
        assert "secret" not in str(shown)
        assert {(each["rid"], each["tenant"]) for each in shown["requests"]} == {("", "")}
        assert (await server.request("POST", "/continue_generation", b"{}", [(b"authorization", b"Bearer operator")])).status == 200
        assert (await request).status == 200


async def test_cached_runs_of_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_feed, "SHARED_SECONDS", 0.0)
    async with serving(keys(tmp_path, "alice-key", "bob-key")) as server:
        short = {**BODY, "sampling_params": {"max_new_tokens": 2}}
        assert (await server.post("/generate", short, authorization="Bearer alice-key")).status == 200
        assert (await server.request("GET", "/page/cache.json", b"", BOB)).json()["runs"] == []
        alice = [(b"authorization", b"Bearer alice-key")]
        assert {(run["text"], run["tenant"]) for run in (await server.request("GET", "/page/cache.json", b"", alice)).json()["runs"]} == {
            ("", "")
        }


async def test_pages_of_a_dead_engine_get_an_error_at_once(asked: list[str]) -> None:
    async with serving() as server:
        server.services.client.dead_reason = "the engine ended"  # type: ignore[misc]
        replies = await asyncio.gather(*(server.request("GET", "/page/cache.json") for _ in range(10)))
        assert {reply.status for reply in replies} == {503}
        shown = await live(server)
        assert (shown["problem"], shown["requests"]) == ("the engine ended", [])
        assert asked == []

"""Replicas that join and leave a router: by a file, a DNS name and the admin listener; and replicas
that are slow against the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import socket
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from frame.core.errors import ConfigError
from frame.entrypoints.cli.main import cli
from frame.entrypoints.http.protocol.connections import ConnectionLimits
from frame.entrypoints.http.protocol.listening import HttpServer, bound_port
from frame.entrypoints.keys import AdminKey
from frame.entrypoints.router import first_bytes, replicas
from frame.entrypoints.router.admin import MAX_BODY, AdminApp
from frame.entrypoints.router.discovery import MAX_REPLICAS, Source, check_url, watch_sources
from frame.entrypoints.router.first_bytes import FirstBytes, judge_slowness
from frame.entrypoints.router.replicas import Backends
from frame.interfaces.routing import RoutingRequest
from tests.entrypoints.router.fake_replica import FakeReplica, routed
from tests.entrypoints.router.test_moving import CHAT, KEY, FramedReplica, tokens, whole
from tests.entrypoints.serving import RunningRouter


def states(backends: Backends) -> dict[str, str]:
    return {backend.url: backend.state for backend in backends.all}


async def reach(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.01)


async def test_a_file_names_replicas_that_come_and_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Requests go to the replicas that are named and ready. A replica that is no longer named
    leaves when its requests have ended; a file that cannot be read changes nothing."""
    caplog.set_level(logging.INFO)
    first, second = FakeReplica(), FakeReplica(slowness=0.3)
    file = tmp_path / "replicas"

    def write(text: str) -> None:
        (tmp_path / "new").write_bytes(text.encode("latin-1"))
        (tmp_path / "new").replace(file)

    def num_problems() -> int:
        return sum("stay" in record.message for record in caplog.records)

    async with routed() as (client, backends, metrics):
        await asyncio.gather(first.start(), second.start())
        write(f"# ours\n\n{first.url}/\n{first.url}  # twice\nhttp://127.0.0.1:9\n")
        tasks = [asyncio.create_task(backends.watch()), asyncio.create_task(watch_sources([Source(str(file))], 0.05, backends.update, {}))]
        await reach(lambda: states(backends) == {first.url: "serving", "http://127.0.0.1:9": "joining"})
        assert (await client.get("/health")).json()["replicas"] == {first.url: "ok", "http://127.0.0.1:9": "joining"}
        write(f"{first.url}\n{second.url}\n")
        await reach(lambda: states(backends) == {first.url: "serving", second.url: "serving"})
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json={"n": n}) for n in range(12)))
        assert {reply.status_code for reply in replies} == {200}
        assert first.requests and second.requests
        running = [asyncio.create_task(client.post("/v1/chat/completions", json={"n": n})) for n in range(12)]
        await reach(lambda: second.running > 0)
        write(f"{first.url}\n")
        await reach(lambda: backends.find(second.url) is None or backends.find(second.url).state == "draining")  # type: ignore[union-attr]
        assert {reply.status_code for reply in await asyncio.gather(*running)} == {200}
        before = second.requests
        await reach(lambda: backends.find(second.url) is None)
        assert second.url not in metrics.render().decode()
        assert 'frame_router_replicas{state="serving"} 1.0' in metrics.render().decode()
        many = "".join(f"http://h:{n}\n" for n in range(1, 1200))
        for number, broken in enumerate(("", "ftp://x\n", "http://user:pw@host\n", "\xff\n", many), 1):
            write(broken)
            await reach(lambda number=number: num_problems() == number)
            assert states(backends) == {first.url: "serving"}, broken[:20]
        file.unlink()
        await reach(lambda: num_problems() == 6)
        await asyncio.sleep(0.15)
        assert states(backends) == {first.url: "serving"}
        assert num_problems() == 6  # each once
        assert (await client.post("/v1/chat/completions", json={"n": 1})).status_code == 200
        assert second.requests == before
        for task in tasks:
            task.cancel()
    await asyncio.gather(first.kill(), second.kill())


async def test_a_half_written_file_makes_no_replica_leave() -> None:
    """An address that one reading lacks stays; a new one counts at once."""
    readings = iter([["a"], None, ["b", "c"], ["c"], ["c"]])
    source: Any = SimpleNamespace(value="file", read=lambda: asyncio.sleep(0, next(readings, None)))
    named = list[list[str]]()
    task = asyncio.create_task(watch_sources([source], 0.0, lambda _, urls: named.append(sorted(urls)), {"file": ["a", "b"]}))
    await reach(lambda: len(named) == 4)
    task.cancel()
    assert named == [["a", "b"], ["a", "b", "c"], ["b", "c"], ["c"]]


async def test_a_name_has_a_replica_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] | Exception = ["10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1"]

    async def look_up(host: str, port: int, **_: Any) -> Any:
        assert (host, port) == ("frame.ns.svc", 30000)
        if isinstance(found, Exception):
            raise found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    source = Source("http://frame.ns.svc:30000")
    assert await source.read() == ["http://10.0.0.1:30000", "http://10.0.0.2:30000", "http://[fd00::1]:30000"]
    found = socket.gaierror(-2, "Name or service not known")
    assert await source.read() is None


async def test_health_checks_outlive_what_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A name that no client can look up, and an error of a source: the other replicas are checked
    on."""
    replica = FakeReplica()
    async with routed(replica) as (_, backends, _):
        bad = backends.add("http://xn--a:1", "a file")
        source = Source(str(tmp_path))
        source.read = lambda: 1 / 0  # type: ignore[assignment]
        watching = asyncio.gather(backends.watch(), watch_sources([source], 0.05, backends.update, {}))
        replica.status = 503
        await reach(lambda: states(backends)[replica.url] == "lost")
        replica.status = 200
        await reach(lambda: states(backends)[replica.url] == "serving")
        assert bad.state == "joining"
        assert not watching.done()
        assert any("is read again" in record.message for record in caplog.records)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_a_router_stops_without_an_error() -> None:
    router = RunningRouter("http://127.0.0.1:9", flags=("--admin-port", "0", "--admin-key", "the admin key"))
    assert router.stop() == 0
    router._reader.join(10)  # the whole log
    assert not [line for line in router.lines if "ERROR" in line or "Traceback" in line]


@pytest.mark.parametrize(
    "wrong",
    ["http://name:1?", "http://name:1#f", "http://[zz]:1", "http://xn--a:1", "http://\u2488:1", "http://h\u00f6st:1", " http://name:1"],
)
def test_addresses_that_are_none(wrong: str) -> None:
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        check_url(wrong)


class SilentReplica(FakeReplica):
    """A replica whose health checks are answered while `speaks` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.speaks, self.checks = asyncio.Event(), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/health":
            self.checks += 1
            with contextlib.suppress(asyncio.CancelledError):
                await self.speaks.wait()
        await super().__call__(scope, receive, send)


@pytest.fixture
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "MIN_SILENCE", 0.25)


async def test_a_replica_that_sends_is_not_lost() -> None:
    """Checks that end without an answer tell nothing while answers come, or where the router itself
    was late."""
    replica = SilentReplica()
    async with routed(replica) as (client, backends, _):
        backend = backends.all[0]
        checks = [asyncio.create_task(backends.check(backend)) for _ in range(3)]
        await asyncio.sleep(0.5)
        assert (await client.post("/generate", json={"stream": True})).status_code == 200
        await asyncio.gather(*checks)
        assert (backend.state, backend.failed_checks) == ("serving", 0)
        backend.heard = -1.0
        late = asyncio.create_task(backends.check(backend))
        await reach(lambda: replica.checks == 4)
        asyncio.get_running_loop().call_later(0.3, replica.speaks.set)
        time.sleep(1.7)  # noqa: ASYNC251 - the router is late
        await late
        assert (backend.state, backend.failed_checks, backend.check_time > 1.7) == ("serving", 0, True)


@pytest.mark.usefixtures("short_silence")
async def test_a_late_answer_is_an_answer() -> None:
    """A replica is lost after two checks without an answer. The answer to the first one, which
    comes while the second one waits, counts; later checks wait for longer."""
    replica = SilentReplica()
    async with routed(replica) as (_, backends, _):
        backend = backends.all[0]
        await backends.check(backend)
        assert (backend.state, backend.failed_checks, len(backend.checks)) == ("serving", 1, 1)
        second = asyncio.create_task(backends.check(backend))
        await reach(lambda: replica.checks == 2)
        replica.speaks.set()
        await second
        assert (backend.state, backend.failed_checks) == ("serving", 0)
        replica.speaks.clear()
        backend.check_time, began = 0.15, time.monotonic()
        await backends.check(backend)
        assert time.monotonic() - began > 0.55  # four times as long as answers take
        await backends.check(backend, is_suspect=True)  # a connection broke, which alone is no proof
        assert (backend.state, backend.was_silent) == ("lost", True)
        for _ in range(4):
            await backends.check(backend)
        assert len(backend.checks) <= replicas.MAX_CHECKS
        replica.speaks.set()
        await backends.check(backend)
        assert backend.state == "serving"


async def silence(silent: list[SilentReplica], backends: Backends) -> None:
    """Let the replicas answer checks, and then no more."""
    for replica in silent:
        replica.speaks.set()
    while any(backend.check_time < 0 or backend.failed_checks for backend in backends.all):
        await asyncio.gather(*(backends.check(backend) for backend in backends.all))
    for replica in silent:
        replica.speaks.clear()


@pytest.mark.usefixtures("short_silence")
async def test_when_all_are_silent_the_machine_is_late() -> None:
    """For a while; one of three that is silent is lost. The checks of requests whose connections
    broke at once are one."""
    three = [SilentReplica() for _ in range(3)]
    async with routed(*three) as (_, backends, _):
        await silence(three, backends)
        for _ in range(4):
            await asyncio.gather(*(backends.check(backend) for backend in backends.all))
        assert {backend.state for backend in backends.all} == {"serving"}
        for backend in backends.all:
            backend.silent_since -= 2 * replicas.MAX_SILENCE
        for replica in three[1:]:
            replica.speaks.set()
        first, before, turns = backends.all[0], three[0].checks, 0
        while first.state != "lost":
            await asyncio.gather(*(backends.check(backend) for backend in backends.all[1:]))
            await asyncio.gather(*(backends.check(first, is_suspect=True) for _ in range(40)))
            turns += 1
        assert three[0].checks <= before + turns


@pytest.mark.parametrize("wrong", ["https://name:1", "http://name/path", "ftp://name", "http://u:p@name:1", "http://a b"])
def test_sources_that_are_none(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--discover"):
        Source(wrong)


@asynccontextmanager
async def admin_of(backends: Backends) -> Any:
    listener = bound_port("127.0.0.1", 0, "")
    server = HttpServer(AdminApp(backends, AdminKey("the admin key")), ConnectionLimits(8, 5.0))
    task = asyncio.create_task(server.serve([listener]))
    await server.listening.wait()
    headers = {"authorization": "Bearer the admin key"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", headers=headers) as client:
        yield client
    server.should_exit = server.force_exit = True
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
async def test_operators_add_and_remove_replicas() -> None:
    """A removed replica's stream moves, and it stays away although its source still names it; one
    that is added again is back."""
    first, second = FramedReplica(1500), FramedReplica(1500)
    await asyncio.gather(first.start(), second.start())
    async with routed(key=KEY) as (client, backends, metrics), admin_of(backends) as admin:
        watching = asyncio.create_task(backends.watch())
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 503
        added = await admin.post("/replicas", json={"url": first.url + "/"})
        assert (added.status_code, added.json()) == (201, {"url": first.url, "state": "joining"})
        await reach(lambda: states(backends) == {first.url: "serving"})
        assert (await admin.post("/replicas", json={"url": first.url})).status_code == 200
        stream = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await reach(lambda: first.running == 1)
        backends.update("a file", [second.url])
        await reach(lambda: states(backends).get(second.url) == "serving")
        left = await admin.request("DELETE", "/replicas", json={"url": first.url})
        assert (left.status_code, left.json()["state"]) == (202, "draining")
        assert tokens((await stream).text) == whole(1500)
        assert 'cause="drained"} 1.0' in metrics.render().decode()
        await reach(lambda: [*states(backends)] == [second.url])
        assert (await admin.request("DELETE", "/replicas", json={"url": first.url})).status_code == 404
        await admin.post("/replicas", json={"url": first.url})
        await reach(lambda: states(backends).get(first.url) == "serving")
        await admin.request("DELETE", "/replicas", json={"url": second.url})
        backends.update("a file", [second.url])
        await asyncio.sleep(0.5)
        assert states(backends)[second.url] == "draining"
        shown = {each["url"]: each for each in (await admin.get("/replicas")).json()["replicas"]}
        assert (shown[second.url]["source"], shown[first.url]["source"], shown[first.url]["is_suspended"]) == ("a file", "admin", False)
        backends.update("a file", [])
        await reach(lambda: [*states(backends)] == [first.url])
        backends.update("a file", [second.url])
        await reach(lambda: states(backends).get(second.url) == "serving")
        watching.cancel()
    await asyncio.gather(first.kill(), second.kill())


async def test_the_admin_listener_refuses_others_and_nonsense() -> None:
    async with routed() as (client, backends, _), admin_of(backends) as admin:
        for key in ("", "Bearer", "Bearer another", "Basic dGhl"):
            refused = await admin.post("/replicas", json={"url": "http://a:1"}, headers={"authorization": key})
            assert (refused.status_code, "www-authenticate" in refused.headers) == (401, True)
        bad: list[tuple[str, str, bytes, int]] = [
            ("POST", "/replicas", b"", 400),
            ("POST", "/replicas", b"[]", 400),
            ("POST", "/replicas", b'{"url": 5}', 400),
            ("POST", "/replicas", b'{"url": "http://a:1", "weight": 2}', 400),
            ("POST", "/replicas", b'{"url": "http://a:99999"}', 400),
            ("POST", "/replicas", b'{"url": "file:///etc/passwd"}', 400),
            ("POST", "/replicas", b'{"url": "http://u:p@a:1"}', 400),
            ("POST", "/replicas", b"[" * 5000, 400),
            ("POST", "/replicas", b"\xff" * 10, 400),
            ("POST", "/replicas", b'"' + b"x" * MAX_BODY + b'"', 413),
            ("DELETE", "/replicas", b'{"url": "http://a:1"}', 404),
            ("PUT", "/replicas", b"{}", 405),
            ("GET", "/v1/models", b"", 404),
        ]
        for method, path, body, status in bad:
            reply = await admin.request(method, path, content=body)
            assert (reply.status_code, "message" in reply.json()["error"]) == (status, True), (method, path, body[:40], reply.text)
        assert backends.all == []
        assert (await client.get("/replicas")).status_code == 503  # the clients' own listener has no such route
        backends.update("a file", [f"http://10.1.{n >> 8}.{n & 255}:1" for n in range(MAX_REPLICAS)])
        full = await admin.post("/replicas", json={"url": "http://a:1"})
        assert (full.status_code, "remove one" in full.text) == (409, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--discover or --admin-port"),
        (("--admin-port", "0"), "--admin-key"),
        (("--admin-key", "x"), "--admin-port"),
        (("--discover", "https://name:1"), "http://NAME:PORT"),
        (("--discover", "replicas", "--decode", "http://a:1"), "--discover"),
        (("--replica", "http://a:1", "--max-replicas", "3"), "--max-replicas is for a target; name one with --target-ttft"),
        (("--replica", "http://a:1", "--target-ttft", "1", "--min-replicas", "9", "--max-replicas", "3"), "above --max-replicas 3"),
        (("--replica", "http://a:1", "--target-itl", "1"), "set FRAME_FLEET_KEY for the router and its replicas"),
    ],
)
def test_flags_that_do_not_fit(arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FRAME_ADMIN_KEY", raising=False)
    monkeypatch.delenv("FRAME_FLEET_KEY", raising=False)
    result = CliRunner().invoke(cli, ["router", *arguments])
    assert (result.exit_code, words in result.output) == (78, True), result.output


# slow replicas ------------------------------------------------------------------------------------


def fill(replica: FirstBytes, seconds: float, count: int = 16, start: float = 0.0) -> None:
    for _ in range(count):
        replica.finish(replica.start(start), start + seconds, has_answer=True)


def test_a_slow_replica_gets_less_and_a_very_slow_one_none() -> None:
    one, two, slow = FirstBytes(), FirstBytes(), FirstBytes()
    fill(one, 0.1)
    fill(two, 0.12)
    fill(slow, 0.38)
    assert judge_slowness([one, two, slow], 100.0) == []
    assert (one.factor, two.factor) == (1.0, 1.0)
    assert 3 < slow.factor < 4
    fill(slow, 2.0, 32)
    assert judge_slowness([one, two, slow], 100.0) == [slow]
    assert slow.suspended_until == 100.0 + first_bytes.SUSPENSION
    assert judge_slowness([one, two, slow], 101.0) == []
    fill(slow, 2.0, 8)
    assert judge_slowness([one, two, slow], 120.0) == [slow]  # it was tried again
    assert slow.suspended_until == 120.0 + 2 * first_bytes.SUSPENSION
    fill(slow, 0.1, 32)
    assert judge_slowness([one, two, slow], 200.0) == []
    assert slow.factor == 1.0


def test_one_that_never_answers_is_slow() -> None:
    """Its health checks succeed and no request of it ends: the time that they wait counts."""
    one, two, stuck = FirstBytes(), FirstBytes(), FirstBytes()
    fill(one, 0.1)
    fill(two, 0.1)
    numbers = [stuck.start(10.0) for _ in range(8)]
    assert judge_slowness([one, two, stuck], 10.05) == []
    assert judge_slowness([one, two, stuck], 12.0) == [stuck]
    for number in numbers:
        stuck.finish(number, 13.0, has_answer=False)
    assert stuck.typical(13.0) is None


def test_who_is_not_slow() -> None:
    """Small differences, few times, replicas that are all slow, and more than half of them."""
    one, two = FirstBytes(), FirstBytes()
    fill(one, 0.01)
    fill(two, 0.2)
    assert judge_slowness([one, two], 1.0) == []
    assert two.factor == 1.0  # twenty times as slow, and still fast
    three = FirstBytes()
    fill(three, 9.0, first_bytes.MIN_TIMES - 1)
    assert judge_slowness([one, two, three], 1.0) == []
    many = [FirstBytes() for _ in range(5)]
    for number, each in enumerate(many):
        fill(each, 0.1 if number in (0, 1, 2) else 30.0)
    many.append(FirstBytes())
    fill(many[-1], 30.0)
    assert len(judge_slowness(many, 1.0)) <= 3
    assert not many[0].suspended_until
    alone = FirstBytes()
    fill(alone, 30.0)
    assert judge_slowness([alone], 1.0) == []


@pytest.mark.slow
async def test_requests_avoid_a_slow_replica() -> None:
    """Over HTTP: one of three replicas has late first bytes. It gets less, then nothing, and is not
    the end of a request where it is the only one left."""
    draw = random.Random(3)
    replicas = [FakeReplica(), FakeReplica(), FakeReplica(slowness=1.5)]
    slow = replicas[2]
    async with routed(*replicas) as (client, backends, metrics):

        async def send() -> None:
            body = {"prompt": "".join(draw.choices("abc", k=40)), "stream": True}
            assert (await client.post("/v1/completions", json=body)).status_code == 200

        for _ in range(10):
            if backends.all[2].is_suspended:
                break
            await asyncio.gather(*(send() for _ in range(12)))
            backends.judge_slowness()
        assert backends.all[2].is_suspended
        assert f'frame_router_replica_suspended{{replica="{slow.url}"}} 1.0' in metrics.render().decode()
        before = slow.requests
        await asyncio.gather(*(send() for _ in range(24)))
        assert slow.requests == before
        assert backends.choose(RoutingRequest(), (0, 1)) is backends.all[2]
        assert json.loads((await client.get("/health")).text)["replicas"][slow.url] == "ok"

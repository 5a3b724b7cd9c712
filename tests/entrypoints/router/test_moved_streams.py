"""Three servers of the embedded model in float32, as processes, behind `frame router`: streams of
all routes and features that move, while servers are killed, stopped and drained. Every text, id,
usage and finish reason is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.router.fleet import PATIENCE, FleetRouter, Stream, make_streams, read_all, start_server
from tests.entrypoints.serving import RunningServer, wait_until

KINDS, STREAMS = 16, 64  # one stream of each kind in the short form, four in the long one
LENGTH = 40  # tokens
DRAFTS = ("--speculative-algorithm", "ngram", "--speculative-num-steps", "3")
ADMIN = "the key of the operators"


def make_compiling() -> list[Stream]:
    """Short streams that compile the grammars of the others."""
    return [stream for stream in make_streams(KINDS, 4) if "response_format" in stream.body or "tools" in stream.body]


class Fleet:
    """Three servers, and a router that finds them by a file. `expected`: the contents of `streams`
    from one server without drafts. `has_drafts`: of the servers."""

    def __init__(self, file: Path, *flags: str, streams: int = STREAMS, has_drafts: bool = False) -> None:
        self._server_flags = DRAFTS if has_drafts else ()
        with ThreadPoolExecutor(3) as pool:
            self.servers = list(pool.map(lambda _: start_server(0, *self._server_flags), range(3)))
        file.write_text("".join(f"{server.url}\n" for server in self.servers))
        self.router = FleetRouter("--discover", str(file), "--admin-port", "0", "--admin-key", ADMIN, *flags)
        self.doomed: FleetRouter | None = None  # one that ends while half of the streams use it
        self.streams = make_streams(streams, LENGTH)
        with ThreadPoolExecutor(3) as pool:  # the others start their processes for grammars meanwhile
            warming = [pool.submit(read_all, make_compiling(), server.url) for server in self.servers[1:]]
            self.expected = self._expect(has_drafts)
            for task in warming:
                task.result()

    def _expect(self, has_drafts: bool) -> list[Any]:
        if not has_drafts:
            return read_all(self.streams, self.servers[0].url)
        with start_server() as plain:
            return read_all(self.streams, plain.url)

    def disturb(self, act: Callable[[], Any], share: float) -> None:
        """Read all streams, and act when this share of their events has come."""
        total, seen, acted = sum(len(stream.events) for stream in self.streams), [0], threading.Event()

        def count() -> None:
            seen[0] += 1
            if seen[0] >= share * total:
                acted.set()

        with ThreadPoolExecutor(len(self.streams)) as pool:
            tasks = [pool.submit(self._read, number, count) for number in range(len(self.streams))]
            assert acted.wait(PATIENCE)
            act()
            found = [task.result(PATIENCE).content for task in tasks]
        for stream, content, expected in zip(self.streams, found, self.expected, strict=True):
            assert content == expected, (stream.path, stream.body)

    def _read(self, number: int, on_event: Callable[[], None]) -> Stream:
        """Read a stream; half of them through the other router, until that ends."""
        stream, doomed = self.streams[number], self.doomed
        if doomed is not None and number % 2:
            with contextlib.suppress(httpx.TransportError):
                return stream.read(doomed.url, on_event)
        return stream.read(self.router.url, on_event)

    def ask(self, method: str, server: RunningServer) -> None:
        """Add or remove a server."""
        url = next(line.split()[-1] for line in self.router.lines if "admin routes on" in line)
        headers = {"authorization": f"Bearer {ADMIN}"}
        assert httpx.request(method, f"{url}/replicas", json={"url": server.url}, headers=headers, timeout=30).is_success

    def states(self) -> list[str]:
        return [*self.router.get("/health")["replicas"].values()]

    def restart(self, number: int) -> None:
        """Start a server again at its address."""
        port = int(self.servers[number].url.rpartition(":")[2])
        self.servers[number] = start_server(port, *self._server_flags)

    def stop(self) -> None:
        for process in (self.router, *self.servers):
            process.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet") / "replicas", streams=KINDS)
    yield fleet
    fleet.stop()


def terminate(server: RunningServer) -> None:
    """SIGTERM: its streams move, so that it need not finish them."""
    started = time.monotonic()
    os.kill(server.process.pid, signal.SIGTERM)
    assert server.wait(PATIENCE) == 0
    assert time.monotonic() - started < 20  # `server.drain_timeout` is 30 s


def pause(server: RunningServer) -> None:
    """SIGSTOP for five seconds: its health checks fail, and its later answers reach no client."""
    os.kill(server.process.pid, signal.SIGSTOP)
    time.sleep(5)
    os.kill(server.process.pid, signal.SIGCONT)


@pytest.mark.slow
def test_streams_outlive_their_servers(fleet: Fleet) -> None:
    """One is removed by the operator, another one ends, and after the first one is back the third
    one is killed."""
    first, second, third = fleet.servers
    fleet.disturb(lambda: fleet.ask("DELETE", first), 0.2)
    removed = fleet.router.moves("drained")
    assert removed > 0
    fleet.disturb(lambda: terminate(second), 0.3)
    assert fleet.router.moves("drained") > removed
    fleet.ask("POST", first)
    wait_until(lambda: fleet.states().count("ok") == 2)
    fleet.disturb(third.kill, 0.3)
    assert fleet.router.moves("lost") > 0
    assert fleet.router.moves("failed") == 0
    wait_until(lambda: first.get("/server_info")["outstanding"] == 0)
    assert not [line for line in (*fleet.router.lines, *first.lines) if "ERROR" in line or "Traceback" in line]


class Rounds:
    """Rounds of disturbances, and the longest pause of a stream in each. `record`: a file with all
    rounds as JSON, written after each."""

    def __init__(self, fleet: Fleet, record: Path) -> None:
        self.fleet, self.record = fleet, record
        self.rounds: list[dict[str, Any]] = []

    def run(self, name: str, act: Callable[[], Any], share: float, restore: Callable[[], Any]) -> None:
        """Disturb the streams once, and wait until the fleet is whole again."""
        before = {cause: self.fleet.router.moves(cause) for cause in ("lost", "drained")}
        self.fleet.disturb(act, share)
        moved = {cause: self.fleet.router.moves(cause) - count for cause, count in before.items()}
        pauses = sorted(stream.pause for stream in self.fleet.streams)
        entry = {"round": len(self.rounds), "act": name, "share": round(share, 3), "moved": moved, "load": os.getloadavg()[0],
                 "pause_p50": round(pauses[len(pauses) // 2], 3), "pause_max": round(pauses[-1], 3)}  # fmt: skip
        restore()
        wait_until(lambda: self.fleet.states() == ["ok"] * 3)
        assert self.fleet.router.moves("failed") == 0
        self.rounds.append(entry)
        self.record.write_text(json.dumps(self.rounds))
        print(entry, flush=True)


@pytest.mark.soak
def test_rounds_of_every_disturbance(tmp_path: Path) -> None:
    """FRAME_ROUNDS (100) rounds each of a drain by the operator, SIGTERM, SIGKILL, SIGSTOP of one
    of three servers, and of SIGKILL of one of two routers, whose clients send their requests again
    to the other one; and as many undisturbed ones. FRAME_ROUNDS_JSON: the file of the record.
    ROUNDS_SEED (7): of the choices. FRAME_HEALTH_INTERVAL (0.2): more where other work takes the
    processors. FRAME_DRAFTS: 1 for servers with `ngram` drafts, whose streams are those of a server
    without."""
    number, draw = int(os.environ.get("FRAME_ROUNDS", "100")), random.Random(int(os.environ.get("ROUNDS_SEED", "7")))
    often = ("--health-interval", os.environ.get("FRAME_HEALTH_INTERVAL", "0.2"))
    fleet = Fleet(tmp_path / "replicas", *often, has_drafts=os.environ.get("FRAME_DRAFTS") == "1")
    rounds = Rounds(fleet, Path(os.environ.get("FRAME_ROUNDS_JSON", str(tmp_path / "rounds.json"))))
    routers: list[FleetRouter] = []
    acts: dict[str, Callable[[RunningServer], Any]] = {
        "drain": partial(fleet.ask, "DELETE"), "SIGTERM": terminate, "SIGKILL": RunningServer.kill, "SIGSTOP": pause,
    }  # fmt: skip

    def kill_router() -> None:
        routers[-1].process.kill()
        routers[-1].process.wait()

    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(fleet.stop)
        stack.callback(lambda: [router.stop() for router in routers])
        for _ in range(number):
            rounds.run("none", lambda: None, draw.uniform(0.05, 0.8), lambda: None)
            for name, act in acts.items():
                victim = draw.randrange(3)
                server = fleet.servers[victim]
                restore = {"drain": partial(fleet.ask, "POST", server), "SIGSTOP": lambda: None}.get(name, partial(fleet.restart, victim))
                rounds.run(name, partial(act, server), draw.uniform(0.05, 0.8), restore)
            routers.append(FleetRouter("--discover", str(tmp_path / "replicas"), *often))
            wait_until(lambda: [*routers[-1].get("/health")["replicas"].values()] == ["ok"] * 3)
            fleet.doomed = routers[-1]
            rounds.run("router", kill_router, draw.uniform(0.05, 0.8), lambda: None)
            fleet.doomed = None


def test_streams_are_compared_as_they_should_be() -> None:
    """A token, role, usage or finish reason more, less or other is found."""
    stream = Stream("/v1/chat/completions", {})

    def chunk(**fields: Any) -> dict[str, Any]:
        return {"id": "a", "created": 1, "choices": [{"index": 0, "finish_reason": None, **fields}]}

    events: list[Any] = [
        chunk(delta={"role": "assistant", "content": ""}),
        chunk(delta={"content": "x"}, token_ids=[4]),
        chunk(delta={}, finish_reason="length"),
        {**chunk(), "choices": [], "usage": {"completion_tokens": 1}},
        "[DONE]",
    ]
    stream.events = events
    expected = stream.content
    for changed in (
        [events[0], *events],
        [events[0], *events[2:]],
        [*events[:2], events[1], *events[2:]],
        events[:2] + events[3:],
        events[:-2] + events[-1:],
        events[:-1],
    ):
        stream.events = changed
        assert stream.content != expected, changed

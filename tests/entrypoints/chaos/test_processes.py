"""Processes die and hang under 64 streams: every request completes with the text that it would have had, and nothing is left over."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from tests.entrypoints.chaos.storm import Reply, Storm, processes, restarts, strikes
from tests.entrypoints.serving import RunningServer, wait_until

FLAGS = (
    *("--max-model-len", "512", "--max-total-tokens", "8192", "--max-running-requests", "32", "--detokenizer-workers", "1"),
    *("--tokenizer-workers", "1", "--heartbeat-timeout", "3", "--max-restarts", "10000"),
)
NAMES = ["scheduler", "detokenizer", "tokenizer-0"]
FEW = [
    ("scheduler", signal.SIGKILL, 300),
    ("scheduler", signal.SIGSTOP, 40),
    ("detokenizer", signal.SIGKILL, 600),
    ("tokenizer-0", signal.SIGKILL, 0),
]


@pytest.fixture(scope="module")
def stormy(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, *FLAGS, env={"FRAME_FAKE_STEP": "0.004"}) as running:
        yield running


@pytest.fixture(scope="module")
def storm() -> Storm:
    return Storm(64, 60)


@pytest.fixture(scope="module")
def calm(stormy: RunningServer, storm: Storm) -> list[Reply]:
    """What the requests yield when nothing happens."""
    replies = storm(stormy)
    assert not any(reply.error for reply in replies)
    return replies


def settle(server: RunningServer) -> None:
    """All processes are there, and no page, lock, slot or process is left over."""
    wait_until(server.ready, 60)
    wait_until(lambda: server.get("/server_info")["outstanding"] == 0)
    wait_until(lambda: server.get("/server_info")["running"] + server.get("/server_info")["waiting"] == 0)
    assert server.post("/check_integrity", {}).status_code == 200
    assert server.post("/flush_cache", {}).status_code == 200
    assert server.get("/server_info")["used_pages"] == 0
    wait_until(lambda: sorted(processes(server)) == sorted(NAMES))
    for child in psutil.Process(server.process.pid).children(recursive=True):
        assert child.status() != psutil.STATUS_ZOMBIE


def weather(server: RunningServer, storm: Storm, calm: list[Reply], name: str, how: signal.Signals, moment: int) -> None:
    before = restarts(server)
    replies = storm(server, {moment: lambda: processes(server)[name].send_signal(how)})
    for number, (reply, expected) in enumerate(zip(replies, calm, strict=True)):
        assert reply == expected, (number, storm.bodies[number])
    wait_until(lambda: restarts(server) > before)  # a tokenizer may die when it has nothing to do
    settle(server)


@pytest.mark.parametrize(("name", "how", "moment"), FEW)
def test_nothing_is_lost(stormy: RunningServer, storm: Storm, calm: list[Reply], name: str, how: signal.Signals, moment: int) -> None:
    weather(stormy, storm, calm, name, how, moment)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(20))
def test_nothing_is_lost_in_two_hundred_rounds(stormy: RunningServer, storm: Storm, calm: list[Reply], part: int) -> None:
    last = storm.num_events * 3 // 4  # events of a calm storm; one that is struck may have fewer
    for name, how, moment in islice(strikes(part, NAMES, last), 10):
        weather(stormy, storm, calm, name, how, moment)

"""Processes die and hang under 64 streams: every request completes with the text that it would have
had, and nothing is left over."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest

from tests.entrypoints.chaos.storm import Storm, processes, restarts, strikes
from tests.entrypoints.serving import RunningServer, list_children, wait_until

FLAGS = (
    *("--max-model-len", "512", "--max-total-tokens", "8192", "--max-running-requests", "32", "--detokenizer-workers", "1"),
    *("--tokenizer-workers", "1", "--heartbeat-timeout", "3", "--max-restarts", "10000"),
)
NAMES = ["scheduler", "detokenizer", "tokenizer-0"]
FEW = [
    ("scheduler", signal.SIGKILL, 0.2),
    ("scheduler", signal.SIGSTOP, 0.02),
    ("detokenizer", signal.SIGKILL, 0.6),
    ("tokenizer-0", signal.SIGKILL, 0.0),
]


@pytest.fixture(scope="module")
def stormy(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, *FLAGS, env={"FRAME_FAKE_STEP": "0.004"}) as running:
        yield running


class Weather:
    """A storm over a server, with what its requests yield when nothing happens."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.storm = Storm(64, 60)
        self.calm = self.storm(server)
        self.progress = self.storm.progress
        assert not any(reply.error for reply in self.calm)

    def strike(self, name: str, how: signal.Signals, share: float) -> None:
        """The storm again; when it is done to this share, `how` goes to process `name`."""
        before = restarts(self.server)
        replies = self.storm(self.server, int(share * self.progress), lambda: processes(self.server)[name].send_signal(how))
        for number, (reply, expected) in enumerate(zip(replies, self.calm, strict=True)):
            assert reply == expected, (number, self.storm.bodies[number])
        wait_until(lambda: restarts(self.server) > before)  # a tokenizer may die when it has nothing to do
        resolve(self.server)


@pytest.fixture(scope="module")
def weather(stormy: RunningServer) -> Weather:
    return Weather(stormy)


def resolve(server: RunningServer) -> None:
    """All processes are there, and no page, lock, slot or process is left over."""
    wait_until(server.ready, 60)
    wait_until(lambda: server.get("/server_info")["outstanding"] == 0)
    wait_until(lambda: server.get("/server_info")["running"] + server.get("/server_info")["waiting"] == 0)
    assert server.post("/check_integrity", {}).status_code == 200
    assert server.post("/flush_cache", {}).status_code == 200
    assert server.get("/server_info")["used_pages"] == 0
    wait_until(lambda: sorted(processes(server)) == sorted(NAMES))
    for child in list_children(server.process.pid, recursive=True):
        assert child.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how", "share"), FEW)
def test_nothing_is_lost(weather: Weather, name: str, how: signal.Signals, share: float) -> None:
    weather.strike(name, how, share)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(20))
def test_nothing_is_lost_in_two_hundred_rounds(weather: Weather, part: int) -> None:
    for name, how, share in islice(strikes(part, NAMES), 10):
        weather.strike(name, how, share)

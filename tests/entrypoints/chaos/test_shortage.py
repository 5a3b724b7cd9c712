"""The system refuses new processes, descriptors or memory, or takes the folder of sockets away: the
main process lives through it."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.entrypoints.chaos.storm import processes, restarts
from tests.entrypoints.chaos.test_processes import resolve
from tests.entrypoints.serving import RunningServer, list_children, wait_until

FLAGS = (
    *("--max-model-len", "512", "--max-total-tokens", "8192", "--max-running-requests", "32", "--detokenizer-workers", "1"),
    *("--tokenizer-workers", "1", "--heartbeat-timeout", "3", "--max-restarts", "10000"),
)
NAMES = ["scheduler", "detokenizer", "tokenizer-0"]
BODY = {"prompt": "The quick brown fox", "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, *FLAGS, env={"FRAME_FAKE_STEP": "0.004"}) as running:
        yield running


def text_of(server: RunningServer) -> str:
    return server.post("/v1/completions", BODY).raise_for_status().json()["choices"][0]["text"]


@pytest.mark.parametrize("name", NAMES)
def test_a_start_that_the_system_refuses_is_tried_again(server: RunningServer, name: str) -> None:
    expected = text_of(server)
    main, before = psutil.Process(server.process.pid), len(server.lines)
    files = main.rlimit(psutil.RLIMIT_NOFILE)
    main.rlimit(psutil.RLIMIT_NOFILE, (3, files[1]))
    try:
        processes(server)[name].kill()
        wait_until(lambda: sum("could not be started" in line for line in server.lines[before:]) >= 2 or server.process.poll() is not None)
    finally:
        if server.process.poll() is None:
            main.rlimit(psutil.RLIMIT_NOFILE, files)
    assert server.process.poll() is None, "".join(server.lines)
    resolve(server)
    assert text_of(server) == expected


def test_a_folder_that_a_cleaner_removed_is_made_again(server: RunningServer) -> None:
    expected = text_of(server)
    command = processes(server)["scheduler"].cmdline()
    folder = Path(command[command.index("--sockets") + 1])
    for name in NAMES:
        shutil.rmtree(folder)
        before = restarts(server)
        processes(server)[name].kill()
        wait_until(lambda before=before: restarts(server) > before)
        resolve(server)
        assert text_of(server) == expected
        assert folder.stat().st_mode & 0o777 == 0o700


class Shortage:
    """Kills processes of a server under load, some of them while the system refuses it descriptors.
    The main process lives under a limit on its address space all the time."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self.server = server
        self.kills = 0
        self.refusals = 0
        self._random = random.Random(seed)
        self._main = psutil.Process(server.process.pid)
        self._files = self._main.rlimit(psutil.RLIMIT_NOFILE)
        self._stop = threading.Event()
        self.replies: list[int] = []

    def run(self, kills: int, seconds: float) -> None:
        """So many kills, spread over so many seconds; then everything must settle."""
        room = self._main.memory_info().vms + (256 << 20)
        space = self._main.rlimit(psutil.RLIMIT_AS)
        self._main.rlimit(psutil.RLIMIT_AS, (room, space[1]))
        clients = [threading.Thread(target=self._ask, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        try:
            started = time.monotonic()
            for number in range(kills):
                self._strike(with_files=number % 4 != 3)
                self._stop.wait(max(0.0, started + (number + 1) * seconds / kills - time.monotonic()))
                assert self.server.process.poll() is None, "".join(self.server.lines[-60:])
        finally:
            self._stop.set()
            for client in clients:
                client.join(60)
        self._main.rlimit(psutil.RLIMIT_AS, space)

    def _strike(self, with_files: bool) -> None:
        """Kill a process, if one is there. Without files, main has 64 descriptors less than it
        uses, until it was refused a start."""
        before = len(self.server.lines)
        if not with_files:
            self._main.rlimit(psutil.RLIMIT_NOFILE, (max(3, self._main.num_fds() - 64), self._files[1]))
        children = list_children(self._main.pid)
        if children:
            with suppress(psutil.NoSuchProcess):
                self._random.choice(children).send_signal(self._random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV)))
                self.kills += 1
        if not with_files:
            with suppress(AssertionError):
                wait_until(lambda: self._refused(before) or self.server.process.poll() is not None, 5)
            self.refusals += self._refused(before)
            if self.server.process.poll() is None:
                self._main.rlimit(psutil.RLIMIT_NOFILE, self._files)

    def _refused(self, since: int) -> bool:
        return any("could not be started" in line for line in self.server.lines[since:])

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self.server.url, timeout=120) as client:
            while not self._stop.is_set():
                with suppress(httpx.TransportError):  # a connection that the server had no descriptor for
                    self.replies.append(client.post("/v1/completions", json={**BODY, "seed": number}).status_code)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "seconds"),
    [(4, 4.0), pytest.param(100, 300.0, marks=[pytest.mark.soak, pytest.mark.timeout(900)])],
    ids=["short", "long"],
)
def test_the_main_process_outlives_kills_and_shortages(server: RunningServer, kills: int, seconds: float) -> None:
    expected = text_of(server)
    shortage = Shortage(server, kills)
    shortage.run(kills, seconds)
    resolve(server)
    assert text_of(server) == expected
    assert shortage.kills >= kills // 2
    assert shortage.refusals > 0
    assert 200 in shortage.replies
    assert set(shortage.replies) <= {200, 500, 503}
    print(f"{shortage.kills} kills, {shortage.refusals} refused starts, {restarts(server):.0f} restarts,", Counter(shortage.replies))

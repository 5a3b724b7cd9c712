"""The system refuses new processes, descriptors or memory, or takes the folder of sockets away: the main process lives through it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.entrypoints.chaos.storm import processes, restarts
from tests.entrypoints.chaos.test_processes import settle
from tests.entrypoints.serving import RunningServer, wait_until

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
    settle(server)
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
        settle(server)
        assert text_of(server) == expected
        assert folder.stat().st_mode & 0o777 == 0o700

"""The engine's process that `frame serve` starts before it reads the configuration: used, refused,
killed, orphaned. No test may leave a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from frame.checkpoint.model_config import EMBEDDED
from frame.entrypoints.cli.entry import WORKER, start_early
from frame.host.child_process import EXIT_ORPHANED
from tests.entrypoints.serving import RunningServer, wait_until

SMALL = ("--max-model-len", "256", "--max-total-tokens", "1024", "--threads", "1")


@contextmanager
def serving(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "frame", "serve", "--port", "0", *SMALL, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def starting(*flags: str) -> Iterator[tuple[subprocess.Popen[str], psutil.Process]]:
    """`frame serve` that has just started, and its early process."""
    with serving(*flags) as process:
        wait_until(lambda: psutil.Process(process.pid).children() or process.poll() is not None)
        yield process, psutil.Process(process.pid).children()[0]


def early_processes(parent: int) -> list[list[str]]:
    """The command lines of the early processes of `parent`, which may have ended."""
    commands = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
    return [command for command in commands if command[4:8] == ["scheduler", "--early", "--parent", str(parent)]]


@pytest.mark.slow
def test_it_becomes_the_engine() -> None:
    with RunningServer(Path(EMBEDDED), *SMALL, fake=False, forked=False) as server:
        (child,) = psutil.Process(server.process.pid).children()
        assert child.cmdline()[3:6] == [WORKER, "scheduler", "--early"]
        reply = server.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}})
        assert reply.status_code == 200
        child.kill()  # another process, started as usual, takes its place
        wait_until(lambda: [each for each in psutil.Process(server.process.pid).children() if each.pid != child.pid], 60)
        wait_until(server.ready, 60)
        (successor,) = psutil.Process(server.process.pid).children()
        assert "--early" not in successor.cmdline()
        assert server.stop() == 0
    assert not successor.is_running()


@pytest.mark.parametrize(("flags", "status"), [(("--page-size", "-1"), 78), (("--no-such-flag",), 2)])
def test_it_ends_when_the_start_is_refused(flags: tuple[str, ...], status: int) -> None:
    with serving(*flags) as process:  # it may refuse before a look at its children
        _, said = process.communicate(timeout=300)
        assert process.returncode == status, said
        assert not early_processes(process.pid)
        assert "Traceback" not in said


# SIGINT and SIGTERM have one handler: test_start_signals.py
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_a_start_that_is_stopped(number: signal.Signals) -> None:
    with starting() as (process, child):
        wait_until(lambda: len(early_processes(process.pid)) == 1 or process.poll() is not None)  # it may not run its program yet
        process.send_signal(number)
        process.communicate(timeout=300)
        assert process.returncode != 78
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.exhaustive  # a killed one is not taken: test_early_process.py
def test_the_start_goes_on_without_it() -> None:
    with serving() as process:
        # The main process has not read the configuration when its first child appears.
        while not (children := psutil.Process(process.pid).children()):
            pass
        process.send_signal(signal.SIGSTOP)
        (child,) = children
        child.kill()
        process.send_signal(signal.SIGCONT)
        assert process.stderr is not None
        for line in process.stderr:
            if "ready on" in line:
                break
        (engine,) = psutil.Process(process.pid).children()
        assert engine.pid != child.pid
        assert "--early" not in engine.cmdline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_it_ends_with_its_input() -> None:
    command = [sys.executable, "-m", WORKER, "scheduler", "--early", "--parent", str(os.getpid())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (EXIT_ORPHANED, b"")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["plan"], ["serve", "--help"], ["serve", "--watch", "--config", "x.yaml"]])
def test_other_commands_start_none(arguments: list[str]) -> None:
    with start_early(arguments) as early:
        assert early is None
        assert not [child for child in psutil.Process().children() if "--early" in child.cmdline()]

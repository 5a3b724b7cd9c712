"""`EarlyProcess`: given its arguments, refused, ended."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from frame.entrypoints.processes.early_process import EarlyProcess
from tests.entrypoints.serving import wait_until

CODE = "import pathlib, sys; line = sys.stdin.readline(); pathlib.Path(sys.argv[1]).write_text(line + sys.stdin.readline())"


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "written"


@pytest.fixture
def command(written: Path) -> list[str]:
    return [sys.executable, "-c", CODE, str(written)]


def find_child(command: list[str]) -> psutil.Process:
    """The process of an `EarlyProcess`."""
    (child,) = (each for each in psutil.Process().children() if each.cmdline()[: len(command)] == command)
    return child


def test_a_taken_process_reads_its_arguments_and_what_follows(command: list[str], written: Path) -> None:
    early = EarlyProcess(command)
    process = early.take([*command, "--ranks", "1"], {"OMP_NUM_THREADS": "3"}, not os.isatty(2))
    assert process is not None
    assert process.args[4:] == ["--early", "--parent", str(os.getpid()), "--death-signal"]  # type: ignore[index]
    early.close()  # does not end it any more
    _, errors = process.communicate(b"the configuration\n", timeout=30)
    assert (process.returncode, errors) == (0, b"" if process.stderr else None)
    first, second = written.read_text().splitlines()
    assert json.loads(first) == {"arguments": ["--ranks", "1"], "environment": {"OMP_NUM_THREADS": "3"}}
    assert second == "the configuration"


def test_it_is_taken_once(command: list[str]) -> None:
    early = EarlyProcess(command)
    process = early.take(command, {}, not os.isatty(2))
    assert process is not None
    assert early.take(command, {}, not os.isatty(2)) is None
    assert process.poll() is None
    process.communicate(b"\n", timeout=30)


@pytest.mark.parametrize("wrong", ["command", "environment", "errors", "changed", "ended"])
def test_a_process_that_does_not_fit_is_ended(wrong: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    early = EarlyProcess(command)
    pipes_errors, environment = not os.isatty(2), {"OMP_NUM_THREADS": "1"}
    child = find_child(command)
    if wrong == "command":
        command = [*command[:3], "another", "x"]
    elif wrong == "environment":
        environment["MALLOC_ARENA_MAX"] = "1"
    elif wrong == "errors":
        pipes_errors = not pipes_errors
    elif wrong == "changed":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    else:
        child.kill()
        wait_until(lambda: child.status() == psutil.STATUS_ZOMBIE)
    assert early.take(command, environment, pipes_errors) is None
    assert not child.is_running()


def test_leaving_the_context_ends_it(command: list[str]) -> None:
    with pytest.raises(SystemExit), EarlyProcess(command):
        child = find_child(command)
        raise SystemExit(78)
    assert not child.is_running()


def test_where_no_process_can_be_started_none_is_taken(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("frame.host.child_process.subprocess.Popen", refuse)
    with EarlyProcess(command) as early:
        assert early.take(command, {}, not os.isatty(2)) is None

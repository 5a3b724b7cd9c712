"""`EarlyProcess`: given its arguments, refused, ended; `Standby`: the processes of a restart."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import pytest

from frame.checkpoint.model_config import EMBEDDED
from frame.config.schema import FrameConfig
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.processes.deployment import Deployment, Layout
from frame.entrypoints.processes.early_process import EarlyProcess, Standby
from frame.entrypoints.processes.launch import wait_ready
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


def test_each_rank_takes_a_standby_of_its_role(command: list[str], tmp_path: Path) -> None:
    other, first = [*command[:3], str(tmp_path / "other")], EarlyProcess(command)
    standby = Standby(first)
    standby.prepare([command, other, other], pipes_errors=False)
    taken = [standby.take([*start, "--rank", "1"], {}, False) for start in (other, command)]
    assert [each is not None and each.args[3] for each in taken] == [other[3], command[3]]  # type: ignore[index]
    (left,) = (each for each in psutil.Process().children() if each.cmdline()[:4] == other and each.pid != taken[0].pid)  # type: ignore[union-attr]
    standby.close()
    assert not left.is_running()
    assert standby.take(other, {}, False) is None  # not what the first one runs, which ends
    for each in taken:
        assert each is not None and each.communicate(b"\n", timeout=30)[0] is None


@pytest.mark.exhaustive  # without torch: test_each_rank_takes_a_standby_of_its_role
@pytest.mark.slow
def test_restarted_ranks_are_processes_that_have_imported_torch() -> None:
    sections = {"model": {"path": EMBEDDED, "load_format": "dummy", "skip_tokenizer_init": True}, "execution": {"device": "cpu"}}
    config = FrameConfig.model_validate(sections | {"parallel": {"tp": 2}, "cache": {"max_total_tokens": 1024}})
    prepared = prepare(config)
    deployment = Deployment(prepared.resolved, Layout(2, detokenizer=False, tokenizers=0, standby=True), prepared.registry)
    ranks = ["engine", "rank-1"]
    try:
        wait_ready(deployment)
        deployment.prepare_standby()
        waiting = [each.pid for each in psutil.Process().children() if "--early" in each.cmdline()]
        deployment.kill_and_wait(ranks)
        deployment.start_children(ranks)
        assert sorted(deployment.children[name].process.pid for name in ranks) == sorted(waiting)
        assert wait_ready(deployment)["phases"]["imports"] > 0
        deployment.prepare_standby()
    finally:
        deployment.kill()
    assert not [each for each in psutil.Process().children() if "--early" in each.cmdline()]

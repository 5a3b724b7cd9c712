"""A server that is forked looks, fails and ends as one that is started by its command."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.entrypoints.fork_server import (
    PADDING,
    CannotForkError,
    ForkedProcess,
    ForkServer,
    make_environment,
    run_forked,
    start_forked,
)
from tests.entrypoints.serving import READY, RunningServer, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="servers are forked on Linux only")


def is_forked(pid: int) -> bool:
    """Whether the command line of a process has the room of one of the fork server."""
    return len(Path(f"/proc/{pid}/cmdline").read_bytes()) > PADDING


def command_of(checkpoint: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tests.entrypoints.fake_engine", "serve", "--model", str(checkpoint), "--port", "0", *flags]


def start(command: list[str], **environment: str) -> ForkedProcess:
    """The first start with an environment is none of a fork."""
    process = start_forked(command, environment) or start_forked(command, environment)
    assert process is not None
    return process


@pytest.fixture
def running(checkpoint: Path) -> Iterator[tuple[ForkedProcess, str]]:
    process = start(command_of(checkpoint, "--max-model-len", "64"), FRAME_FAKE_TOKENS="640")
    url = next(found[1] for line in process.stderr if (found := READY.search(line)))
    yield process, url
    process.kill()
    process.wait(30)


def test_it_has_its_command_variables_and_files(running: tuple[ForkedProcess, str], checkpoint: Path) -> None:
    process, url = running
    shown = psutil.Process(process.pid)
    assert list(filter(None, shown.cmdline())) == command_of(checkpoint, "--max-model-len", "64")
    assert httpx.get(url + "/server_info").json()["max_total_tokens"] == 640
    assert not [file for file in shown.open_files() if "pytest" in file.path]
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == process.poll() == 0
    assert "stopping" in process.stderr.read()
    assert not psutil.pid_exists(process.pid)


def test_its_end_by_a_signal_is_seen(running: tuple[ForkedProcess, str]) -> None:
    process, _ = running
    children = psutil.Process(process.pid).children()
    assert children
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    assert not psutil.wait_procs(children, 120)[1]


def test_its_refusal_has_a_code_and_a_sentence(checkpoint: Path) -> None:
    process = start(command_of(checkpoint, "--no-such-flag"))
    assert process.wait(30) != 0
    assert "--no-such-flag" in process.stderr.read()


@pytest.mark.exhaustive  # imports of a fork server; all tests of servers are slower without one
def test_it_is_forked_where_many_files_are_open(checkpoint: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        server = ForkServer(make_environment({}))
        process = server.start(command_of(checkpoint, "--no-such-flag"), make_environment({}))
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.wait(30) != 0
    assert "--no-such-flag" in process.stderr.read()
    server.close()


@pytest.mark.exhaustive  # imports of three servers; test_weight_updates.py restarts such a child
def test_children_of_a_server_with_threads_are_forked_and_are_its_own(checkpoint: Path) -> None:
    start(command_of(checkpoint, "--no-such-flag")).wait(30)  # the next one with this environment is forked
    with RunningServer(checkpoint, "--max-model-len", "64", "--detokenizer-workers", "1") as server:
        before = server.children()
        assert set(before) == {"scheduler", "detokenizer"}
        assert all(is_forked(child.pid) for child in before.values())
        before["scheduler"].kill()
        wait_until(lambda: server.metric("frame_engine_restarts_total") == 1 and server.ready(), 60)
        after = server.children()
        assert after["scheduler"].pid != before["scheduler"].pid
        assert is_forked(after["scheduler"].pid)
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}
        assert server.post("/generate", body).json()["meta_info"]["completion_tokens"] == 4
        (forker,) = (each for each in psutil.Process(server.process.pid).children() if each not in after.values())
        forker.kill()
        after["scheduler"].kill()
        wait_until(lambda: server.metric("frame_engine_restarts_total") == 2 and server.ready(), 60)
        assert not is_forked(server.children()["scheduler"].pid)
        ended = [*server.children().values()]
        server.kill()
    assert not psutil.wait_procs(ended, 120)[1]


def test_a_program_has_its_words_folder_and_streams(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys\nsys.stderr.write('err')\nprint(sys.argv[1:], __name__)\nsys.exit(5)")
    code = "import os, sys; print(os.getcwd(), sys.argv, os.environ['FRAME_X'], sys.stdin.read()); import own"
    run_forked([sys.executable, "-c", ""])  # the next one with this environment is forked
    module = run_forked([sys.executable, "-m", "json.tool", "--help"])
    file = run_forked([sys.executable, str(tmp_path / "own.py"), "a b"])
    text = run_forked([sys.executable, "-c", code, "c"], environment=make_environment({"FRAME_X": "d"}), cwd=tmp_path)
    failed = run_forked([sys.executable, "-c", "raise ValueError('a reason')"])
    assert (module.returncode, module.stderr) == (0, "") and "indent" in module.stdout
    assert (file.returncode, file.stdout, file.stderr) == (5, "['a b'] __main__\n", "err")
    assert (text.returncode, text.stdout) == (5, f"{tmp_path} ['-c', 'c'] d \n['c'] own\n")
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: a reason\n")
    said = run_forked([sys.executable, "-c", "print(len(open('/proc/self/cmdline').read()))"]).stdout
    assert int(said) > PADDING
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)


@pytest.mark.exhaustive  # imports of three servers; the other tests here begin with the ordinary command
def test_a_server_that_has_threads_or_has_ended_is_replaced_by_the_ordinary_command(tmp_path: Path, checkpoint: Path) -> None:
    (tmp_path / "threads.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()")
    say = [sys.executable, "-c", "print(len(open('/proc/self/cmdline').read()))"]
    environment = make_environment({"FORKED": "threads", "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}"})
    said = [int(run_forked(say, environment=environment, imports=imports).stdout) for imports in ((), (), ("threads",), ())]
    assert [size > PADDING for size in said] == [False, True, False, False]
    server = ForkServer(environment)
    (forker,) = (each for each in psutil.Process().children() if each.pid == server._process.pid)
    forker.kill()
    forker.wait()
    with pytest.raises(CannotForkError):
        server.start(command_of(checkpoint), environment)
    assert not server.can_fork


@pytest.mark.exhaustive  # imports of a fork server; test_documents.py runs such programs
def test_a_program_that_users_write_has_nothing_of_frame_before_it_imports_it() -> None:
    text = "import sys; print([each for each in sys.modules if each.partition('.')[0] == 'frame'], 'torch' in sys.modules)"
    assert [run_forked([sys.executable, "-c", text], with_frame=False).stdout for _ in range(2)] == ["[] False\n", "[] True\n"]

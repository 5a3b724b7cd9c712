"""Processes of frame do not import from the working folder: each kind is started in a folder whose
modules have the names of the standard library's and of all installed ones, and leave a mark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from tests.entrypoints.serving import RunningServer, free_port, list_children

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "frame/models/frame_tiny"
CONSOLE = str(Path(sys.executable).with_name("frame"))
SIZES = ("--max-model-len", "256", "--max-total-tokens", "1024", "--threads", "1", "--device", "cpu")
HOSTILE = """
import sys
with open({marks!r} + "/" + __name__, "a") as file:
    file.write(repr(sys.orig_argv) + "\\n")
raise ImportError(__name__ + " of the working folder was imported")
"""
PLUGIN = """
import contextlib
from frame.interfaces.stats import StatLogger

with contextlib.suppress(ImportError):
    import neighbour

class Quiet(StatLogger):
    def __init__(self, context, options=None):
        pass

    def record_request(self, request):
        pass
"""
OFFLINE = """
import sys
from frame import Engine
with Engine(model=".", tp=2, max_model_len=256, max_total_tokens=1024, threads=1, device="cpu") as engine:
    print(len(engine.generate("a", {"max_tokens": 4, "ignore_eos": True}).token_ids))
"""


class Folder:
    """A checkpoint with hostile modules."""

    def __init__(self, path: Path) -> None:
        self.path, self._marks = path / "checkpoint", path / "marks"
        self._marks.mkdir()
        shutil.copytree(MODEL, self.path)
        installed = {name for name in metadata.packages_distributions() if name.isidentifier()}
        for name in {*sys.stdlib_module_names, *installed, "sitecustomize", "usercustomize", "conftest", "evil_plugin", "neighbour"}:
            (self.path / f"{name}.py").write_text(HOSTILE.format(marks=str(self._marks)))
        info = self.path / "evil-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
        groups = ("[frame]", "evil = evil_plugin", "[frame_commands]", "evil = evil_plugin:run", "[pytest11]", "evil = evil_plugin")
        (info / "entry_points.txt").write_text("\n".join(groups))
        (self.path / "pytest.ini").write_text("[pytest]\naddopts = -p evil_plugin\npythonpath = .\n")

    def remove_imports_of_start(self) -> None:
        """Take away what Python imports for `python -m frame` before any line of frame runs, and
        what frame imports before it corrects the path."""
        code = "import frame.entrypoints.cli.entry, sys; print(*sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
        for name in {"sitecustomize", "usercustomize", *(module.partition(".")[0] for module in done.stdout.split())}:
            (self.path / f"{name}.py").unlink(missing_ok=True)

    @property
    def marks(self) -> dict[str, str]:
        """What was imported, by which programs."""
        return {file.name: file.read_text() for file in self._marks.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def modules(server: RunningServer) -> list[str]:
    """What the processes below the server run: a module, or a role of the worker."""
    lines = [child.cmdline() for child in list_children(server.process.pid, recursive=True)]
    words = [line[line.index("-m") + 1 :] for line in lines]
    return sorted(word[1] if word[0].endswith(".worker") else word[0].rpartition(".")[2] for word in words)


def request(server: RunningServer, **options: object) -> None:
    model = server.get("/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": "a", "max_tokens": 4, **options}
    assert server.post("/v1/completions", body).status_code == 200


def run(folder: Folder, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder.path, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.slow
def test_a_server_and_its_children(folder: Folder) -> None:
    flags = ("--tokenizer-workers", "1", "--detokenizer-workers", "1", *SIZES)
    with RunningServer(Path(), *flags, fake=False, command=(CONSOLE, "serve"), cwd=folder.path) as server:
        request(server, guided_json={"type": "object", "properties": {"a": {"type": "integer"}}})
        assert folder.marks == {}
        assert modules(server) == ["detokenizer", "grammar_process", "scheduler", "tokenizer"]


@pytest.mark.slow
def test_replicas_by_module_with_an_empty_element_in_the_path(folder: Folder) -> None:
    """The empty element of PYTHONPATH is the working folder."""
    folder.remove_imports_of_start()
    path = {"PYTHONPATH": os.pathsep + os.environ["PYTHONPATH"]}
    with RunningServer(Path(), "--dp", "2", *SIZES, fake=False, cwd=folder.path, env=path) as server:
        request(server, guided_regex="a+")
        assert modules(server).count("scheduler") == 2
    assert folder.marks == {}


@pytest.mark.slow
def test_ranks_of_two_hosts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRAME_DIST_KEY", "a secret of this test")
    hosts = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", *SIZES)
    command = [CONSOLE, "serve", "--model", ".", "--node-rank", "1", *hosts]
    node = subprocess.Popen(command, cwd=folder.path, stderr=subprocess.DEVNULL)
    try:
        with RunningServer(Path(), *hosts, fake=False, command=(CONSOLE, "serve"), cwd=folder.path) as server:
            request(server)
            assert len(psutil.Process(node.pid).children()) == 1
        node.wait(60)
    finally:
        node.kill()
    assert folder.marks == {}


@pytest.mark.slow
def test_a_watched_server_with_a_plugin_file(folder: Folder) -> None:
    """The folder of the plugin file is not imported from either."""
    (folder.path / "plugin.py").write_text(PLUGIN)
    command = (CONSOLE, "serve", "--watch", "--plugin", "plugin.py", "--stat-loggers", "quiet")
    with RunningServer(Path(), *SIZES, fake=False, command=command, cwd=folder.path) as server:
        assert "serve" in list_children(server.process.pid)[0].cmdline()
        request(server)
    assert folder.marks == {}


@pytest.mark.slow
def test_the_offline_engine_of_a_program_elsewhere(folder: Folder, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OFFLINE)
    done = run(folder, sys.executable, str(program))
    assert (done.stdout, folder.marks) == ("4\n", {}), done.stderr


COMMANDS = {
    "list": ("plugins", "list"),
    "config": ("config", "check", "--model", "."),
}
SLOW_COMMANDS = {
    "check": ("plugins", "check", "eviction_policy/fifo", "--conformance"),
    "compare": ("plugins", "check", "reasoning_parser/think-tags", "--against", "think-tags"),
}


@pytest.mark.parametrize("name", [*COMMANDS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_COMMANDS)])
def test_commands(name: str, folder: Folder) -> None:
    done = run(folder, CONSOLE, *{**COMMANDS, **SLOW_COMMANDS}[name])
    assert (done.returncode, folder.marks) == (0, {}), done.stdout + done.stderr


def test_the_router(folder: Folder) -> None:
    command = [CONSOLE, "router", "--port", "0", "--replica", "http://127.0.0.1:9"]
    router = subprocess.Popen(command, cwd=folder.path, stderr=subprocess.PIPE, text=True)
    assert router.stderr is not None
    lines = iter(router.stderr)
    assert any("http://127.0.0.1:" in line and "ready" in line for line in lines)
    router.kill()
    router.communicate()
    assert folder.marks == {}

"""Each room beyond the core can be deleted: without its files the server serves a chat, its
commands are unknown and its routes are gone.

The tree is copied once. Sets of rooms are deleted and the application is run in one process; then
all rooms are deleted together and `frame serve` is started. Of any two rooms, some set has the
first and not the second, so that a room that needs another one fails; `make soak` deletes each
alone.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from frame.plugins.loader import load_registry
from tests.architecture.source import PACKAGE, ROOT
from tests.entrypoints.serving import RunningServer

# Runs commands and requests over the copy, in one process. Arguments: commands, "--", paths.
PROBE = """
import asyncio, sys
from click.testing import CliRunner
import frame
from frame.entrypoints.cli.main import cli
from tests.entrypoints.inprocess import serving
cut = sys.argv.index("--")
commands, paths = sys.argv[1:cut], sys.argv[cut + 1:]
chat = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
assert frame.__file__.startswith(sys.path[0]), frame.__file__  # the copy
output = CliRunner().invoke(cli, ["--help"]).output
assert "  serve " in output, output
for name in commands:
    assert f"  {name} " not in output, output
    result = CliRunner().invoke(cli, [name])
    assert (result.exit_code, "No such command" in result.output) == (2, True), result.output

async def main():
    async with serving() as server:
        response = await server.post("/v1/chat/completions", chat)
        assert response.status == 200 and response.json()["choices"], response.body
        for path in paths:
            response = await server.post(path, {})
            assert response.status == 404 and b"there is no" in response.body, (path, response.body)

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Room:
    """`patterns`: its files below frame/. `commands` and `paths` (of POST routes) go with it."""

    patterns: tuple[str, ...]
    commands: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


HTTP = "entrypoints/http"
ROUTES = {  # one route of each API
    "anthropic": "/v1/messages",
    "vllm": "/v1/chat/completions/batch",
    "sglang": "/parse_function_call",
    "cohere": "/v2/embed",
    "tei": "/embed",
    "ollama": "/api/chat",
    "sagemaker": "/invocations",
}


def _dialect(name: str) -> Room:
    """An API whose record names the module with its routes."""
    (record,) = load_registry(installed=False).find(f"http_extension/{name}")
    path = record.target.partition(":")[0].removeprefix("frame.").replace(".", "/")
    return Room((f"{path}.py",), paths=(ROUTES[name],))


ROOMS = {
    "router": Room(("entrypoints/router", "entrypoints/cli/router.py"), commands=("router",)),
    "grpc": Room(("entrypoints/grpc",)),
    "lang": Room(("lang",)),
    "kv_events": Room(("kv_events",)),
    "bench": Room(
        ("entrypoints/tools/bench", "entrypoints/cli/bench*.py", "entrypoints/cli/profile.py"),
        commands=("bench", "profile", "replay"),
    ),
    "profile": Room(("entrypoints/cli/profile.py",), commands=("profile",)),
    "eval": Room(("entrypoints/tools/eval", "entrypoints/cli/eval.py"), commands=("eval",)),
    "plan": Room(("entrypoints/tools/plan", "entrypoints/cli/plan.py"), commands=("plan",)),
    "simulate": Room(("entrypoints/tools/simulate", "entrypoints/cli/simulate.py"), commands=("simulate",)),
    "chat": Room(("entrypoints/cli/chat.py",), commands=("chat",)),
    "dashboard": Room(("entrypoints/tools/dashboard.py",), commands=("dashboard",)),
    "hub": Room(("entrypoints/hub",), commands=("pull",)),
    "scaffold": Room(("entrypoints/tools/scaffold",)),
    "testing": Room(("testing",)),
    "responses": Room((f"{HTTP}/openai/response*.py",), paths=("/v1/responses", "/v1/conversations")),
    "batches": Room((f"{HTTP}/openai/batch*.py",), paths=("/v1/batches", "/v1/files")),
    "speech": Room(
        (
            *(f"entrypoints/{name}.py" for name in ("speech", "word_times", "audio", "audio_process", "offline/transcribing")),
            *(f"{HTTP}/{name}/transcription{end}.py" for name, end in (("openai", "s"), ("realtime", ""))),
        ),
        paths=("/v1/audio/transcriptions", "/v1/audio/translations"),
    ),
    "realtime": Room((f"{HTTP}/realtime",), paths=("/v1/realtime",)),
    **{name: _dialect(name) for name in ROUTES},
}
PROBED = [name for name in ROOMS if name != "testing"]  # whose fake runner the probe uses; the server below starts without it


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of frame."""
    folder = tmp_path_factory.mktemp("tree")

    def copy(source: str, target: str) -> None:
        (os.symlink if source.endswith(".safetensors") else shutil.copy2)(source, target)

    shutil.copytree(PACKAGE, folder / "frame", copy_function=copy, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@contextmanager
def deleted(tree: Path, *rooms: Room) -> Iterator[None]:
    """Move the files of rooms out of the copy, and back."""
    bin_folder = tree / "deleted"
    moved: list[tuple[Path, Path]] = []
    for number, pattern in enumerate({pattern for room in rooms for pattern in room.patterns}):
        for path in (tree / "frame").glob(pattern):
            target = bin_folder / str(number) / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            moved.append((path, target))
            path.rename(target)
    try:
        yield
    finally:
        for path, target in reversed(moved):
            target.rename(path)


def environment(tree: Path) -> dict[str, str]:
    """Of a process that imports the copy. It keeps bytecode: the next room's process is faster."""
    paths = os.pathsep.join(map(str, (tree, ROOT)))
    return {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tree / "bytecode"), "OMP_NUM_THREADS": "1"}


def test_rooms_are_found() -> None:
    for name, room in ROOMS.items():
        assert any(next(PACKAGE.glob(pattern), None) for pattern in room.patterns), f"{name}: {room.patterns} name no file"


def run_without(tree: Path, *names: str) -> None:
    rooms = [ROOMS[name] for name in names]
    commands = [each for room in rooms for each in room.commands]
    paths = [each for room in rooms for each in room.paths]
    with deleted(tree, *rooms):
        command = [sys.executable, "-P", "-c", PROBE, *commands, "--", *paths]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment(tree)}, timeout=500, check=False)
    assert done.returncode == 0, f"{names}: {done.stderr[-3000:]}"


# each room is in three of seven sets, and no two rooms in the same three
MEMBERS = dict(zip(PROBED, itertools.combinations(range(7), 3), strict=False))


def test_rooms_are_in_different_sets() -> None:
    assert list(MEMBERS) == PROBED
    assert all(not set(MEMBERS[a]) <= set(MEMBERS[b]) for a, b in itertools.permutations(PROBED, 2))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(7))
def test_a_set_of_rooms_is_deleted(tree: Path, number: int) -> None:
    run_without(tree, *(name for name, sets in MEMBERS.items() if number in sets))


@pytest.mark.soak
@pytest.mark.parametrize("name", PROBED)
def test_a_room_is_deleted_alone(tree: Path, name: str) -> None:
    run_without(tree, name)


@pytest.mark.slow
def test_all_rooms_are_deleted(tree: Path) -> None:
    rooms, variables = ROOMS.values(), environment(tree)
    chat = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    with deleted(tree, *rooms), RunningServer(Path("frame-tiny"), fake=False, env=variables, cwd=tree) as server:
        reply = server.post("/v1/chat/completions", chat)
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["role"] == "assistant"
        for path in (path for room in rooms for path in room.paths):
            assert server.post(path, {}).status_code == 404, path
        command = [sys.executable, "-P", "-m", "frame", "--help"]
        help_text = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=True).stdout
        listed = {line.split()[0] for line in help_text.partition("Commands:")[2].splitlines() if line.strip()}
        assert listed == {"serve", "config", "plugins"}
        assert server.stop() == 0

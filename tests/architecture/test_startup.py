"""What is cheap stays cheap: importing frame, help, the plugin list and the HTTP side load no
torch. Measured in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.architecture.source import is_under, package

HEAVY = ("torch", "transformers", "triton", "starlette", "uvicorn", "safetensors")
NO_TORCH = ("torch", "transformers", "triton")
YARDSTICK = ("click", "pydantic", "yaml", "email.message", "importlib.metadata")  # a small part of what a command loads
MAX_MAIN, MAX_ENGINE = 305, 184  # modules of frame in the main process and the engine's, before plugins
MAXIMUM = 8.0  # times that; torch alone takes more than ten

PROBE = """
import importlib, io, json, resource, runpy, sys
from contextlib import redirect_stdout, redirect_stderr
kind, *rest = sys.argv[1:]
code = 0
with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
    if kind == "import":
        for name, _, function in (each.partition(":") for each in rest):
            module = importlib.import_module(name)
            if function:
                getattr(module, function)()
    else:
        sys.argv = ["frame", *rest]
        from frame.entrypoints.cli.main import main
        try:
            code = main() or 0
        except SystemExit as stop:
            code = stop.code or 0
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"code": code, "modules": sorted(sys.modules), "cpu": usage.ru_utime + usage.ru_stime, "output": out.getvalue()}))
"""


def probe(*arguments: str) -> dict:
    """Run `import NAME…` or `cli ARG…` in a fresh process; what it loaded, its CPU seconds and its
    output. MODULE:FUNCTION as a NAME also calls the function."""
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loaded(result: dict, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in result["modules"]]


def test_import_frame() -> None:
    assert loaded(probe("import", "frame"), HEAVY) == []


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"]], ids=" ".join)
def test_command(arguments: list[str]) -> None:
    ratios = []
    for _ in range(5):  # side by side: a machine that is slow for a while is slow for both
        result, yardstick = probe("cli", *arguments), probe("import", *YARDSTICK)
        assert result["code"] == 0, result["output"]
        assert loaded(result, HEAVY) == []
        ratios.append(result["cpu"] / yardstick["cpu"])
        if ratios[-1] <= MAXIMUM:
            break
    assert min(ratios) <= MAXIMUM, ratios


@pytest.mark.parametrize("arguments", [["config", "show"], ["config", "schema"], ["plugins", "info", "fcfs"]], ids=" ".join)
def test_light_command(arguments: list[str]) -> None:
    result = probe("cli", *arguments)
    assert result["code"] == 0, result["output"]
    assert loaded(result, NO_TORCH) == []


def test_interfaces_and_core_pages() -> None:
    pages = [each.name for each in package() if is_under(each.name, "frame.core.interfaces", "frame.interfaces")]
    assert len(pages) > 10
    assert loaded(probe("import", *pages, "frame.core.scheduling.scheduler", "frame.config.resolve"), NO_TORCH) == []


def test_http_side() -> None:
    names = [each.name for each in package() if is_under(each.name, "frame.entrypoints.http")]
    assert len(names) > 1
    assert loaded(probe("import", *names), NO_TORCH) == []


# What a server without these settings does not import, in its main process and in the engine's.
UNUSED_ROOMS = ("frame.entrypoints.grpc", "frame.entrypoints.router", "frame.entrypoints.tools", "frame.lang", "frame.testing")
UNUSED_MAIN = (*UNUSED_ROOMS, "frame.core.engine", "frame.entrypoints.configuration.equivalents", "frame.entrypoints.offline")
UNUSED_ENGINE = (
    *UNUSED_ROOMS, "frame.entrypoints.http", "frame.entrypoints.engine_client", "frame.entrypoints.processes.deployment", "frame.pooling",
    "frame.parallel.attention_groups", "frame.parallel.expert_moves", "frame.parallel.stage_runner", "frame.parallel.tp_follower",
    "frame.speculation.draft_passes", "frame.speculation.draft_runner",
)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "maximum", "unused"),
    [
        (["cli.entry", "cli.main", "cli.serve", "http.start", "http.server", "http.app:load_built_in"], MAX_MAIN, UNUSED_MAIN),
        (["processes.worker", "processes.build_engine"], MAX_ENGINE, UNUSED_ENGINE),
    ],
    ids=["main", "engine"],
)
def test_modules_of_a_server(names: list[str], maximum: int, unused: tuple[str, ...]) -> None:
    """The plugins that a configuration chooses come on top."""
    result = probe("import", *(f"frame.entrypoints.{name}" for name in names))
    ours = [name for name in result["modules"] if is_under(name, "frame")]
    assert [name for name in ours if is_under(name, *unused)] == []
    assert len(ours) <= maximum, ours


def test_probe_finds() -> None:
    assert loaded(probe("import", "safetensors"), HEAVY) == ["safetensors"]

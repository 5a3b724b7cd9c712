"""A fresh environment with the example plugin installed. It sees all of the running one, which sees
nothing of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.entrypoints.fork_server import run_forked

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "frame-attn-example"
PACKAGES = sorted((ROOT / "tests" / "examples" / "packages").iterdir())


@dataclass(frozen=True)
class Environment:
    """A virtual environment; `frame` runs the command line in it."""

    python: Path

    def run(self, *arguments: str | Path, check: bool = True, timeout: float = 500) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *map(str, arguments)]
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("FRAME_", "PYTHON", "PYTEST_"))}
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # no thread of an import; the fork server is a module of ROOT
        done = run_forked(command, environment=variables, timeout=timeout)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def frame(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "frame", *arguments, check=check)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Installs the example and the small packages as a user would: `pip install`, by their own
    build backend."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    outer = sysconfig.get_path("purelib")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*pip, str(EXAMPLE), *map(str, PACKAGES)], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return Environment(python)


@pytest.fixture(scope="session")
def server(environment: Environment) -> Iterator[str]:
    """The base address of a server that runs the example's backend on two ranks, chosen by flags
    alone."""
    options = ("--attention-backend", "blockwise", "--set", "plugins.options.attention_backend/blockwise.block_tokens=64")
    limits = ("--tp", "2", "--threads", "1", "--max-running-requests", "8", "--max-total-tokens", "16384")
    command = [str(environment.python), "-m", "frame", "serve", "--port", "0", *options, *limits]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    lines: list[str] = []
    address = ""
    for line in process.stderr:
        lines.append(line)
        if match := re.search(r"ready on (http://\S+)", line):
            address = match[1]
            break
    assert address, "".join(lines)
    drain = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    drain.start()
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 0, "".join(lines)

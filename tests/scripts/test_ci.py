"""`.ci/run` with commands that do as told: what becomes of the checks of the page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci/run"
FAILED = "The checks of the page FAILED (exit 2"
AXE = "axe-core cannot be fetched (npm is missing, or its registry does not answer)"
LATE = "The checks of the page have not ended"


@pytest.mark.parametrize(
    ("axe", "page", "status", "says"),
    [(0, 0, 0, "page: 0 failed"), (2, 0, 0, AXE), (124, 0, 0, AXE), (0, 2, 0, FAILED), (0, 124, 0, LATE), (0, 137, 0, LATE)],
)
def test_checks_of_the_page(tmp_path: Path, axe: int, page: int, status: int, says: str) -> None:
    """`axe`, `page`: the status of the two steps, 124 and 137 at their time limit. The
    tests have passed before: no status of the page ends the run."""
    commands = {
        "make": 'case "$*" in axe) exit $AXE ;; test-page*) echo "page: $PAGE failed"; exit $PAGE ;; esac',
        "timeout": 'echo "${*%%make*}" >> "$0.log"; while [ "$1" != make ]; do shift; done; exec "$@"',
        "chromium": "exit 0",
    }
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "AXE": str(axe), "PAGE": str(page)}
    done = subprocess.run([str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert says in done.stdout
    assert (AXE in done.stdout) == (axe != 0)
    limits = [sum(map(int, re.findall(r"\d+", line))) for line in (tmp_path / "timeout.log").read_text().splitlines()]
    assert len(limits) == (1 if axe else 2)
    assert max(limits) <= 300, "the second one includes what the first step has taken"

"""pytest in a process of its own whose Triton kernels are interpreted: they are, or are not, from
their definition on.

The interpreter takes milliseconds for each program of a kernel's grid, on one core; a busy machine
makes minutes of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

_ROOT = Path(__file__).resolve().parents[1]
_LIMIT = 580.0  # seconds, below what pytest gives a test; a dozen times what the longest that has no limit of its own takes alone


def run_interpreted(*arguments: str, limit: float | None = _LIMIT, **environment: str) -> str:
    """`pytest ARG…` from the project's root; what it printed. Fails where it does."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | environment
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout

"""Runs pytest in a process of its own with interpreted Triton kernels, because a kernel is compiled
or interpreted from its definition on.

The interpreter takes milliseconds for each program of a kernel's grid, on one core. As a plugin of
that process, this module removes repeated work of the interpreter.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

_ROOT = Path(__file__).resolve().parents[1]
_LIMIT = 580.0  # seconds, below what pytest gives a test; a dozen times what the longest that has no limit of its own takes alone


def run_interpreted(*arguments: str, limit: float | None = _LIMIT, **environment: str) -> str:
    """Run `pytest ARG…` in the project's root. -> its output. Fails if pytest fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.interpreter", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | environment
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout


def pytest_configure() -> None:
    """Drop two useless parts of the interpreter's work, half of its time: the search of packages
    that are patched already, at each call of a device function, and integer overflow checks, whose
    result it ignores unless `debug` is set."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_builtin
    first_builtins: dict[Any, str | None] = {}

    def patch_once(package: Any, *rest: Any) -> None:
        if package not in first_builtins:
            first_builtins[package] = next((name for name, member in inspect.getmembers(package) if is_builtin(member)), None)
        name = first_builtins[package]
        if name is not None and is_builtin(getattr(package, name)):
            patch(package, *rest)

    interpreter._patch_builtin = patch_once
    builder: Any = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

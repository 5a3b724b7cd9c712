"""Runs pytest in a process of its own with interpreted Triton kernels, because a kernel is compiled
or interpreted from its definition on.

The interpreter takes milliseconds for each program of a kernel's grid, on one core. As a plugin of
that process, this module removes repeated work of the interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import threading
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
    """Drop repeated work of the interpreter, most of its time: the patching of the language at each
    call of a device function, which the kernel's own call has done, a table of types for each
    tensor, and integer overflow checks, whose result it ignores unless `debug` is set. Mend the
    interpreter of Triton 3.6: loops over loaded numbers, and bfloat16 constants."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Any = interpreter._patch_lang
    patched: set[int] = set()  # namespaces of kernels

    def patch_once(function: Any) -> Any:
        namespace = id(function.__globals__)  # of a module, which is never collected
        if namespace not in patched:
            patched.add(namespace)
            patch(function)  # and is never restored: this process only interprets
            tl.tensor.__index__ = lambda tensor: tensor.handle.data.item()  # Triton 3.6 uses what NumPy 2.4 refuses
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    launch: Any = interpreter.GridExecutor.__call__
    lock = threading.Lock()  # the index in the grid is one for all threads

    def launch_alone(self: Any, *arguments: Any, **named: Any) -> None:
        with lock:
            launch(self, *arguments, **named)

    interpreter.GridExecutor.__call__ = launch_alone
    numpy_type: Any = interpreter._get_np_dtype
    known = functools.cache(numpy_type)
    interpreter._get_np_dtype = lambda dtype: known(dtype) if type(dtype) is tl.dtype else numpy_type(dtype)
    builder: Any = interpreter.interpreter_builder
    if not hasattr(builder, "get_bf16"):  # Triton 3.6
        type(builder).get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

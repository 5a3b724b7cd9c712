"""Runs pytest in a process of its own with interpreted Triton kernels, because a kernel is compiled
or interpreted from its definition on.

The interpreter takes milliseconds for each program of a kernel's grid, on one core. As a plugin of
that process, this module removes repeated work of the interpreter, and runs a part of each
product of parameters: `tests/gpu` runs all on a GPU, `make test-full` here.
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

from tests.covering import find_cover

WHOLE = {"FRAME_INTERPRETED": "whole"}  # runs all products of parameters
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

_ROOT = Path(__file__).resolve().parents[1]
_LIMIT = 580.0  # seconds, below what pytest gives a test; a dozen times what the longest that has no limit of its own takes alone


def run_interpreted(*arguments: str, limit: float | None = _LIMIT, **environment: str) -> str:
    """Run `pytest ARG…` in the project's root. -> its output. Fails if pytest fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.interpreter", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | environment
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["OPENBLAS_CORETYPE"] = "Sandybridge"  # newer x86 kernels of NumPy's products round a row by its place
    done = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    return done.stdout


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the cases of each test, keep few that have every value of every parameter."""
    if os.environ.get("FRAME_INTERPRETED") == "whole":
        return
    kept = find_cover(items)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


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
    _share_types(tl)


def _share_types(tl: Any) -> None:
    """Make each block type once, and what a tensor reads from its type once for each type: most of
    the time of an operation on tensors as small as those of the tests. Dimensions are compared once
    for each pair of shapes."""
    constexpr, block_type, tensor = tl.constexpr, tl.block_type, tl.tensor
    made: dict[tuple[int, tuple[Any, ...]], Any] = {}  # by the identity of an element type, which its block type keeps
    fill_block, fill_tensor = block_type.__init__, tensor.__init__

    def make_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        dims = tuple([each.value if type(each) is constexpr else each for each in shape])
        block = made.get((id(element_ty), dims))
        if block is None:
            fill_block(block := object.__new__(cls), element_ty, shape)
            block.dims = dims
            made[id(element_ty), dims] = block
        return block

    def make_tensor(self: Any, handle: Any, ty: Any) -> None:
        shared = vars(ty).get("of_tensors")
        if shared is None:
            fill_tensor(self, handle, ty)
            ty.of_tensors = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(shared)
            self.handle = handle

    block_type.__new__, block_type.__init__ = make_block, lambda self, element_ty, shape: None
    tensor.__init__ = make_tensor
    _share_results(block_type)


def _share_results(block_type: Any) -> None:
    """Find what two shapes are broadcast to, and the type that two are computed in, once for each
    pair."""
    from triton.language.semantic import TritonSemantic

    semantic: Any = TritonSemantic
    broadcast, compute_type, convert = semantic.broadcast_impl_value, semantic.computation_type_impl, semantic.cast
    targets: dict[tuple[Any, Any], Any] = {}
    types: dict[tuple[Any, ...], Any] = {}

    def widen(self: Any, value: Any, dims: Any, target: Any) -> Any:
        if dims == target:
            return value
        return self.make_tensor(self.builder.create_broadcast(value.handle, target), block_type(value.type.scalar, list(target)))

    def broadcast_known(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = vars(lhs.type).get("dims"), vars(rhs.type).get("dims")  # None: a scalar
        if left == right:
            return lhs, rhs
        if left is None or right is None or len(left) != len(right):
            return broadcast(self, lhs, rhs)
        target = targets.get((left, right))
        if target is None:
            found = broadcast(self, lhs, rhs)
            targets[left, right] = found[0].type.dims
            return found
        return widen(self, lhs, left, target), widen(self, rhs, right, target)

    def compute_known_type(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (id(a_ty), a_is_scalar, id(b_ty), b_is_scalar, div_or_mod)
        if key not in types:  # the two are kept, so that no other type gets their identity
            types[key] = (compute_type(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod), a_ty, b_ty)
        return types[key][0]

    def cast_unless_alike(self: Any, value: Any, dst_ty: Any, *rounding: Any, **named: Any) -> Any:
        return value if value.type.scalar is dst_ty.scalar else convert(self, value, dst_ty, *rounding, **named)

    semantic.broadcast_impl_value = broadcast_known
    semantic.computation_type_impl = compute_known_type
    semantic.cast = cast_unless_alike

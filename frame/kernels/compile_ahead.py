# mypy: disable-error-code="no-untyped-def"
"""`compile_ahead`: a block in which Triton kernels are compiled in parallel and not launched.

A cold start runs its warm-up steps in such a block first: compiled one after another, the kernels
of a large model take a minute. Threads suffice, because the passes of Triton and LLVM release the
interpreter's lock and ptxas is a process. Used by `frame.core.execution.components`. Must not know
a kernel. Importing this module does not import Triton.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

THREADS = 16
_OURS = ("frame.kernels.", "frame.attention_backends.triton.")  # what reads their outputs takes zeros
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)


@contextmanager
def compile_ahead(rank: int = 0) -> Iterator[None]:
    """Compile frame's Triton kernels where this thread launches them, and launch none; on return
    all are compiled. Kernels of others run as usual.

    Outputs of kernels keep what they held, and tensors made by `torch.empty` hold zeros, which are
    valid as indices. Odd ranks compile the last kernel first, so that ranks that share a cache
    folder compile different ones. A kernel that does not compile raises its error when it is
    launched after the block.
    """
    from triton.runtime.jit import JITFunction

    from frame.kernels.launch import PreparedLaunch

    here, jobs, launches = threading.get_ident(), _Jobs(takes_last=rank % 2 == 1), list[PreparedLaunch]()
    run, compile_kernel = JITFunction.run, JITFunction._do_compile  # noqa: SLF001 - Triton has no public hook that takes the place of a compilation
    prepare, launch = PreparedLaunch.__init__, PreparedLaunch.__call__

    def is_ahead(kernel):
        return threading.get_ident() == here and kernel.module.startswith(_OURS)

    def run_here(kernel, *args, grid, warmup, **options):
        return run(kernel, *args, grid=grid, warmup=warmup or is_ahead(kernel), **options)

    def compile_here(kernel, key, *rest):
        if not is_ahead(kernel):
            return compile_kernel(kernel, key, *rest)
        return jobs.submit((id(kernel), key), partial(compile_kernel, kernel, key, *rest))

    def prepare_here(prepared, *args):
        prepare(prepared, *args)
        launches.append(prepared)

    def launch_here(prepared, *args):
        return None if is_ahead(prepared.kernel) else launch(prepared, *args)

    with ExitStack() as stack:
        stack.enter_context(jobs.executor)
        stack.enter_context(_replaced(JITFunction, run=run_here, _do_compile=compile_here))
        stack.enter_context(_replaced(PreparedLaunch, __init__=prepare_here, __call__=launch_here))
        stack.enter_context(_ZeroedTensors())
        yield
    for each in launches:
        if isinstance(each.compiled, _Compiling) and each.compiled.exception() is None:
            each.compiled = each.compiled.result()


class _Compiling(Future[Any]):
    """Stands for a kernel that is compiled."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return self.result()[grid]


class _Jobs:
    """Compilations in threads."""

    def __init__(self, *, takes_last: bool) -> None:
        self.executor = ThreadPoolExecutor(THREADS, "compile-ahead")
        self._take = deque[tuple[_Compiling, Callable[[], Any]]].pop if takes_last else deque.popleft
        self._waiting: deque[tuple[_Compiling, Callable[[], Any]]] = deque()
        self._kernels: dict[tuple[int, str], _Compiling] = {}

    def submit(self, key: tuple[int, str], job: Callable[[], Any]) -> _Compiling:
        """The kernel of this key, which `job` compiles."""
        if key not in self._kernels:
            self._kernels[key] = _Compiling()
            self._waiting.append((self._kernels[key], job))
            self.executor.submit(self._compile_next)
        return self._kernels[key]

    def _compile_next(self) -> None:
        kernel, job = self._take(self._waiting)
        try:
            kernel.set_result(job())
        except Exception as error:  # noqa: BLE001 - raised at the launch
            kernel.set_exception(error)


class _ZeroedTensors(TorchFunctionMode):
    """In the block, new tensors without values hold zeros."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in _EMPTY else result


@contextmanager
def _replaced(owner: type, **methods: Callable[..., Any]) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in methods}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(owner, name, method)

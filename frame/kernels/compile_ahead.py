# mypy: disable-error-code="no-untyped-def"
"""`compile_ahead`: a block in which Triton kernels are compiled in parallel and not launched;
`report_compilations`: names what a request waits for all the same.

A cold start runs its warm-up steps in such a block first: compiled one after another, the kernels
of a large model take a minute. Threads suffice, because the passes of Triton and LLVM release the
interpreter's lock and ptxas is a process. Used by `processes.components`. Must not know a kernel.
Importing this module does not import Triton.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from frame import kernels
from frame.core.interfaces.rank_context import Track, track_silently

log = logging.getLogger(__name__)

THREADS = 8  # a fifth of a compilation holds the interpreter's lock
REPORTED = 0.1  # seconds of a compilation at least; a kernel that is in Triton's cache takes 10 ms
_OURS = ("frame.kernels.", "frame.attention_backends.triton.")  # what reads their outputs takes zeros
_EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)


@contextmanager
def compile_ahead(rank: int = 0, ranks: int = 1, track: Track = track_silently) -> Iterator[None]:
    """Note frame's Triton kernels where this thread launches them, and launch none; at the end of
    the block compile all. Kernels of others run as usual.

    Outputs of kernels keep what they held, and tensors made by `torch.empty` hold zeros, which are
    valid as indices. Each of `ranks`, which share a cache folder, compiles a part of the list first
    and finds the others' there. A kernel that does not compile raises its error when it is launched
    after the block.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from frame.kernels.launch import PreparedLaunch

    here, jobs, launches = threading.get_ident(), dict[tuple[int, str], _Job](), list[PreparedLaunch]()
    run, compile_kernel = JITFunction.run, JITFunction._do_compile  # noqa: SLF001 - Triton has no public hook that takes the place of a compilation
    prepare, launch = PreparedLaunch.__init__, PreparedLaunch.__call__

    def is_ahead(kernel):
        return threading.get_ident() == here and kernel.module.startswith(_OURS)

    def run_here(kernel, *args, grid, warmup, **options):
        return run(kernel, *args, grid=grid, warmup=warmup or is_ahead(kernel), **options)

    def compile_here(kernel, key, *rest):
        if not is_ahead(kernel):
            return compile_kernel(kernel, key, *rest)
        # in the order of a warm start: Triton 3.6 names a kernel by which of its helpers have names
        kernel.cache_key  # noqa: B018

        def job():
            code = compile_kernel(kernel, key, *rest)
            driver.active.launcher_cls(code.src, code.metadata)  # compiles the module that launches it, and leaves it in the folder
            return code

        return jobs.setdefault((id(kernel), key), _Job(job, len(kernel.src))).code

    def prepare_here(prepared, *args):
        prepare(prepared, *args)
        launches.append(prepared)

    def launch_here(prepared, *args):
        return None if is_ahead(prepared.kernel) else launch(prepared, *args)

    with (
        _replaced(JITFunction, run=run_here, _do_compile=compile_here),
        _replaced(PreparedLaunch, __init__=prepare_here, __call__=launch_here),
        _ZeroedTensors(),
    ):
        yield
    max_length = sorted(jobs.values(), key=lambda job: -job.length)  # first, so that none begins last
    with ThreadPoolExecutor(THREADS, "compile-ahead") as executor:
        started = [executor.submit(job.run) for share in range(ranks) for job in max_length[(rank + share) % ranks :: ranks]]
        for compilation in track(started, "compiling kernels"):
            compilation.result()
    for each in launches:
        if isinstance(each.compiled, _Code) and each.compiled.exception() is None:
            each.compiled = each.compiled.result()


def report_compilations(device: torch.device) -> None:
    """From now on, log each Triton kernel of frame that this thread compiles. Called at the end of
    the start, by the thread that runs the steps: requests wait for what it compiles later."""
    if not kernels.can_use_triton(device):
        return
    from triton import knobs

    here, began = threading.get_ident(), [0.0]

    def begin(**_: Any) -> None:
        if threading.get_ident() == here:
            began[0] = time.perf_counter()

    def end(*, repr: str, fn: Any, **_: Any) -> None:  # noqa: A002 - Triton passes it by this name
        seconds = time.perf_counter() - began[0]
        if threading.get_ident() == here and fn.module.startswith(_OURS) and seconds >= REPORTED:
            log.warning("requests waited %.1f s while %s was compiled; please report it with your model's config.json", seconds, repr)

    knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = begin, end


class _Code(Future[Any]):
    """Stands for the code of a kernel that is to be compiled."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return self.result()[grid]


class _Job:
    """A compilation. `length`: of the kernel's source."""

    def __init__(self, compile_kernel: Callable[[], Any], length: int) -> None:
        self._compile = compile_kernel
        self.length = length
        self.code = _Code()

    def run(self) -> None:
        try:
            self.code.set_result(self._compile())
        except Exception as error:  # noqa: BLE001 - raised at the launch
            self.code.set_exception(error)


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

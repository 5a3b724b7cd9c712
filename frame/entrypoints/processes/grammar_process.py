"""The processes of grammars: one compiles them and can be stopped, which a thread cannot; others
call those of running requests.

`GrammarProcess` is the engine's side of compilation; `main` is the process, run as a module with
the engine's process id. A message is its length (4 bytes, little endian) and MessagePack; the first
one is the resolved configuration. An empty reply says that the backend loads a library, which takes
its time. The kernel ends the process at the time limit, or with the engine.

`GrammarCallProcess` is the engine's side of calls; `serve_calls` is the process, which the module
runs with three more descriptors: two pipes for compiled grammars, whose messages a thread answers,
and the memory of the masks. The calls of steps take standard input and output.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from frame.config.resolved import Resolved
from frame.core.blame import describe
from frame.core.interfaces.sampling import CompiledGrammar, GrammarBackend, GrammarContext
from frame.entrypoints.processes.resource_monitor import read_usage
from frame.host.child_process import open_replies
from frame.host.descriptors import wait_readable
from frame.host.interpreter import child_environment, python_command
from frame.plugins.registry import Registry
from frame.structured_output.grammar_compiler import PREPARED, CompileTimeoutError

if TYPE_CHECKING:
    from frame.structured_output.served_calls import JumpSettings, ServedCalls

log = logging.getLogger(__name__)

START_SECONDS = 120.0  # timeout for loading the backend
GRACE = 2.0  # seconds after the alarm before the engine kills the process
MAX_BYTES = 64 << 20  # of a compiled grammar; the engine takes a second to read as much
WARMUP_GRAMMAR = ("regex", "a")
MODULE = "frame.entrypoints.processes.grammar_process"  # this one
NICENESS = 5  # compilation is less urgent than running requests


class GrammarProcess:
    """Implements `frame.structured_output.grammar_compiler.CompilerProcess`. One thread compiles at
    a time; another may call `close`."""

    def __init__(self, resolved: Resolved, command: Sequence[str] | None = None) -> None:
        self._command = command or python_command("-m", MODULE)
        self._config = resolved.model_dump_json()
        self._seconds = resolved.user.sampling.grammar_timeout
        self.cpu_seconds = 0.0  # of the last compilation
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def start(self) -> None:
        self._ensure_process()

    def compile(self, kind: str, source: str) -> bytes:
        """The compiled grammar. Raises ValueError for a grammar that is invalid or exceeds a limit,
        RuntimeError if there is no process."""
        process = self._ensure_process()
        reply = _ask(process, msgspec.msgpack.encode((kind, source)), self._seconds + GRACE)
        if reply == b"":
            assert process.stdout is not None
            reply = read_message(process.stdout.fileno(), START_SECONDS)
        if reply is None:
            raise self._exit_error(process, kind)
        is_well, data, self.cpu_seconds, retained = msgspec.msgpack.decode(reply, type=tuple[bool, bytes, float, int])
        if retained:
            log.warning("the grammar process still holds %d MB of a compilation's memory; it is replaced", retained // 10**6)
            end_process(process)
        if not is_well:
            raise ValueError(data.decode())
        return data

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            end_process(self._process)

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._closed:
            raise RuntimeError("the engine is stopping")
        process = subprocess.Popen(
            (*self._command, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment({"OMP_NUM_THREADS": "1"}),
        )
        self._process = process
        if _ask(process, self._config.encode(), START_SECONDS) is None or self._closed:
            end_process(process)
            raise RuntimeError("the grammar process failed to start; the cause is in the log")
        return process

    def _exit_error(self, process: subprocess.Popen[bytes], kind: str) -> Exception:
        code = end_process(process)
        if self._closed:
            return RuntimeError("the engine is stopping")
        if code in (-signal.SIGALRM, -signal.SIGKILL):
            return CompileTimeoutError(f"{kind} takes longer than {self._seconds:g} s to compile; simplify it")
        return ValueError(f"{kind} crashes the grammar compiler (out of memory, or an error in the compiler); simplify it")


def end_process(process: subprocess.Popen[bytes]) -> int:
    """End the process; returns its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.2)  # its pipe closes shortly before it exits
    if process.poll() is None:
        process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    return code


def _ask(process: subprocess.Popen[bytes], message: bytes, seconds: float) -> bytes | None:
    """The reply of the process; None if it ends or the time passes first."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        write_message(process.stdin.fileno(), message)
        return read_message(process.stdout.fileno(), seconds)
    return None


def write_message(handle: int, message: bytes) -> None:
    whole = memoryview(len(message).to_bytes(4, "little") + message)
    while whole:
        whole = whole[os.write(handle, whole) :]


def read_message(handle: int, seconds: float = math.inf) -> bytes | None:
    """The next message; None if the other side closes the pipe or the time passes first."""
    deadline = time.monotonic() + seconds
    message, size = bytearray(), 4
    while len(message) < size:
        if not wait_readable(handle, deadline - time.monotonic()):
            return None
        chunk = os.read(handle, min(1 << 20, size - len(message)))
        if not chunk:
            return None
        message += chunk
        if len(message) == 4 and size == 4:
            size += int.from_bytes(message, "little")
    return bytes(message[4:])


# calls of running requests ------------------------------------------------------------------------


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """config: of the engine, as JSON; shape: of the masks, int32."""

    config: str
    vocab_size: int
    shape: tuple[int, int, int]
    threads: int
    jumps: tuple[int, int, int, int] | None  # the fields of `JumpSettings`


class MaskMemory:
    """Memory of masks that processes share; `masks`: int32 of this shape, in this process."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        if hasattr(os, "memfd_create"):
            self.handle = os.memfd_create("frame-masks")
        else:
            with tempfile.TemporaryFile() as file:
                self.handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.handle)
        os.ftruncate(self.handle, 4 * int(np.prod(shape)))
        self.masks = map_masks(self.handle, shape)


def map_masks(handle: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The memory of a descriptor as int32 of a shape."""
    return np.frombuffer(mmap.mmap(handle, 4 * int(np.prod(shape))), np.int32).reshape(shape)


class GrammarCallProcess:
    """Implements `frame.structured_output.call_processes.CallProcess`. Raises RuntimeError if the
    process fails to start."""

    def __init__(
        self,
        config: str,
        vocab_size: int,
        memory: MaskMemory,
        threads: int,
        jumps: JumpSettings | None,
        command: Sequence[str] | None = None,
    ) -> None:
        calls_in, self._loads = os.pipe()
        self._loaded, replies_out = os.pipe()
        self._lock = threading.Lock()  # of the two pipes above
        try:
            self._process = subprocess.Popen(
                (*(command or python_command("-m", MODULE)), *map(str, (os.getpid(), calls_in, replies_out, memory.handle))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child_environment({"OMP_NUM_THREADS": "1"}),
                pass_fds=(calls_in, replies_out, memory.handle),
            )
        finally:
            os.close(calls_in)
            os.close(replies_out)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.send(msgspec.msgpack.encode(Setup(config, vocab_size, memory.shape, threads, None if jumps is None else astuple(jumps))))
        if self.receive(START_SECONDS) is None:
            self.close()
            raise RuntimeError("a grammar process failed to start; the cause is in the log")

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, message: bytes, seconds: float) -> bytes | None:
        with self._lock, contextlib.suppress(OSError):  # closed meanwhile
            write_message(self._loads, message)
            if (reply := read_message(self._loaded, seconds)) is not None:
                return reply
        self._process.kill()  # the next message would get this one's reply
        return None

    def send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            write_message(self._input, message)

    def receive(self, seconds: float) -> bytes | None:
        with contextlib.suppress(OSError):
            return read_message(self._output, seconds)
        return None

    def close(self) -> None:
        self._process.kill()  # which ends a call of `load`
        end_process(self._process)
        with self._lock:
            for handle in (self._loads, self._loaded):
                with contextlib.suppress(OSError):
                    os.close(handle)


# the process --------------------------------------------------------------------------------------


def load_backend(
    resolved: Resolved,
    registry: Registry,
    without_limits: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    threads: int | None = None,
) -> GrammarBackend:
    """The chosen grammar backend, built for the model's tokenizer. `without_limits`, `threads`: see
    `GrammarContext`."""
    from frame.text.tokenizer import Tokenizer

    choice = resolved.choice("grammar_backend")
    tokenizer = Tokenizer.load(Path(resolved.tokenizer_path or ""), trust_remote_code=resolved.user.model.trust_remote_code)
    context = GrammarContext(tokenizer, resolved.model.vocab_size, without_limits, threads)
    if tokenizer.is_python:
        registry.choose(choice)
        return NoGrammars(context)
    built: GrammarBackend = registry.create(choice, context)
    return built


class NoGrammars(GrammarBackend):
    """For a tokenizer that backends cannot read: refuses every grammar."""

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        raise ValueError(f"{kind} needs a tokenizer of the tokenizers library, and this checkpoint's is Python code; leave it out")


def main(load: Callable[..., GrammarBackend] = load_backend) -> None:
    """Compile grammars until standard input closes. `load` returns the backend; tests replace
    it."""
    from frame.plugins.loader import load_configured

    replies = open_replies(int(sys.argv[1]))  # a compilation does not read the input, so it would not notice the engine's end
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.nice(NICENESS)
    if (config := read_message(0)) is None:
        return
    resolved = Resolved.model_validate_json(config)
    sampling = resolved.user.sampling
    memory = MemoryLimit(sampling.grammar_memory, resolved.user.server.max_process_memory)
    limits = Limits(sampling.grammar_timeout, memory, partial(write_message, replies, b""))
    backend = load(resolved, load_configured(resolved.user.plugins), limits.suspend)
    compile_one(backend, *WARMUP_GRAMMAR)  # lazy imports of a backend happen before time and memory are limited
    memory.limit()
    write_message(replies, b"")
    while (message := read_message(0)) is not None:
        kind, source = msgspec.msgpack.decode(message, type=tuple[str, str])
        limits.begin()
        reply = compile_one(backend, kind, source)
        write_message(replies, msgspec.msgpack.encode((*reply, limits.end(), memory.measure_retained())))


class MemoryLimit:
    """The memory of compilations: `num_bytes` more than the process holds before them, and at most
    `max_process_memory` bytes with it."""

    def __init__(self, num_bytes: int, max_process_memory: int | None) -> None:
        self._num_bytes, self._max_process_memory = num_bytes, max_process_memory
        self._before = self._room = 0  # bytes

    def limit(self) -> None:
        """Limit this process from now on, relative to what it holds now."""
        self._before, self._room = _read_memory(), self._num_bytes
        if self._max_process_memory is not None:
            self._room = min(self._room, max(0, self._max_process_memory - self._before))
        _limit_memory(self._room)

    def measure_retained(self) -> int:
        """The bytes that compilations have not returned, if it is more than half of what they may
        take; 0 otherwise."""
        retained = _read_memory() - self._before
        return retained if retained > self._room // 2 else 0


class Limits:
    """The limits of a compilation: `seconds` of the clock, and its memory. `announce` is called
    when a compilation suspends them."""

    def __init__(self, seconds: float, memory: MemoryLimit, announce: Callable[[], None]) -> None:
        self._seconds, self._memory, self._announce = seconds, memory, announce
        self._began: float | None = None  # CPU seconds; None: nothing is compiled

    def begin(self, spent: float = 0.0) -> None:
        """Begin a compilation, which has taken `spent` CPU seconds already."""
        self._began = time.process_time() - spent
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def end(self) -> float:
        """Returns the CPU seconds of the compilation."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        began, self._began = self._began, None
        assert began is not None
        return time.process_time() - began

    @contextlib.contextmanager
    def suspend(self) -> Iterator[None]:
        """Lift the limits in the block, whose CPU time and memory do not count. The compilation
        then has all of its clock time again."""
        if self._began is None:
            yield
            return
        spent = self.end()
        _limit_memory(None)
        self._announce()
        try:
            yield
        finally:
            self._memory.limit()
            self.begin(spent)


def compile_one(backend: GrammarBackend, kind: str, source: str) -> tuple[bool, bytes]:
    """(True, the compiled grammar) or (False, the error)."""
    try:
        data = backend.dump(backend.compile(kind, source))
        return (True, data) if len(data) <= MAX_BYTES else (False, f"{kind} is too large when compiled; simplify it".encode())
    except (MemoryError, ValueError) as error:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):  # std::bad_alloc of a C++ compiler
            settings = "sampling.grammar_memory or server.max_process_memory"
            return False, f"{kind} takes more memory to compile than {settings} allows; simplify it".encode()
        return False, str(error).encode()
    except Exception as error:  # noqa: BLE001 - a third-party compiler's fault is its grammar's error
        return False, f"{kind} does not compile with {describe(backend)}: {type(error).__name__}: {error}".encode()


def _read_memory() -> int:
    usage = read_usage(os.getpid())
    return 0 if usage is None else usage.memory


def _limit_memory(num_bytes: int | None) -> None:
    """Limit this process to `num_bytes` more memory than it has now. None: lift the limit."""
    if not sys.platform.startswith("linux"):
        return
    _, maximum = resource.getrlimit(resource.RLIMIT_AS)
    limit = maximum
    if num_bytes is not None:
        limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + num_bytes
        limit = limit if maximum == resource.RLIM_INFINITY else min(limit, maximum)
    resource.setrlimit(resource.RLIMIT_AS, (limit, maximum))


def load_configured_backend(setup: Setup) -> GrammarBackend:
    """The grammar backend of an engine's configuration."""
    from frame.plugins.loader import load_configured

    resolved = Resolved.model_validate_json(setup.config)
    return load_backend(resolved, load_configured(resolved.user.plugins), threads=setup.threads)


def serve_calls(load: Callable[[Setup], GrammarBackend] = load_configured_backend) -> None:
    """Answer calls until standard input closes. `load` returns the backend; tests replace it."""
    from frame.structured_output.served_calls import JumpSettings, ServedCalls

    parent, calls_in, replies_out, memory = map(int, sys.argv[1:])
    replies = open_replies(parent)
    if (first := read_message(0)) is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    jumps = JumpSettings(*setup.jumps) if setup.jumps else None
    backend = load(setup)
    calls = ServedCalls(backend, map_masks(memory, setup.shape), setup.vocab_size, setup.threads, jumps)
    with contextlib.suppress(Exception):  # a backend's first grammar takes longer; one without this kind refuses it
        backend.compile(*PREPARED[1:])
    gc.collect()
    gc.freeze()  # collections that traverse a vocabulary would delay steps by 0.1 s
    threading.Thread(target=serve_loads, args=(calls, calls_in, replies_out), name="load-grammars", daemon=True).start()
    write_message(replies, b"")
    while (message := read_message(0)) is not None:
        calls.answer(message, lambda reply: write_message(replies, reply))


def serve_loads(calls: ServedCalls, calls_in: int, replies_out: int) -> None:
    """Load compiled grammars until the pipe closes."""
    while (message := read_message(calls_in)) is not None:
        with contextlib.suppress(BrokenPipeError):
            write_message(replies_out, calls.load_grammar(message))


if __name__ == "__main__":
    serve_calls() if len(sys.argv) > 2 else main()
    sys.stderr.flush()
    os._exit(0)  # finalizing the interpreter takes seconds once torch is loaded

"""Grammars are compiled in a process of their own, since a compiler that takes too long or too much can only be stopped with its process.

`GrammarProcess` is the engine's side: it starts the process when there is something to compile, and starts another when that one was
ended. `main` is the process: `python -m frame.entrypoints.processes.grammar_process ENGINE`, the engine's process id, with the resolved
configuration as its first frame on standard input. A frame is its length, 4 bytes, and MessagePack. Time is kept by an alarm, memory by
a limit on the address space, and the engine's life by a death signal: in all three cases the kernel ends the process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from frame.core.config.resolved import Resolved
from frame.core.grammars.grammar_compiler import CompileTimeoutError
from frame.core.interfaces.sampling import GrammarBackend
from frame.entrypoints.processes.deployment import PARENTS_SIGNALS, die_with

if TYPE_CHECKING:
    from frame.core.interfaces.sampling import CompiledGrammar
    from frame.plugins.registry import Registry

START_SECONDS = 120.0  # most that a process may take to load its backend
GRACE = 2.0  # seconds after the alarm, before the process is killed from outside
MAX_BYTES = 64 << 20  # of a compiled grammar; reading it takes the engine's process a second
FIRST = {"regex": "a", "structural_tag": '{"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}'}
NICENESS = 5  # compiling is less urgent than the steps of those who are served


class GrammarProcess:
    """See `frame.core.grammars.grammar_compiler.CompilerProcess`. One thread compiles at a time; `close` may come from another."""

    def __init__(
        self, resolved: Resolved, command: Sequence[str] = (sys.executable, "-m", "frame.entrypoints.processes.grammar_process")
    ) -> None:
        self._command = command
        self._config = resolved.model_dump_json()
        self._seconds = resolved.user.sampling.grammar_timeout
        self.cpu_seconds = 0.0  # of the last compilation
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False

    def compile(self, kind: str, source: str) -> bytes:
        """Raises ValueError for a grammar that is none or reaches a limit, RuntimeError when there is no process."""
        process = self._started()
        _write(process, msgspec.msgpack.encode((kind, source)))
        answer = _read(process, time.monotonic() + self._seconds + GRACE)
        if answer is None:
            raise self._ended(process, kind)
        is_well, data, self.cpu_seconds = msgspec.msgpack.decode(answer, type=tuple[bool, bytes, float])
        if not is_well:
            raise ValueError(data.decode())
        return data

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            _end(self._process)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if self._closed:
            raise RuntimeError("the engine stops")
        process = subprocess.Popen(
            (*self._command, str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._process = process
        _write(process, self._config.encode())
        if _read(process, time.monotonic() + START_SECONDS) is None or self._closed:
            _end(process)
            raise RuntimeError("the process that compiles grammars does not start; the log says why")
        return process

    def _ended(self, process: subprocess.Popen[bytes], kind: str) -> Exception:
        code = _end(process)
        if self._closed:
            return RuntimeError("the engine stops")
        if code in (-signal.SIGALRM, -signal.SIGKILL):
            return CompileTimeoutError(f"{kind} takes longer than {self._seconds:g} s to compile; simplify it")
        return ValueError(f"{kind} ends its compiler (out of memory, or a fault of the compiler); simplify it")


def _end(process: subprocess.Popen[bytes]) -> int:
    """Make sure that it has ended; returns its exit code."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.2)  # its end of the pipe closes a moment before it is gone
    if process.poll() is None:
        process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    return code


def _write(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended; the read says so
        process.stdin.write(len(data).to_bytes(4, "little") + data)
        process.stdin.flush()


def _read(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """The next frame; None when the process ends first, or the deadline passes."""
    assert process.stdout is not None
    handle = process.stdout.fileno()
    found, size = bytearray(), 4
    while len(found) < size:
        if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        part = os.read(handle, min(1 << 20, size - len(found)))
        if not part:
            return None
        found += part
        if len(found) == 4 and size == 4:
            size += int.from_bytes(found, "little")
    return bytes(found[4:])


# the process -------------------------------------------------------------------------------------------------------


def load_backend(resolved: Resolved, registry: Registry) -> GrammarBackend:
    """The chosen grammar backend, for the model's tokenizer."""
    from frame.core.text.tokenizer import Tokenizer

    target, options = registry.choose(resolved.plugins["grammar"][0])
    tokenizer = Tokenizer.load(Path(resolved.tokenizer_path or ""), trust_remote_code=resolved.user.model.trust_remote_code)
    if tokenizer.is_python:
        return NoGrammars(tokenizer, resolved.model.vocab_size)
    built: GrammarBackend = target(tokenizer, resolved.model.vocab_size, options)
    return built


class NoGrammars(GrammarBackend):
    """For a tokenizer that backends cannot read: refuses each request's grammar."""

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        raise ValueError(f"{kind} needs a tokenizer of the tokenizers library, and this checkpoint's is Python code; leave it out")

    def dump(self, compiled: CompiledGrammar) -> bytes:
        return b""

    def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
        return self.compile(kind, source)


def main(load: Callable[[Resolved, Registry], GrammarBackend] = load_backend) -> None:
    """Serve until standard input ends. `load` gives the backend (tests put others here)."""
    from frame.plugins.loader import load_registry

    die_with(int(sys.argv[1]))  # a compilation reads no input, whose end would say that the engine is gone
    for number in PARENTS_SIGNALS:  # they may reach the whole group
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print belongs to the log
    os.nice(NICENESS)
    config = _next_frame()
    if config is None:
        return
    resolved = Resolved.model_validate_json(config)
    sampling, plugins = resolved.user.sampling, resolved.user.plugins
    backend = load(resolved, load_registry(allow=plugins.allow, deny=plugins.deny))
    for kind, source in FIRST.items():  # what a backend loads late is loaded before time and memory count
        compile_one(backend, kind, source)
    limit_memory(sampling.grammar_memory)
    _answer(answers, b"")
    while (frame := _next_frame()) is not None:
        kind, source = msgspec.msgpack.decode(frame, type=tuple[str, str])
        signal.setitimer(signal.ITIMER_REAL, sampling.grammar_timeout)
        began = time.process_time()
        found = compile_one(backend, kind, source)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(answers, msgspec.msgpack.encode((*found, time.process_time() - began)))


def compile_one(backend: GrammarBackend, kind: str, source: str) -> tuple[bool, bytes]:
    """(whether it compiles, the result or the reason)."""
    try:
        data = backend.dump(backend.compile(kind, source))
        return (True, data) if len(data) <= MAX_BYTES else (False, f"{kind} is too large when compiled; simplify it".encode())
    except (MemoryError, ValueError) as error:
        if isinstance(error, MemoryError) or "bad_alloc" in str(error):  # C++'s
            return False, f"{kind} takes more memory to compile than a grammar may; simplify it".encode()
        return False, str(error).encode()
    except Exception as error:  # noqa: BLE001 - a third-party compiler's fault is its grammar's error
        return False, f"{kind} does not compile: {type(error).__name__}: {error}".encode()


def limit_memory(num_bytes: int) -> None:
    """From now on this process may take so much more memory than it has."""
    if not sys.platform.startswith("linux"):
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _next_frame() -> bytes | None:
    length = _exactly(4)
    return None if length is None else _exactly(int.from_bytes(length, "little"))


def _exactly(count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        part = os.read(0, count - len(found))
        if not part:
            return None
        found += part
    return bytes(found)


def _answer(handle: int, data: Any) -> None:
    whole = memoryview(len(data).to_bytes(4, "little") + data)
    while whole:
        whole = whole[os.write(handle, whole) :]


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # taking down an interpreter that has loaded torch takes long

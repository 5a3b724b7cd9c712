"""A process that calls grammars of running requests, beside the engine.

`GrammarCallProcess` is the engine's side; `main` is the process, run as a module with the engine's
process id and three descriptors: two pipes for compiled grammars, whose calls a thread of the
process answers, and the memory of the masks. The calls of steps take standard input and output. A
message is as in `grammar_process`; the first one is `Setup`, answered by an empty one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from frame.config.resolved import Resolved
from frame.core.interfaces.sampling import GrammarBackend
from frame.entrypoints.processes.grammar_process import end_process, load_backend, read_message, write_message
from frame.host.child_process import PARENTS_SIGNALS, die_with_parent
from frame.host.interpreter import child_environment, python_command
from frame.structured_output.served_calls import JumpSettings, ServedCalls

MODULE = "frame.entrypoints.processes.call_process"  # this one
START_SECONDS = 120.0  # timeout for loading the backend


class Setup(msgspec.Struct, frozen=True, array_like=True):
    """config: of the engine, as JSON; shape: of the masks, int32."""

    config: str
    vocab_size: int
    shape: tuple[int, int, int]
    threads: int
    jumps: JumpSettings | None


class MaskMemory:
    """Memory of masks that processes share; `masks`: int32 of this shape, in this process."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape
        if hasattr(os, "memfd_create"):
            self.handle = os.memfd_create("frame-masks")
        else:
            with tempfile.TemporaryFile() as file:
                self.handle = os.dup(file.fileno())
        os.ftruncate(self.handle, 4 * int(np.prod(shape)))
        self.masks = map_masks(self.handle, shape)


def map_masks(handle: int, shape: tuple[int, int, int]) -> np.ndarray:
    """The memory of a descriptor as int32 of a shape."""
    return np.frombuffer(mmap.mmap(handle, 4 * int(np.prod(shape))), np.int32).reshape(shape)


class GrammarCallProcess:
    """Implements `frame.structured_output.remote_calls.CallProcess`. Raises RuntimeError if the
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
        self.send(msgspec.msgpack.encode(Setup(config, vocab_size, memory.shape, threads, jumps)))
        if self.receive(START_SECONDS) is None:
            self.close()
            raise RuntimeError("a grammar process failed to start; the cause is in the log")

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, message: bytes, seconds: float) -> bytes | None:
        with self._lock, contextlib.suppress(OSError):  # closed meanwhile
            write_message(self._loads, message)
            return read_message(self._loaded, seconds)
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


def load_configured_backend(setup: Setup) -> GrammarBackend:
    """The grammar backend of an engine's configuration."""
    from frame.plugins.loader import load_configured

    resolved = Resolved.model_validate_json(setup.config)
    return load_backend(resolved, load_configured(resolved.user.plugins), threads=setup.threads)


def main(load: Callable[[Setup], GrammarBackend] = load_configured_backend) -> None:
    """Answer calls until standard input closes. `load` returns the backend; tests replace it."""
    parent, calls_in, replies_out, memory = map(int, sys.argv[1:])
    die_with_parent(parent)
    for number in PARENTS_SIGNALS:  # the terminal sends them to the whole process group
        signal.signal(number, signal.SIG_IGN)
    replies = os.dup(1)
    os.dup2(2, 1)  # output of libraries goes to the log
    if (first := read_message(0)) is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    backend = load(setup)
    calls = ServedCalls(map_masks(memory, setup.shape), setup.vocab_size, setup.threads, setup.jumps)
    threading.Thread(target=serve_loads, args=(calls, backend, calls_in, replies_out), name="load-grammars", daemon=True).start()
    write_message(replies, b"")
    while (message := read_message(0)) is not None:
        calls.answer(message, lambda reply: write_message(replies, reply))


def serve_loads(calls: ServedCalls, backend: GrammarBackend, calls_in: int, replies_out: int) -> None:
    """Load compiled grammars until the pipe closes."""
    while (message := read_message(calls_in)) is not None:
        with contextlib.suppress(BrokenPipeError):
            write_message(replies_out, calls.load_grammar(backend, message))


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # finalizing the interpreter takes seconds once torch is loaded

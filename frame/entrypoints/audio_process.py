"""Decodes one audio file by libsndfile in a process of its own, which limits memory and CPU time.

A file of a client reaches C code there only, and what libsndfile and mpg123 print is dropped.
`AudioProcess` is the server's side; `main` is the process. Its standard input is the file; it
writes a head and then the samples, as the other side reads them. Used by `frame.entrypoints.audio`.
Imports neither numpy nor much of frame, because each file starts a process.
"""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import BinaryIO, Self

from frame.host.descriptors import wait_readable
from frame.host.interpreter import child_environment, python_command

HEAD = struct.Struct("<qii")  # frames by the file's head (0: unknown), samples a second, channels
BLOCK = 16 * 1024  # frames that are decoded at a time
MAX_MEMORY = 512 << 20  # address space of the process, in bytes; Python and libsndfile take 60 MB
MAX_CPU_SECONDS = 120  # half an hour of MP3 takes 6
TIMEOUT = 60.0  # seconds to wait for a part
MODULE = "frame.entrypoints.audio_process"  # this one
PIECE = 1 << 20  # bytes that are read at a time
EXIT_UNREADABLE, EXIT_DAMAGED = 3, 4


class UnreadableError(Exception):
    """The file is none that libsndfile reads."""


class DamagedError(Exception):
    """The decoder failed within the file, or exceeded its limits."""


class AudioProcess:
    """One file that is being decoded; a context manager. Raises UnreadableError, DamagedError."""

    def __init__(self, data: bytes, command: Sequence[str] | None = None) -> None:
        with _open_memory() as file:
            file.write(data)
            file.flush()
            file.seek(0)
            self._process = subprocess.Popen(
                command or python_command("-m", MODULE),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
            )
        self._lock = threading.Lock()  # held while a thread reads
        try:
            self.num_frames, self.rate, self.channels = HEAD.unpack(self._read(HEAD.size))
        except BaseException:
            self.close()
            raise

    def read(self, count: int) -> bytes:
        """At most `count` frames, float32 [frames, channels]; fewer at the end only."""
        return self._read(4 * self.channels * count)

    def close(self) -> None:
        """End the process. Another thread may read: it raises DamagedError."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        received, until = bytearray(), time.monotonic() + TIMEOUT
        with self._lock:
            while len(received) < size:
                handle = self._process.stdout.fileno()
                is_ready = wait_readable(handle, until - time.monotonic())
                piece = os.read(handle, min(PIECE, size - len(received))) if is_ready else b""
                if not piece:
                    self._check_end(is_ready)
                    break
                received += piece
        return bytes(received)

    def _check_end(self, has_ended: bool) -> None:
        """Raise unless the process has written all samples."""
        if not has_ended:
            self._process.kill()
        code = self._process.wait()
        if code == EXIT_UNREADABLE:
            raise UnreadableError
        if code:
            raise DamagedError


def _open_memory() -> BinaryIO:
    """A file in memory, where the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("audio"), "r+b")
    return tempfile.TemporaryFile()


# the process --------------------------------------------------------------------------------------


def main() -> int:
    """Decode standard input to standard output. Returns the exit code."""
    import soundfile

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    if sys.platform.startswith("linux"):
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    try:
        file = soundfile.SoundFile(0, closefd=False)
        known = 0 if file.format == "MP3" else file.frames  # which libsndfile estimates from the first frames
        head = HEAD.pack(known, file.samplerate, file.channels)
    except (RuntimeError, TypeError, ValueError, struct.error):  # of libsndfile; a raw file has no format
        return EXIT_UNREADABLE
    with os.fdopen(os.dup(1), "wb", buffering=0) as output:
        output.write(head)
        try:
            while block := memoryview(file.buffer_read(BLOCK, dtype="float32")):
                while block:
                    block = block[output.write(block) :]
        except BrokenPipeError:
            return 0
        except (RuntimeError, MemoryError):
            return EXIT_DAMAGED
    return 0


if __name__ == "__main__":
    os._exit(main())

"""Logging of every process: one line an event on standard error, as text or as JSON, each with the id of the request that it concerns.

The main process writes from a thread of its own and relays what its children write, so that a reader that stops reading stops no
process. Knows no route. Contents of requests are never logged.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import IO, Any

import msgspec

from frame.core.config.schema import LogSection

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request that the running task serves
PROGRESS = logging.getLogger("frame.progress")  # start and stop; shown whatever the level
ACCESS = logging.getLogger("frame.access")
HEADER = b"x-request-id"
LONGEST_ID = 128
ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
MOST_HELD = 4096  # entries that wait for the reader of standard error
LONGEST_ENTRY = 16 * 1024  # bytes of one that a child writes
LAST_LINES = 1.0  # seconds that the lines that wait at the end may take
log = logging.getLogger(__name__)


class LogWriter(io.TextIOBase):
    """Writes to a descriptor from a thread of its own; takes the place of `sys.stderr`. A write never waits: what exceeds `MOST_HELD`
    entries is dropped and counted, and the log says so once all that waited is written."""

    def __init__(self, descriptor: int = 2) -> None:
        self.num_dropped = 0  # lines
        self._descriptor = descriptor
        # Its `put` is reentrant: a signal handler may log while the same thread does.
        self._held: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def write(self, text: str) -> int:
        self.put(text.encode(errors="backslashreplace"))
        return len(text)

    def put(self, data: bytes) -> None:
        """Write whole lines, later."""
        if self._held.qsize() < MOST_HELD:
            self._held.put(data)
        else:
            self.num_dropped += data.count(b"\n")

    def drain(self, seconds: float) -> None:
        """Wait until all is written, for so long at most."""
        done = threading.Event()
        self._held.put(done)
        done.wait(seconds)

    def relay(self, source: IO[bytes]) -> threading.Thread:
        """Take whatever is written to a pipe until its end, from a thread. Raises RuntimeError where no thread can be started."""
        thread = threading.Thread(target=self._take, args=(source,), name="log-relay", daemon=True)
        thread.start()
        return thread

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def _take(self, source: IO[bytes]) -> None:
        with source:
            while line := source.readline(LONGEST_ENTRY):
                self.put(line)

    def _run(self) -> None:
        num_told = 0
        while True:
            entry = self._held.get()
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                self._write(entry)
            num_dropped = self.num_dropped
            if num_dropped > num_told and self._held.empty():
                log.warning("%d log lines were dropped, since standard error was not read or not writable", num_dropped - num_told)
                num_told = num_dropped

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program made the open file non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # the reader is gone, or the disk is full
                self.num_dropped += data.count(b"\n")
                return


class LogHandler(logging.Handler):
    """Hands formatted records to a `LogWriter`."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__()
        self.writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - a line that cannot be formatted fails as the logging package does
            self.handleError(record)

    def close(self) -> None:
        self.writer.drain(LAST_LINES)
        super().close()


def configured_writer() -> LogWriter | None:
    """The writer that this process logs through, if it has one."""
    return next((handler.writer for handler in logging.getLogger().handlers if isinstance(handler, LogHandler)), None)


def configure(process: str, settings: LogSection, writer: LogWriter | None = None) -> None:
    """Send what this process logs to standard error, with all else that Python code writes there. `process` names it in each line.
    Without a `writer`, for children whose parent relays, the calling thread writes."""
    handler = logging.StreamHandler(sys.stderr) if writer is None else LogHandler(writer)
    if writer is not None:
        sys.stderr = writer
    logging.captureWarnings(True)
    handler.setFormatter(JsonFormatter(process) if settings.format == "json" else TextFormatter(process))
    handler.addFilter(_add_request_id)
    logging.basicConfig(handlers=[handler], force=True)
    set_levels(settings)
    PROGRESS.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop are ours to tell
    logging.getLogger("uvicorn.error").addFilter(Sparse())  # anybody can send what is no HTTP, as often as he likes


def set_levels(settings: LogSection) -> None:
    """What is logged from now on; its form stays."""
    logging.getLogger().setLevel(settings.level.upper())
    ACCESS.setLevel(logging.INFO if settings.access else logging.WARNING)


def report(line: str) -> None:
    """A line of progress for the operator."""
    if logging.getLogger().handlers:
        PROGRESS.info("%s", line)
    else:  # used as a library
        sys.stderr.write(f"frame: {line}\n")
        sys.stderr.flush()


def request_id_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The id that a request brings as `X-Request-Id`, if it is one (letters, digits, `.`, `_`, `-`; at most 128), else a new one."""
    given = next((value for name, value in headers if name == HEADER), b"")
    if 0 < len(given) <= LONGEST_ID and ID_CHARACTERS.issuperset(given):
        return given.decode("ascii")
    return new_id()


def new_id() -> str:
    return uuid.uuid4().hex[:16]


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = REQUEST_ID.get()
    return True


class Sparse(logging.Filter):
    """Of equal warnings lets one through in `every` seconds, with the number of those left out since."""

    def __init__(self, every: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every = every
        self._clock = clock
        self._message = ""
        self._until = 0.0
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        message, now = record.getMessage(), self._clock()
        if message == self._message and now < self._until:
            self._left_out += 1
            return False
        if message == self._message and self._left_out:
            record.msg, record.args = f"{message} ({self._left_out} more like it since the last such line)", ()
        self._message, self._until, self._left_out = message, now + self._every, 0
        return True


class TextFormatter(logging.Formatter):
    """For people. Control characters are escaped, so that nobody writes lines of his own into the log."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        message = _printable(record.getMessage())
        if record.name == PROGRESS.name:
            return f"frame: {message}"
        request_id = getattr(record, "request_id", "")
        line = f"{self.formatTime(record)} {record.levelname} {self._process}: {message}{f' [{request_id}]' if request_id else ''}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """For machines: one object a line. `extra={"fields": {…}}` of a log call adds keys."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            entry["request_id"] = request_id
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        try:
            return msgspec.json.encode(entry, enc_hook=str).decode()
        except UnicodeEncodeError:  # half of a surrogate pair
            clean = {key: value.encode(errors="replace").decode() if isinstance(value, str) else value for key, value in entry.items()}
            return msgspec.json.encode(clean, enc_hook=str).decode()


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

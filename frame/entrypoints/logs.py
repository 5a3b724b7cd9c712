"""Logging of every process: one line per event on standard error, as text or JSON, with the id of
the request that it concerns.

The main process writes in a separate thread and relays the lines of its children, so a reader of
standard error that stops reading blocks no process. Contents of requests are never logged. Must not
know a route.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import sys
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import IO, Any

import msgspec

from frame.config.server_sections import LogSection
from frame.host.descriptors import wait_writable

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request that the running task handles
TRACE: ContextVar[str] = ContextVar("trace", default="")  # W3C traceparent of that request's span
PROGRESS = logging.getLogger("frame.progress")  # start and stop; shown at every level
ACCESS = logging.getLogger("frame.access")
HEADER = b"x-request-id"
MAX_ID_LENGTH = 128
ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
MAX_QUEUED = 4096  # entries that wait for the reader of standard error
MAX_LINE_BYTES = 16 * 1024  # of a line relayed from a child
CLOSE_TIMEOUT = 1.0  # seconds for writing the queued lines at the end
log = logging.getLogger(__name__)


class LogWriter(io.TextIOBase):
    """Writes to a file descriptor in a separate thread; replaces `sys.stderr`. A write never
    blocks: entries beyond `MAX_QUEUED` are dropped and counted, and a log line reports the count
    when the queue is empty again."""

    def __init__(self, descriptor: int = 2) -> None:
        self.num_dropped = 0  # lines
        self._descriptor = descriptor
        # Its `put` is reentrant: a signal handler may log while the same thread does.
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def write(self, text: str) -> int:
        self.put(text.encode(errors="backslashreplace"))
        return len(text)

    def put(self, data: bytes) -> None:
        """Queue whole lines for writing."""
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(data)
        else:
            self.num_dropped += data.count(b"\n")

    def drain(self, seconds: float) -> None:
        """Wait until the queue is written, for at most `seconds`."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(seconds)

    def relay(self, source: IO[bytes]) -> threading.Thread:
        """Write what arrives on a pipe until its end, in a new thread. Raises RuntimeError."""
        thread = threading.Thread(target=self._relay_lines, args=(source,), name="log-relay", daemon=True)
        thread.start()
        return thread

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def _relay_lines(self, source: IO[bytes]) -> None:
        with source:
            while line := source.readline(MAX_LINE_BYTES):
                self.put(line)

    def _run(self) -> None:
        num_reported = 0
        while True:
            entry = self._queue.get()
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                self._write(entry)
            num_dropped = self.num_dropped
            if num_dropped > num_reported and self._queue.empty():
                log.warning("%d log lines were dropped because standard error was not read or not writable", num_dropped - num_reported)
                num_reported = num_dropped

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another program made the file non-blocking
                wait_writable(self._descriptor)
            except OSError:  # the reader has closed it, or the disk is full
                self.num_dropped += data.count(b"\n")
                return


class LogHandler(logging.StreamHandler[LogWriter]):
    """Writes to a `LogWriter`, and waits at the end for what it has queued."""

    def close(self) -> None:
        self.stream.drain(CLOSE_TIMEOUT)
        super().close()


def configured_writer() -> LogWriter | None:
    """The `LogWriter` of this process, if it has one."""
    return next((handler.stream for handler in logging.getLogger().handlers if isinstance(handler, LogHandler)), None)


def configure(process: str, settings: LogSection, writer: LogWriter | None = None) -> None:
    """Set up logging to standard error. `process` is the name in each line. With a `writer`, other
    output to `sys.stderr` goes through it too; without one (in children, whose lines the parent
    relays) the calling thread writes."""
    handler = logging.StreamHandler(sys.stderr) if writer is None else LogHandler(writer)
    if writer is not None:
        sys.stderr = writer
    logging.captureWarnings(True)
    handler.setFormatter(JsonFormatter(process) if settings.format == "json" else TextFormatter(process))
    handler.addFilter(_add_request_id)
    logging.basicConfig(handlers=[handler], force=True)
    set_levels(settings)
    PROGRESS.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # `report` logs start and stop


def set_levels(settings: LogSection) -> None:
    """Apply the log levels of the settings; the format stays."""
    logging.getLogger().setLevel(settings.level.upper())
    ACCESS.setLevel(logging.INFO if settings.access else logging.WARNING)


def report(line: str) -> None:
    """Write a line of progress for the operator."""
    if logging.getLogger().handlers:
        PROGRESS.info("%s", line)
    else:  # logging is not configured: frame is used as a library
        sys.stderr.write(f"frame: {line}\n")
        sys.stderr.flush()


def request_id_of(headers: Sequence[tuple[bytes, bytes]]) -> str:
    """The request's `X-Request-Id` if it is valid, else a new one."""
    sent = next((value for name, value in headers if name == HEADER), b"")
    if 0 < len(sent) <= MAX_ID_LENGTH and ID_CHARACTERS.issuperset(sent):
        return sent.decode("ascii")
    return secrets.token_hex(8)


def _add_request_id(record: logging.LogRecord) -> bool:
    if not hasattr(record, "request_id"):
        record.request_id = REQUEST_ID.get()
    return True


class TextFormatter(logging.Formatter):
    """Text lines. Control characters are escaped, so that a client cannot forge log lines."""

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
    """One JSON object per line. `extra={"fields": {…}}` of a log call adds keys."""

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

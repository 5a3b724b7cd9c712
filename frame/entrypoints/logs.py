"""Logging of every process: one line an event on standard error, as text or as JSON, each with the id of the request that it concerns.

Knows no route. Contents of requests are never logged.
"""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

import msgspec

from frame.core.config import LogSection

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")  # of the request that the running task serves
PROGRESS = logging.getLogger("frame.progress")  # start and stop; shown whatever the level
ACCESS = logging.getLogger("frame.access")
HEADER = b"x-request-id"
LONGEST_ID = 128
ID_CHARACTERS = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def configure(process: str, settings: LogSection) -> None:
    """Send what this process logs to standard error. `process` names it in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if settings.format == "json" else TextFormatter(process))
    handler.addFilter(_add_request_id)
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    PROGRESS.setLevel(logging.INFO)
    ACCESS.setLevel(logging.INFO if settings.access else logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop are ours to tell
    logging.getLogger("uvicorn.error").addFilter(Sparse())  # anybody can send what is no HTTP, as often as he likes


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

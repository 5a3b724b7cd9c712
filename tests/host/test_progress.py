"""Progress of long work, on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import threading

import pytest

from frame.host import progress
from frame.host.progress import Count, show_progress, track


class WaitingText(io.StringIO):
    """A text whose reader waits for its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.has_line = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "\n" in text:
            self.has_line.set()
        return written


@pytest.fixture
def own_logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """A logger without the handlers of the test run."""
    logger = logging.getLogger("test_progress")
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setattr(logger, "hasHandlers", lambda: bool(logger.handlers))
    monkeypatch.setattr(progress, "_log", logger)
    return logger


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, own_logger: logging.Logger) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    errors = WaitingText()
    monkeypatch.setattr(sys, "stderr", errors)
    with show_progress("loading weights", 200) as advance:
        advance(50)
        errors.has_line.clear()
        assert errors.has_line.wait(60)
    line = errors.getvalue().splitlines()[-1]
    assert line.startswith("loading weights: 50 of 200 (25 %), ")
    assert line.endswith(" left")


def test_a_process_with_a_log_logs_them(monkeypatch: pytest.MonkeyPatch, own_logger: logging.Logger) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    text = WaitingText()
    own_logger.addHandler(handler := logging.StreamHandler(text))
    with show_progress("installing"):
        assert text.has_line.wait(60)
    own_logger.removeHandler(handler)
    assert text.getvalue().startswith("installing: 0:00 so far\n")
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    assert list(track([1, 2, 3], "counting", 3)) == [1, 2, 3]
    assert errors.getvalue() == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "BAR_DELAY", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal, os.fdopen(ours, "rb", buffering=0) as shown:
        monkeypatch.setattr(sys, "stderr", terminal)
        seen = b""
        with show_progress("downloading", 4_000_000_000, "bytes") as advance:
            advance(1_000_000_000)
            while b"1.0/4.0 GB" not in seen:
                seen += shown.read(4096)
        monkeypatch.undo()
    assert b"downloading" in seen


def test_threads_advance_one_count() -> None:
    count = Count("x", 8000, "")
    threads = [threading.Thread(target=lambda: [count.advance(1) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.done == 8000


@pytest.mark.parametrize(
    ("seconds", "total", "done", "unit", "line"),
    [
        (10, 100, 25, "", "x: 25 of 100 (25 %), 2.5/s, 0:30 left"),
        (10, 4_000_000_000, 1_000_000_000, "bytes", "x: 1 GB of 4 GB (25 %), 100 MB/s, 0:30 left"),
        (3700, None, 7400, "", "x: 7,400, 2/s, 1:01:40 so far"),
        (5, 100, 0, "", "x: 0:05 so far"),
        (5, 0, 0, "", "x: 0:05 so far"),
    ],
)
def test_the_line(monkeypatch: pytest.MonkeyPatch, seconds: float, total: int | None, done: int, unit: progress.Unit, line: str) -> None:
    clock = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    count = Count("x", total, unit)
    count.advance(done)
    assert count.describe() == line


def test_an_error_ends_the_display() -> None:
    with pytest.raises(ValueError, match="wrong"), show_progress("failing", 3):
        raise ValueError("wrong")
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]

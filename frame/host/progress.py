"""Progress of long work on standard error: a bar with rate and remaining time on a terminal, a line
every ten seconds elsewhere.

Used by whatever takes long outside of the core: downloads, weights, kernels, graphs, measurements.
The core calls the functions that are passed to it. Must not know the work. rich is imported when
the first bar is shown, so work that takes less than half a second costs a thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

Advance = Callable[[int], object]  # called with the units of work that have been done since the last call
Unit = Literal["", "bytes"]
T = TypeVar("T")

BAR_DELAY = 0.5  # seconds of work before a bar appears
LINE_SECONDS = 10.0  # between two lines
REFRESHES = 2  # of a bar per second; few, as they take time from measurements in this process
_log = logging.getLogger("frame.progress")  # entrypoints.logs shows it at every level
_PREFIXES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@contextmanager
def show_progress(title: str, total: int | None = None, unit: Unit = "") -> Iterator[Advance]:
    """Show the progress of a block, which calls the yielded function from any thread. `total`: None
    where it is unknown. Nothing is shown of work that ends within `BAR_DELAY`, or `LINE_SECONDS`
    where standard error is no terminal."""
    count = Count(title, total, unit)
    has_ended = threading.Event()
    show = _show_bar if is_terminal() else _write_lines
    thread = threading.Thread(target=show, args=(count, has_ended), name="progress", daemon=True)
    thread.start()
    try:
        yield count.advance
    finally:
        has_ended.set()
        thread.join()


def track(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and show how many the caller has done. `total`: of items without a
    length."""
    with show_progress(title, len(items) if isinstance(items, Sized) else total) as advance:
        for item in items:
            yield item
            advance(1)


def is_terminal() -> bool:
    """Whether standard error is a terminal."""
    with suppress(ValueError, AttributeError):  # it is closed, or there is none
        return sys.stderr.isatty()
    return False


class Count:
    """The work done so far. `describe` is one line: "weights: 30 of 100 (30 %), 2/s, 0:35 left"."""

    def __init__(self, title: str, total: int | None, unit: Unit = "") -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, amount: int) -> None:
        with self._lock:
            self.done += amount

    def describe(self) -> str:
        seconds = time.monotonic() - self._since
        rate = self.done / seconds if seconds > 0 else 0.0
        if not self.done or self.total == 0:
            return f"{self.title}: {_clock(seconds)} so far"
        if self.total is None:
            return f"{self.title}: {self._amount(self.done)}, {self._amount(rate)}/s, {_clock(seconds)} so far"
        done, total = self._amount(self.done), self._amount(self.total)
        left = _clock(max(0, self.total - self.done) / rate)
        return f"{self.title}: {done} of {total} ({100 * self.done // self.total} %), {self._amount(rate)}/s, {left} left"

    def _amount(self, value: float) -> str:
        if self.unit == "bytes":
            name, factor = next((each for each in _PREFIXES if value >= each[1]), ("B", 1.0))
            return f"{value / factor:.3g} {name}"
        return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2g}"


def _write_lines(count: Count, has_ended: threading.Event) -> None:
    """Through the log of a process that has one, so that its lines keep their format."""
    while not has_ended.wait(LINE_SECONDS):
        line = count.describe()
        if _log.hasHandlers():
            _log.info("%s", line)
        else:
            with suppress(OSError, ValueError):  # nothing reads it any more
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()


def _show_bar(count: Count, has_ended: threading.Event) -> None:
    if has_ended.wait(BAR_DELAY):
        return
    from rich import progress
    from rich.console import Console

    is_bytes = count.unit == "bytes"
    rate: progress.ProgressColumn = progress.TransferSpeedColumn() if is_bytes else progress.TextColumn("{task.fields[rate]}")
    amount: progress.ProgressColumn = progress.DownloadColumn() if is_bytes else progress.MofNCompleteColumn()
    time_left: progress.ProgressColumn = progress.TimeElapsedColumn() if count.total is None else progress.TimeRemainingColumn()
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), amount, rate, time_left)
    options: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
    with progress.Progress(*columns, console=Console(stderr=True), refresh_per_second=REFRESHES, **options) as bar:
        task = bar.add_task(count.title, total=count.total, completed=count.done, rate="")
        while not has_ended.wait(1 / REFRESHES):
            speed = bar.tasks[0].speed
            bar.update(task, completed=count.done, total=count.total, rate="" if speed is None else f"{speed:,.3g}/s")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

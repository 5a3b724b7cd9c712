"""What all conformance suites check with, in place of small constants of their own: names that
begin alike, values at one address, results after the next call, growth of memory and of time with
a size, and what a plugin leaves in the process.

Used by the suites of this package. Must not know a kind or a plugin, and imports no torch.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

from frame.testing.conformance import count_elements

T = TypeVar("T")

ALIKE = (8, 16, 32, 64, 128)  # characters in which names are equal that must be told apart
CALLS = 15  # of which the fastest counts: a busy machine delays some, and a plugin that waits all
ROUNDS = 3  # of which one must keep a limit: a machine may be busy during one
_REST = 0.1  # seconds between two rounds
_MAX_END_SECONDS = 5.0  # seconds that a thread or process that was told to end may take


def make_alike(lengths: Iterable[int] = ALIKE, fill: str = "n") -> list[tuple[str, str]]:
    """Pairs of names of printable ASCII that are equal in so many characters, and differ after
    them."""
    return [((fill * length) + "-1", (fill * length) + "-2") for length in lengths]


class Salted(str):
    """A text whose hash is that of another process: Python draws them anew in each."""

    _salt: int

    def __new__(cls, text: str, salt: int) -> Salted:
        made = super().__new__(cls, text)
        made._salt = salt
        return made

    def __hash__(self) -> int:
        return hash((str.__hash__(self), self._salt))

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) if isinstance(other, str) else NotImplemented


# ---- one address, and results that are kept ------------------------------------------------------


def call_at_one_address(call: Callable[[Any], Any], inputs: Sequence[Any]) -> list[Any]:
    """The results for tensors or arrays of one form, which are passed one after another at the same
    address. A result that is kept must not change with the next call: it is copied at the end."""
    place, results = deepcopy(inputs[0]), []
    for one in inputs:
        place[...] = one
        results.append(call(place))
    return [deepcopy(result) for result in results]


def require_kept(call: Callable[[Any], Any], first: Any, second: Any, what: str) -> None:
    """The result for `first` is the same after a call with `second`, of the same form."""
    kept = call(first)
    before = deepcopy(kept)
    call(second)
    assert _equals(kept, before), f"{what}: a result changes with the next call; return memory of its own"


def _equals(one: Any, other: Any) -> bool:
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


@contextmanager
def taking_turns() -> Iterator[None]:
    """Inside a with block, threads take turns after a microsecond, also within a call."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# ---- memory --------------------------------------------------------------------------------------


def require_bounded(
    plugin: object, work: Callable[[int], object], steps: int, what: str, slack: int | None = None, factor: float = 1.1
) -> None:
    """What a plugin holds does not grow with the steps: `work(number)` does one. It may fill a
    cache of bounded size in the first half."""
    sizes, before = [], count_elements(plugin, maximum=400_000)
    for part in range(2):
        for number in range(part * steps // 2, (part + 1) * steps // 2):
            work(number)
        sizes.append(count_elements(plugin, maximum=400_000))
    allowed = sizes[0] + (factor - 1) * max(0, sizes[0] - before) + (steps // 8 if slack is None else slack)
    assert sizes[1] <= allowed, f"{what}: it holds {sizes[0]} elements after {steps // 2} of them, and {sizes[1]} after {steps}"


# ---- time ----------------------------------------------------------------------------------------


def measure_fastest(call: Callable[[], object], calls: int = CALLS) -> float:
    """Seconds of the fastest call."""
    best = float("inf")
    for _ in range(calls):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def _find_round(measure: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """(value, limit) of the first round that keeps its limit, or of the last one."""
    for number in range(ROUNDS):
        if number:
            time.sleep(_REST)
        value, limit = measure()
        if value < limit:
            break
    return value, limit


def require_fast(call: Callable[[], object], seconds: float, what: str, calls: int = CALLS) -> None:
    """The fastest of some calls takes less."""
    best, _ = _find_round(lambda: (measure_fastest(call, calls), seconds))
    assert best < seconds, f"{what} takes {best * 1e3:.2f} ms, and at most {seconds * 1e3:.2f} ms are allowed"


def require_near_reference(call: Callable[[], object], reference: Callable[[], object], what: str, times: float, extra: float) -> None:
    """The fastest call takes at most `times` the seconds of the reference's and `extra` seconds
    more."""
    best, allowed = _find_round(lambda: (measure_fastest(call), times * measure_fastest(reference) + extra))
    assert best < allowed, f"{what} takes {best * 1e3:.2f} ms; the reference allows {allowed * 1e3:.2f} ms on this machine"


def require_no_waiting(call: Callable[[], object], what: str, seconds: float = 1e-3) -> None:
    """A call does not sleep, or wait for a timer. What a busy machine does to it does not count:
    the system takes the processor from a call that computes, and a call that waits gives it up."""

    def measure() -> float:
        waited = []
        for _ in range(CALLS):
            pauses, began, computed = count_pauses(), time.perf_counter(), time.process_time()
            call()
            taken = time.perf_counter() - began - (time.process_time() - computed)
            waited.append(taken if count_pauses() > pauses else 0.0)
        return min(waited)

    best, _ = _find_round(lambda: (measure(), seconds))
    assert best < seconds, f"{what} waits for {best * 1e3:.2f} ms in which it computes nothing"


def count_pauses() -> int:
    """How often this thread gave up the processor."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def require_growth(
    make: Callable[[int], Callable[[], object]], small: int, large: int, what: str, factor: float, minimum: float = 2e-3
) -> None:
    """CPU time grows by at most `factor` from one size to another. `make(size)` prepares a call,
    whose time counts; below `minimum` seconds, any growth is allowed."""

    def measure(size: int) -> float:
        times = []
        for _ in range(3):
            call = make(size)
            gc.collect()
            gc.disable()  # whose time grows with what the whole process holds
            try:
                began = time.process_time()
                call()
                times.append(time.process_time() - began)
            finally:
                gc.enable()
        return min(times)

    few = 0.0
    for _ in range(ROUNDS):
        many = measure(large)
        if many <= max(minimum, factor * few):
            return
        few = max(few, measure(small))  # CPU time, too, grows where others use the caches
        if many <= factor * few:
            return
    raise AssertionError(f"{what}: a size of {large} takes {many:.3f} s, and one of {small} {few:.3f} s")


# ---- what is left --------------------------------------------------------------------------------


@contextmanager
def leaves_nothing(what: str, threads: bool = True) -> Iterator[None]:
    """Raises AssertionError if the body leaves a thread (with `threads`), an open file, a process,
    or a file in the working folder or the folder of temporary files."""
    with tempfile.TemporaryDirectory(prefix="frame-left-") as folder:
        before, kept = Path.cwd(), tempfile.tempdir
        work, temporary = Path(folder) / "work", Path(folder) / "tmp"
        work.mkdir()
        temporary.mkdir()
        running, files, children = set(threading.enumerate()), _list_files(), _list_children()
        tempfile.tempdir = str(temporary)
        os.chdir(work)
        try:
            yield
        finally:
            tempfile.tempdir = kept
            os.chdir(before)
        _wait_for(lambda: not (threads and set(threading.enumerate()) - running) and not _list_children() - children)
        left = [f"the thread {thread.name}" for thread in set(threading.enumerate()) - running if threads]
        left += [f"the process {child}" for child in _list_children() - children]
        left += [f"the open file {name}" for name in _list_files() - files]
        left += [f"the file {path.name}" for place in (work, temporary) for path in place.iterdir()]
    assert not left, f"{what} leaves {', '.join(sorted(left)[:3])}"


def require_unmapped(folder: Path, what: str) -> None:
    """No file of a folder is mapped into memory; tensors of its files are gone."""
    gc.collect()
    maps = Path("/proc/self/maps")
    mapped = [line for line in maps.read_text(encoding="utf-8").splitlines() if f"{folder}/" in line] if maps.is_file() else []
    assert not mapped, f"{what} leaves {mapped[0].rpartition('/')[2]} mapped into memory"


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _MAX_END_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _list_files() -> set[str]:
    """Regular files that this process has open, by descriptor and name."""
    files = set()
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").is_dir() else ():
        try:
            target = entry.readlink()
        except OSError:  # closed meanwhile: that of the listing itself
            continue
        if target.is_absolute() and target.is_file():
            files.add(f"{target} ({entry.name})")
    return files


def _list_children() -> set[int]:
    """Processes that this one started and that run."""
    own, children = str(os.getpid()), set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has ended
            continue
        if parent == own and state != "Z":
            children.add(int(entry.name))
    return children

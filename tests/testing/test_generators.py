"""The room of generators finds what it is for, and takes what is right."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.testing.generators import (
    call_at_one_address,
    leaves_nothing,
    make_alike,
    require_bounded,
    require_fast,
    require_growth,
    require_kept,
    require_near_reference,
)


def test_names_are_equal_up_to_a_length() -> None:
    for length, (one, other) in zip((8, 64), make_alike((8, 64)), strict=True):
        assert one[:length] == other[:length]
        assert one != other


def test_inputs_share_an_address_and_results_are_copied_late() -> None:
    inputs, buffer, seen = [torch.ones(3), torch.full((3,), 2.0)], torch.zeros(3), set()

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.data_ptr())
        return x * 2

    assert [float(result[0]) for result in call_at_one_address(double, inputs)] == [2.0, 4.0]
    assert len(seen) == 1
    assert [float(result[0]) for result in call_at_one_address(buffer.copy_, inputs)] == [2.0, 2.0]


def test_a_buffer_that_is_used_again_is_found() -> None:
    buffer = torch.zeros(3)
    require_kept(lambda x: x + 1, torch.ones(3), torch.zeros(3), "a sum")
    with pytest.raises(AssertionError, match="a sum: a result changes with the next call"):
        require_kept(buffer.copy_, torch.ones(3), torch.zeros(3), "a sum")


class Keeper:
    """Keeps numbers, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.kept: list[int] = []
        self.limit = limit

    def work(self, number: int) -> None:
        self.kept.append(number)
        del self.kept[: -self.limit]


def test_memory_that_grows_is_found() -> None:
    bounded, unbounded = Keeper(50), Keeper(10**9)
    require_bounded(bounded, bounded.work, 1000, "numbers")
    with pytest.raises(AssertionError, match=r"numbers: it holds \d+ elements after 500 of them, and \d+ after 1000"):
        require_bounded(unbounded, unbounded.work, 1000, "numbers")


def test_waiting_is_found_and_work_is_compared() -> None:
    require_fast(lambda: None, 1e-3, "nothing")
    with pytest.raises(AssertionError, match="a nap takes"):
        require_fast(lambda: time.sleep(0.003), 2e-3, "a nap")
    require_near_reference(lambda: sum(range(1000)), lambda: sum(range(1000)), "a sum", times=5, extra=1e-3)
    with pytest.raises(AssertionError, match="the reference allows"):
        require_near_reference(lambda: time.sleep(0.005), lambda: None, "a nap", times=5, extra=1e-3)


def test_one_slow_round_is_no_fault() -> None:
    """As on a machine that is busy for a while: every call of the first round is slow."""

    def make_busy(calls: int) -> Callable[[], None]:
        naps = iter([0.004] * calls)
        return lambda: time.sleep(next(naps, 0.0))

    require_fast(make_busy(15), 2e-3, "a call")
    require_near_reference(make_busy(15), lambda: None, "a call", times=5, extra=1e-3)


def test_one_slow_measurement_is_no_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([9.0] * 3 + [1.0] * 3 + [2.0] * 3)  # of the large size, the small one, and the large one again
    clock, now = [0.0], iter(range(10**9))

    def read() -> float:
        clock[0] += next(took) if next(now) % 2 else 0.0
        return clock[0]

    monkeypatch.setattr("frame.testing.generators.time.process_time", read)
    require_growth(lambda size: lambda: None, 10, 20, "nothing", factor=4.0)


def test_growth_with_the_square_is_found() -> None:
    def make(power: int) -> Callable[[int], Callable[[], object]]:
        return lambda size: lambda: sum(range(size**power * (1000 if power == 1 else 1)))

    # 8 and 64 times the time, which a busy machine moves by a half
    require_growth(make(1), 250, 2000, "a sum", factor=20.0)
    with pytest.raises(AssertionError, match="a square: a size of 2000 takes"):
        require_growth(make(2), 250, 2000, "a square", factor=20.0)


def leave_thread(end: threading.Event) -> None:
    threading.Thread(target=end.wait, daemon=True, name="left").start()


@pytest.mark.parametrize(
    ("leave", "sentence"),
    [
        (leave_thread, "the thread left"),
        (lambda end: Path("made").write_text("x"), "the file made"),
        (lambda end: tempfile.mkstemp(suffix="-kept"), "kept"),
        (lambda end: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(9)"]), "the process"),
    ],
    ids=["thread", "file", "temporary", "process"],
)
def test_what_is_left_is_found(leave: Callable[[Any], Any], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frame.testing.generators._MAX_END_SECONDS", 0.05)
    end, left = threading.Event(), []
    with leaves_nothing("nothing"):
        pass
    try:
        with pytest.raises(AssertionError, match=sentence), leaves_nothing("it"):
            left.append(leave(end))
    finally:
        end.set()
        if isinstance(left[0], subprocess.Popen):
            left[0].kill()
            left[0].wait()

"""When a signal ends a start: at once, where the start can stop, or not at all."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from frame.entrypoints.processes.start_signals import StartSignals


@pytest.fixture
def signals() -> Iterator[StartSignals]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield StartSignals()
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


class Struck:
    """Gets the signal in `__del__`, which loses exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_ends_the_process_with_0_at_once(signals: StartSignals) -> None:
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_is_lost_ends_the_start_later(signals: StartSignals) -> None:
    Struck()
    with pytest.raises(SystemExit):
        signals.hold()


def test_a_held_signal_waits_for_a_check(signals: StartSignals) -> None:
    signals.hold()
    signals.check()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit):
        signals.check()


def test_a_held_signal_ends_a_released_block(signals: StartSignals) -> None:
    signals.hold()
    with signals.released():
        pass
    with pytest.raises(SystemExit), signals.released():
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)  # held again
    with pytest.raises(SystemExit), signals.released():
        pytest.fail("the block was entered")


def test_a_signal_that_was_taken_ends_nothing(signals: StartSignals) -> None:
    signals.hold()
    assert not signals.take()
    signal.raise_signal(signal.SIGINT)
    assert signals.take()
    signals.check()
    with signals.released():
        pass

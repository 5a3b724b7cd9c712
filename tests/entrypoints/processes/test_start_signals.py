"""When a signal ends a start: at once, where the start can stop, or not at all."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from click.testing import CliRunner

from frame.entrypoints.cli.router import command
from frame.entrypoints.processes import start_signals
from frame.entrypoints.processes.start_signals import StartSignals
from frame.entrypoints.router import discovery


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def signals(handlers: None, monkeypatch: pytest.MonkeyPatch) -> StartSignals:
    monkeypatch.setattr(start_signals, "is_on_terminal", lambda: False)
    return StartSignals()


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


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_gets_the_signals_until_it_ends(signals: StartSignals, run: Callable[[Any], None]) -> None:
    seen: list[str] = []

    async def main() -> None:
        ended, hung_up = asyncio.Event(), asyncio.Event()
        signals.forward(ended.set, hung_up.set)
        for number, event in ((signal.SIGTERM, ended), (signal.SIGINT, ended), (signal.SIGHUP, hung_up)):
            event.clear()
            sender = threading.Timer(0.01, os.kill, (os.getpid(), number))  # the loop waits by then
            sender.start()
            await asyncio.wait_for(event.wait(), 5)
            seen.append(number.name)

    signals.hold()
    run(main())
    assert seen == ["SIGTERM", "SIGINT", "SIGHUP"]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.raise_signal(number)  # ends nothing


def test_a_loop_gets_the_signal_that_has_come(signals: StartSignals) -> None:
    seen: list[bool] = []

    async def main() -> None:
        signals.forward(lambda: seen.append(True))

    signals.hold()
    signal.raise_signal(signal.SIGTERM)
    asyncio.run(main())
    assert seen == [True]


def test_a_router_that_starts_ends_with_0(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: str) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(discovery, "check_url", strike)
    assert CliRunner().invoke(command, ["--replica", "http://127.0.0.1:1"], catch_exceptions=False).exit_code == 0

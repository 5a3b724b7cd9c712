"""Processes that call grammars: starts, loads and replacements."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from frame.structured_output import call_processes
from frame.structured_output.grammar_compiler import GrammarUnavailableError
from tests.core.scheduling.scripted_grammar import Free, Script
from tests.structured_output.local_process import make_pool

VOCAB = 70
GRAMMARS: dict[str, Any] = {"free": Free, "script": lambda: Script([3, 1, 2], VOCAB)}


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_errors_of_loading_are_those_of_the_backend() -> None:
    pool, processes = make_pool(GRAMMARS, VOCAB, 2)
    backend = pool.start_backend()
    with pytest.raises(ValueError, match="regex is not known"):
        backend.load("regex", "unknown", b"")
    with pytest.raises(RuntimeError, match="odd"):
        backend.load("regex", "odd", b"")
    assert all(process.is_alive for process in processes)
    pool.close()


@pytest.mark.parametrize("dies", [False, True])
def test_a_grammar_that_loads_slowly_is_loaded_everywhere_before_it_begins(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    monkeypatch.setattr(call_processes, "QUICK_LOAD", -1.0)
    pool, processes = make_pool(GRAMMARS, VOCAB, 3)
    compiled = [pool.start_backend().load("regex", "free", b"")]
    if dies:
        cast("Any", pool.members[1].process).is_alive = False
        pool.replace(pool.members[1])
        deadline = time.monotonic() + 10
        while len(pool.members) < 3:
            assert time.monotonic() < deadline
            pool.choose(cast("Any", compiled[0]))
    assert [process.num_loads for process in processes] == [1] * (3 + dies)
    assert all(not member.pending for member in pool.members)
    compiled.clear()
    gc.collect()
    assert all(len(member.dropped) == 1 for member in pool.members)
    pool.close()


def test_a_load_waits_for_a_replacement_where_all_have_ended() -> None:
    """They end while the server is idle: nothing else notices it."""
    pool, processes = make_pool(GRAMMARS, VOCAB, 2)
    backend = pool.start_backend()
    for process in processes:
        process.is_alive = False
    assert backend.load("regex", "free", b"").num_bytes == 1000
    wait_until(lambda: len(processes) >= 3)  # the other one is replaced when it is used
    pool.close()


def test_a_grammar_that_ends_the_processes_which_load_it_is_refused() -> None:
    pool, processes = make_pool(GRAMMARS, VOCAB, 6)
    backend = pool.start_backend()
    for process in processes:
        process.dies_at_load = "script"
    with pytest.raises(GrammarUnavailableError, match="have ended"):
        backend.load("regex", "script", b"")
    assert [process.is_alive for process in processes[:6]].count(False) == call_processes.MAX_LOADS
    wait_until(lambda: len(pool._ready) == call_processes.MAX_LOADS)
    pool.close()


def test_some_processes_start_later_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_processes, "RETRY_SECONDS", 0.05)
    pool, processes = make_pool(GRAMMARS, VOCAB, 3)
    start, failures = pool._start_process, [RuntimeError("no memory")] * 4

    def fail_first() -> Any:
        if failures:
            raise failures.pop()
        return start()

    pool._start_process = fail_first
    with pytest.raises(RuntimeError, match="no memory"):
        pool.start_backend()
    assert not processes
    backend = pool.start_backend()  # one fails
    compiled = cast("Any", backend.load("regex", "free", b""))
    wait_until(lambda: len(processes) == 3)
    wait_until(lambda: pool.choose(compiled) is not None and len(pool.members) == 3)
    pool.close()
    assert not any(process.is_alive for process in processes)

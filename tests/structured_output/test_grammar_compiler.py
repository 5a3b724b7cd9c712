"""Grammars are compiled once for all requests, cached within a limit, and refused with one
sentence."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarBackend
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Generate
from frame.structured_output import grammar_compiler
from frame.structured_output.grammar_compiler import REREAD, TRIM_BYTES, CompileTimeoutError, GrammarCache, GrammarCompiler, GrammarSettings
from tests.core.scheduling.scripted_grammar import Free


class Compiled:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes

    def start(self) -> Grammar:
        return Free()


class Counting(GrammarBackend):
    """Counts; a grammar is as large as its source's length in kilobytes."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        self.sources.append(source)
        assert self.gate.wait(20)
        if source.startswith("bad"):
            raise ValueError("it is bad")
        if source == "fault":
            raise RuntimeError("the disk is full")
        return Compiled(len(source) << 10)


def ask(rid: str, **grammar: Any) -> Generate:
    return Generate(rid=rid, token_ids=[1], params=SamplingParams(**grammar))


def ask_as(tenant: str, rid: str, source: str) -> Generate:
    return Generate(rid=rid, token_ids=[1], params=SamplingParams(regex=source), namespace=f"{tenant}:salt" if tenant else "")


def collect(compiler: GrammarCompiler, count: int) -> dict[str, Grammar | Finish]:
    outcomes: dict[str, Grammar | Finish] = {}
    ready = threading.Event()
    for _ in range(2000):
        outcomes |= {message.rid: outcome for message, outcome, _ in compiler.take_ready()}
        if len(outcomes) >= count:
            return outcomes
        ready.wait(0.005)
    raise AssertionError(f"only {sorted(outcomes)} became ready")


def test_a_grammar_is_compiled_once_for_all_requests() -> None:
    backend = Counting()
    backend.gate.clear()
    compiler = GrammarCompiler(lambda: backend)
    assert not compiler.hold_request(ask("plain"))
    for i in range(5):
        assert compiler.hold_request(ask(str(i), regex="x"))
    assert compiler.take_ready() == [] and len(compiler) == 5
    backend.gate.set()
    outcomes = collect(compiler, 5)
    assert len({id(grammar) for grammar in outcomes.values()}) == 5  # each its own state
    assert compiler.hold_request(ask("again", regex="x"))
    assert [message.rid for message, *_ in compiler.take_ready()] == ["again"]  # at once
    assert backend.sources == ["x"] and len(compiler) == 0
    compiler.close()


def test_invalid_grammars_are_cached_and_other_errors_are_retried() -> None:
    backend = Counting()
    compiler = GrammarCompiler(lambda: backend)
    for source in ("bad", "bad", "fault", "fault"):
        compiler.hold_request(ask("r", regex=source))
        finish = collect(compiler, 1)["r"]
        assert isinstance(finish, Finish) and finish.reason == "error"
        assert finish.error in ("invalid grammar: it is bad", "the grammar backend failed: RuntimeError: the disk is full")
    assert backend.sources == ["bad", "fault", "fault"]
    kept = compiler._cache.get(("", "regex", "bad"))
    assert isinstance(kept, ValueError) and kept.__traceback__ is None and kept.__cause__ is None  # whose frames would be kept with it
    compiler.close()


def test_an_unsupported_kind_is_refused() -> None:
    backend = Counting()
    compiler = GrammarCompiler(lambda: backend, GrammarSettings(kinds=("regex", "choice")))
    compiler.hold_request(ask("r", structural_tag="{}"))
    finish = collect(compiler, 1)["r"]
    assert isinstance(finish, Finish) and finish.error is not None
    assert finish.error.startswith("invalid grammar: ") and "no structural_tag; use one of regex, choice" in finish.error
    assert backend.sources == []
    compiler.close()


def test_waiting_behind_slow_grammars_ends_with_queue_full() -> None:
    class Slow:
        cpu_seconds = 0.0

        def compile(self, kind: str, source: str) -> bytes:
            assert backend.gate.wait(20)
            if source == "bomb":
                raise CompileTimeoutError("it takes too long")
            return b""

        def close(self) -> None:
            pass

    backend = Counting()
    compiler = GrammarCompiler(lambda: backend, GrammarSettings(queue_timeout=0.0), Slow)
    for source in "abc":  # a queue alone is no reason
        compiler.hold_request(ask(source, regex=source))
    assert not any(isinstance(outcome, Finish) for outcome in collect(compiler, 3).values())
    backend.gate.clear()
    for source in ("bomb", "x"):
        compiler.hold_request(ask(source, regex=source))
    backend.gate.set()
    outcomes = collect(compiler, 2)
    errors = [finish.error for finish in (outcomes["bomb"], outcomes["x"]) if isinstance(finish, Finish)]
    assert errors == ["invalid grammar: it takes too long", "queue full: other grammars keep the compilers busy; try again later"]
    compiler.close()


def test_aborted_requests_cancel_their_compilation() -> None:
    backend = Counting()
    backend.gate.clear()
    compiler = GrammarCompiler(lambda: backend)
    for rid, source in (("a", "first"), ("b", "second"), ("c", "second"), ("d", "third")):
        compiler.hold_request(ask(rid, regex=source))
    gone = compiler.abort_requests(["b", "d", "unknown"], "abort")
    assert gone is not None and gone.rids == ["b", "d"]
    backend.gate.set()
    assert set(collect(compiler, 2)) == {"a", "c"}
    assert "third" not in backend.sources
    assert compiler.abort_all("abort") is None
    compiler.close()


def test_deadlines_run_while_a_grammar_compiles() -> None:
    backend, now = Counting(), [100.0]
    backend.gate.clear()
    compiler = GrammarCompiler(lambda: backend, GrammarSettings(request_timeout=50.0), clock=lambda: now[0])
    message = ask("mine", regex="x")
    compiler.hold_request(ask("default", regex="x"))
    compiler.hold_request(msgspec.structs.replace(message, deadline=2.0))
    compiler.hold_request(msgspec.structs.replace(message, rid="patient", deadline=1000.0))
    now[0] = 101.9
    assert compiler.take_ready() == []
    for late, rid, deadline in ((102.1, "mine", "2 s"), (150.1, "default", "50 s")):
        now[0] = late
        ((ended, finish, _),) = compiler.take_ready()
        assert ended.rid == rid and isinstance(finish, Finish)
        assert finish.error == f"deadline exceeded: the request took longer than its {deadline}; allow it more time"
    backend.gate.set()
    while not (ready := compiler.take_ready()):
        threading.Event().wait(0.005)
    assert [(each.rid, arrival) for each, _, arrival in ready] == [("patient", 100.0)]
    compiler.close()


def test_the_cache_holds_the_most_recently_used() -> None:
    cache = GrammarCache(10_000)
    for source in "abc":
        cache.put(("", "regex", source), Compiled(2000))
    assert cache.get(("", "regex", "a")) is not None
    cache.put(("", "regex", "d"), ValueError("small"))
    assert cache.get(("", "regex", "b")) is None and cache.get(("", "regex", "a")) is not None
    cache.put(("", "regex", "huge"), Compiled(1 << 30))
    assert cache.get(("", "regex", "huge")) is None and cache.get(("", "regex", "d")) is not None


def test_grammars_that_grow_leave_the_cache() -> None:
    cache, grown = GrammarCache(1 << 20), Compiled(2000)
    cache.put(("", "regex", "grown"), grown)
    grown.num_bytes = (1 << 20) // 8
    assert cache.get(("", "regex", "grown")) is None  # it is compiled again
    many = [Compiled(2000) for _ in range(40)]
    for number, each in enumerate(many):
        cache.put(("", "regex", str(number)), each)
        each.num_bytes = 50_000
    cache.reread_sizes()
    held = sum(cache.get(("", "regex", str(number))) is not None for number in range(40))
    assert 0 < held <= (1 << 20) // 50_000
    assert cache.num_evicted >= (40 - held) * 50_000
    many[-1].num_bytes = 1 << 30  # one that has outgrown the cache does not empty it
    cache.reread_sizes()
    assert cache.get(("", "regex", "38")) is not None and cache.get(("", "regex", "39")) is None


def test_the_compiler_evicts_grammars_that_grow_and_returns_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request with a grammar comes any more."""
    returned = threading.Event()
    monkeypatch.setattr(grammar_compiler, "return_freed_memory", returned.set)
    now, backend = [0.0], Counting()
    compiler = GrammarCompiler(lambda: backend, clock=lambda: now[0])
    compiler.take_ready()
    grown = Compiled(2000)
    compiler._cache.put(("", "regex", "grown"), grown)
    grown.num_bytes = TRIM_BYTES + 1
    now[0] += REREAD
    compiler.take_ready()
    assert len(compiler._cache._entries) == 0
    assert not returned.is_set()  # requests may still use it
    now[0] += REREAD
    compiler.take_ready()
    assert returned.wait(20)
    compiler.close()


def test_processes_compile_and_the_backend_loads() -> None:
    class Process:
        closed = 0
        cpu_seconds = 0.0

        def start(self) -> None: ...

        def compile(self, kind: str, source: str) -> bytes:
            return source.upper().encode()

        def close(self) -> None:
            Process.closed += 1

    class Loading(Counting):
        def load(self, kind: str, source: str, data: bytes) -> CompiledGrammar:
            self.sources.append(data.decode())
            return Compiled(1)

    backend = Loading()
    start: Callable[[], Process] = Process
    compiler = GrammarCompiler(lambda: backend, start_process=start)
    compiler.hold_request(ask("r", regex="x"))
    collect(compiler, 1)
    assert backend.sources == ["X"]
    compiler.close()
    assert Process.closed == 1


class Gated(Counting):
    """Grammars of the tenant that floods wait for the gate, others do not."""

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        if source.startswith("flood"):
            assert self.gate.wait(20)
        self.sources.append(source)
        return Compiled(1)


def test_many_grammars_of_a_tenant_leave_a_place_for_another() -> None:
    backend = Gated()
    compiler = GrammarCompiler(lambda: backend, GrammarSettings(workers=2))
    for tenant in "ab":
        compiler.hold_request(ask_as(tenant, tenant, f"first of {tenant}"))
    collect(compiler, 2)
    backend.gate.clear()
    for number in range(96):
        compiler.hold_request(ask_as("a", f"a{number}", f"flood {number}"))
    for number in range(3):
        compiler.hold_request(ask_as("b", f"b{number}", f"small {number}"))
        assert set(collect(compiler, 1)) == {f"b{number}"}
    gone = compiler.abort_requests([f"a{number}" for number in range(1, 90)], "abort")
    assert gone is not None and len(gone.rids) == 89
    backend.gate.set()
    assert set(collect(compiler, 7)) == {"a0", *(f"a{number}" for number in range(90, 96))}
    assert len([source for source in backend.sources if source.startswith("flood")]) == 7
    compiler.close()


def test_tenants_take_turns_at_one_compiler() -> None:
    backend = Counting()
    backend.gate.clear()
    compiler = GrammarCompiler(lambda: backend)
    for tenant, count in (("a", 5), ("b", 2), ("c", 1)):
        for number in range(count):
            compiler.hold_request(ask_as(tenant, f"{tenant}{number}", f"{tenant}{number}"))
    backend.gate.set()
    collect(compiler, 8)
    places = [backend.sources.index(source) for source in ("b0", "c0", "b1")]
    assert places[0] <= 3 and places[1] <= 3 and places[2] <= 5, backend.sources
    compiler.close()


def test_tenants_share_no_grammar() -> None:
    """The time of a request would reveal another tenant's grammars."""
    backend = Counting()
    compiler = GrammarCompiler(lambda: backend)
    for tenant in ("a", "b", "", "a", ""):
        compiler.hold_request(ask_as(tenant, "r", "x"))
        collect(compiler, 1)
    assert backend.sources == ["x", "x", "x"]
    compiler.close()


def test_the_tenant_with_the_largest_share_of_the_cache_loses_grammars() -> None:
    cache = GrammarCache(100_000)
    cache.put(("modest", "regex", "x"), Compiled(2000))
    for number in range(200):
        cache.put(("greedy", "regex", str(number)), Compiled(2000))
    assert cache.get(("modest", "regex", "x")) is not None
    assert cache.get(("greedy", "regex", "199")) is not None and cache.get(("greedy", "regex", "100")) is None
    assert cache._sizes.total() == sum(size for entries in cache._entries.values() for _, size in entries.values()) <= 100_000


def test_the_backend_and_the_processes_are_prepared() -> None:
    backend, started = Counting(), threading.Barrier(3, timeout=20)
    processes: list[object] = []

    class Process:
        cpu_seconds = 0.0

        def __init__(self) -> None:
            processes.append(self)

        def start(self) -> None: ...

        def compile(self, kind: str, source: str) -> bytes:
            if source == grammar_compiler.PREPARED[2]:
                started.wait()  # for the process of the other thread
            return b""

        def close(self) -> None: ...

    compiler = GrammarCompiler(lambda: backend, GrammarSettings(workers=2), Process)
    compiler.prepare()
    started.wait()
    compiler.hold_request(ask("1", regex="b"))
    assert isinstance(collect(compiler, 1)["1"], grammar_compiler.MeteredGrammar) and "b" in backend.sources
    assert len(processes) == 2
    compiler.close()


def test_a_process_that_starts_holds_no_grammar() -> None:
    """The start takes seconds, and a thread whose process runs compiles at once."""
    is_starting, may_start, processes = threading.Event(), threading.Event(), []

    class Process:
        cpu_seconds = 0.0

        def __init__(self) -> None:
            processes.append(self)

        def start(self) -> None:
            if processes.index(self) == 1:
                is_starting.set()
                assert may_start.wait(20)

        def compile(self, kind: str, source: str) -> bytes:
            assert source != "r0" or is_starting.wait(20)  # so that there is work for another thread
            return source.encode()

        def close(self) -> None: ...

    compiler = GrammarCompiler(Counting, GrammarSettings(workers=2), Process)
    compiler.hold_request(ask("first", regex="a"))
    collect(compiler, 1)
    names = [f"r{number}" for number in range(4)]
    for name in names:
        compiler.hold_request(ask(name, regex=name))
    assert set(collect(compiler, 4)) == set(names) and is_starting.is_set()
    may_start.set()
    compiler.close()

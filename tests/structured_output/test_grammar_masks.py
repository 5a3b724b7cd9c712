"""Grammar calls in steps: masks do not depend on threads, and a slow call holds its own request
only."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from array import array
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest

from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarBackend
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Generate
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.structured_output.grammar_calls import BROKEN_GRAMMAR, GrammarMeter, MeteredGrammar, accept_token
from frame.structured_output.grammar_compiler import GrammarCompiler, GrammarSettings
from frame.structured_output.grammar_masks import GrammarCalls
from frame.structured_output.grammar_threads import MAX_ABANDONED
from frame.testing.scheduler_rig import SchedulerRig
from tests.core.scheduling.scripted_grammar import Free, Script
from tests.core.scheduling.small_rig import GREEDY, VOCAB, rig

WIDTHS = [3, 2, 4, 1, 1, 1, 3, 2]  # of a scripted grammar; the forced run is jumped over where that is on


class Burning(Script):
    """Burns CPU outside of the interpreter's lock in one of its calls until the test lets it go."""

    def __init__(self, where: str, after: int, until: threading.Event) -> None:
        super().__init__(WIDTHS, VOCAB)
        self.where, self.after, self.until = where, after, until

    def burn(self, where: str) -> None:
        while where == self.where and len(self.taken) == self.after and not self.until.is_set():
            hashlib.sha256(bytes(1 << 16)).digest()

    def fill_mask(self, mask: np.ndarray) -> bool:
        self.burn("fill")
        return super().fill_mask(mask)

    def accept_token(self, token_id: int) -> bool:
        self.burn("accept")
        return super().accept_token(token_id)

    def is_finished(self) -> bool:
        self.burn("is_finished")
        return super().is_finished()


def burning(where: str, after: int, until: threading.Event) -> Callable[[], Burning]:
    """The first burns; the second is the rig's, which says what the tokens must be."""
    places = iter([where, ""])
    return lambda: Burning(next(places), after, until)


def test_tokens_are_accepted_and_replayed() -> None:
    params = SamplingParams(regex="x")
    for output, end in (([1, 2], None), ([7], BROKEN_GRAMMAR)):
        request = Request("a", np.array([1], np.int32), params, 0, 0, 0.0, 100.0, 10, grammar=Free(), output=array("i", output))
        assert GrammarCalls(VOCAB, 1).start_request(request) == end
    assert accept_token(Free(), 3, params) is None and accept_token(Free(), 7, params) == BROKEN_GRAMMAR


@pytest.mark.parametrize("jump_forward", [0, 1])
def test_a_recovered_request_replays_its_output_into_the_grammar(jump_forward: int) -> None:
    class Seen(Free):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def accept_token(self, token_id: int) -> bool:
            self.tokens.append(token_id)
            return super().accept_token(token_id)

    scheduler, grammar = rig(jump_forward=jump_forward).scheduler, Seen()
    message = Generate(rid="a", token_ids=[1, 2, 3], output_len=2, params=GREEDY)
    assert scheduler.add_request(message, grammar) is None
    assert grammar.tokens[-2:] == [2, 3]
    assert scheduler.add_request(msgspec.structs.replace(message, rid="b", token_ids=[1, 2, 7]), grammar) == BROKEN_GRAMMAR
    assert not scheduler.has_request("b")


def rows_of(grammars: Sequence[Grammar | None]) -> tuple[RequestTable, list[Request], np.ndarray]:
    table, requests = RequestTable(len(grammars) + 1, 4), []
    for i, grammar in enumerate([*grammars, None]):
        request = Request(str(i), np.array([1], np.int32), SamplingParams(), 0, i, 0.0, 100.0, 10)
        request.tokens, request.grammar = request.all_tokens(), grammar
        table.add_request(request)
        requests.append(request)
    return table, requests, np.array([request.slot for request in requests])


class Numbered(Free):
    """Allows one token, and says in which threads it was asked; `work`: what it does before."""

    def __init__(self, token: int, work: Callable[[], object]) -> None:
        self.token, self.work = token, work
        self.threads: list[int] = []

    def fill_mask(self, mask: np.ndarray) -> bool:
        self.threads.append(threading.get_ident())
        self.work()
        mask[:] = 0
        mask[self.token // 32] = 1 << (self.token % 32)
        return True


def busy() -> None:
    """Native work outside of the interpreter's lock: less than `HEAVY_SECONDS`."""
    hashlib.sha256(bytes(1 << 18)).digest()


def test_masks_do_not_depend_on_the_number_of_threads() -> None:
    grammars = [Numbered(i, busy) for i in range(12)]
    table, _, slots = rows_of([*grammars])
    for threads in (1, 3):
        calls = GrammarCalls(40, threads)
        for _ in range(4):
            mask = calls.fill_masks(table, slots)
            assert calls.take_stopped() == []
            assert mask is not None and (mask[:12, 0] == 1 << np.arange(12)).all() and (mask[12] == -1).all()
        calls.close()
    assert 1 < len({each for grammar in grammars for each in grammar.threads}) <= 4
    assert threading.get_ident() not in grammars[0].threads  # the engine's own makes no call that it could not leave


def burn(seconds: float) -> None:
    """Take so many CPU seconds."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.sha256(bytes(1 << 12)).digest()


def test_requests_whose_calls_are_slow_on_average_are_held() -> None:
    """One slow mask among quick ones does not preempt its request."""
    numbers = itertools.count()
    sometimes, always = Numbered(0, lambda: burn(0.004) if next(numbers) % 10 == 9 else None), Numbered(1, lambda: burn(0.004))
    table, requests, slots = rows_of([sometimes, always])
    calls = GrammarCalls(40, 1)
    for _ in range(20):
        calls.fill_masks(table, slots)
        stopped = calls.take_stopped()
        if stopped:
            break
    assert stopped == [requests[1]] and len(always.threads) >= 2
    for _ in range(20):
        calls.fill_masks(table, slots[:1])
        assert calls.take_stopped() == []
    calls.close()


@pytest.mark.parametrize("num_plain", [0, 20])
def test_many_heavy_grammars_are_held_beside_more_other_requests(num_plain: int) -> None:
    """Beside one other request, holding all of them would gain little."""
    grammars = [Numbered(i, lambda: burn(0.0016)) for i in range(6)]
    table, requests, slots = rows_of([*grammars, *[None] * num_plain])
    calls, stopped = GrammarCalls(40, 1), []
    for _ in range(6):
        calls.fill_masks(table, slots)
        stopped += calls.take_stopped()
    assert set(stopped) == (set(requests[:6]) if num_plain == 20 else set())
    calls.close()


@pytest.mark.parametrize("error", [ValueError("it is too complex"), KeyError("lost")])
def test_a_grammar_that_raises_ends_its_request_alone(error: Exception) -> None:
    def fail() -> None:
        raise error

    expected = Finish("error", error="the grammar backend failed: KeyError: 'lost'")
    if isinstance(error, ValueError):
        expected = Finish("error", error=f"invalid grammar: {error}", code="invalid_grammar")
    table, requests, slots = rows_of([Numbered(0, fail), Numbered(1, int)])
    calls = GrammarCalls(40, 2)
    mask = calls.fill_masks(table, slots)
    assert mask is not None and mask[:, 0].tolist() == [-1, 2, -1]
    assert calls.accept_tokens([(requests[0], [3]), (requests[1], [1])], 3) == [expected, None]
    calls.close()


def test_a_backend_that_cannot_start_a_grammar() -> None:
    class Unstartable:
        num_bytes = 1

        def start(self) -> Grammar:
            raise RuntimeError("no room")

    class Backend(GrammarBackend):
        def compile(self, kind: str, source: str) -> CompiledGrammar:
            return Unstartable()

    compiler = GrammarCompiler(lambda: Backend(None, 40))
    compiler.hold_request(Generate(rid="r", token_ids=[1], params=SamplingParams(regex="x")))
    while not (ready := compiler.take_ready()):
        time.sleep(0.001)
    assert ready[0][1].error == "the grammar backend failed: RuntimeError: no room"  # type: ignore[union-attr]
    compiler.close()


def step_until(harness: SchedulerRig, condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, harness.scheduler.get_load()
        if not harness.step():
            time.sleep(0.001)  # everything is held


@pytest.mark.pairwise
@pytest.mark.parametrize("where", ["fill", "accept", "is_finished"])
@pytest.mark.parametrize("after", [1, 4, 6])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("jump_forward", [0, 2])
def test_a_slow_call_holds_its_own_request_alone(where: str, after: int, overlap: bool, jump_forward: int) -> None:
    """The others get all their tokens meanwhile, and the request gets the tokens that it would have
    had."""
    harness, until = rig(overlap=overlap, jump_forward=jump_forward), threading.Event()
    asked = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
    slow = harness.add([1, 2, 3, 4, 5], asked, grammar=burning(where, after, until))
    others = [harness.add([9, i], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)) for i in range(2)]
    quick = harness.add([8], GREEDY, grammar=lambda: Script(WIDTHS, VOCAB))
    step_until(harness, lambda: all(harness.requests[rid].finish for rid in (*others, quick)))
    assert harness.requests[slow].finish is None
    assert harness.scheduler.get_load()["waiting"] == 1 == harness.scheduler.outline_requests(9)["phases"]["grammar"]
    until.set()
    step_until(harness, lambda: harness.scheduler.is_idle)
    harness.check()


def test_a_call_that_does_not_end_is_over_its_budget_and_its_request_ends() -> None:
    harness, until = rig(), threading.Event()
    make = burning("fill", 2, until)
    over = harness.add([1, 2], GREEDY, grammar=lambda: MeteredGrammar(make(), GrammarMeter(0.05)))
    try:
        step_until(harness, lambda: harness.requests[over].finish is not None)
        finish = harness.requests[over].finish
        assert finish is not None and finish.error is not None
        assert finish.error.startswith("invalid grammar: the grammar takes more CPU time than its budget of 0.05 s")
        assert "sampling.grammar_budget" in finish.error
        assert len(harness.requests[over].got) == 2
        assert harness.scheduler.is_idle
        harness.scheduler.check_integrity()
    finally:
        until.set()


def test_held_requests_are_aborted_and_have_deadlines() -> None:
    harness, until = rig(), threading.Event()
    rids = [harness.add([1, 2], GREEDY, grammar=burning("fill", 1, until))]
    rids += [harness.add([1, 3], GREEDY, deadline=5.0, grammar=burning("fill", 1, until))]
    try:
        step_until(harness, lambda: len(harness.scheduler._grammars) == 2)
        harness.abort(rids[0])
        harness.now = 6.0
        step_until(harness, lambda: harness.scheduler.is_idle)
        reasons = [harness.requests[rid].finish for rid in rids]
        assert [reason.reason for reason in reasons if reason] == ["abort", "error"]
        assert len(harness.scheduler._grammars) == 0
    finally:
        until.set()


def test_abandoned_threads_are_replaced_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all of them busy for good, further grammars are told so, and requests without one are
    served."""
    monkeypatch.setattr("frame.structured_output.grammar_masks.THREAD_TIMEOUT", 0.2)
    until, before = threading.Event(), threading.active_count()
    harness = rig(max_running=MAX_ABANDONED + 8)
    asked = [harness.add([1, i], GREEDY, grammar=burning("fill", 1, until)) for i in range(2 * MAX_ABANDONED + 6)]
    try:
        requests = [harness.requests[rid] for rid in asked]
        step_until(harness, lambda: len(harness.scheduler._grammars) + sum(bool(each.finish) for each in requests) == len(asked))
        plain = harness.add([5], GREEDY)
        step_until(harness, lambda: harness.requests[plain].finish is not None)
        last = harness.add([6], GREEDY, grammar=lambda: Script(WIDTHS, VOCAB))
        step_until(harness, lambda: harness.requests[last].finish is not None)
        finish = harness.requests[last].finish
        assert finish is not None and finish.error is not None and finish.error.startswith("queue full: other grammars keep")
        assert threading.active_count() - before < 4 * MAX_ABANDONED
    finally:
        until.set()


def test_a_budget_counts_compilation_and_every_call() -> None:
    class Costly(Free):
        def accept_token(self, token_id: int) -> bool:
            busy()
            return True

    meter = GrammarMeter(0.5, spent=0.4)
    grammar, mask = MeteredGrammar(Costly(), meter), np.zeros(2, np.int32)
    grammar.fill_mask(mask)
    assert grammar.accept_token(1) and 0.4 < meter.spent < 0.5
    meter.spent = 0.6
    with pytest.raises(ValueError, match="budget of 0.5 s"):
        grammar.fill_mask(mask)
    meter.num_tokens = 100  # each allows a little more
    grammar.fill_mask(mask)


def test_a_compilation_over_the_budget_is_refused() -> None:
    class Process:
        cpu_seconds = 3.0

        def start(self) -> None: ...

        def compile(self, kind: str, source: str) -> bytes:
            return b""

        def close(self) -> None:
            pass

    class Compiled:
        num_bytes = 1

        def start(self) -> Grammar:
            return Free()

    class Backend(GrammarBackend):
        def compile(self, kind: str, source: str) -> CompiledGrammar:
            return Compiled()

    compiler = GrammarCompiler(lambda: Backend(None, 40), GrammarSettings(budget=2.0), Process)
    compiler.hold_request(Generate(rid="r", token_ids=[1], params=SamplingParams(regex="x")))
    while not (ready := compiler.take_ready()):
        time.sleep(0.001)
    error = ready[0][1].error  # type: ignore[union-attr]
    assert error is not None and error.startswith("invalid grammar: the grammar takes more CPU time than its budget of 2 s")
    compiler.close()

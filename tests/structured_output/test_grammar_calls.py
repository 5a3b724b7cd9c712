"""Masks filled in batches: tokens are those of single calls, and a batch at fault or without end
affects its own requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.structured_output import grammar_calls, grammar_masks
from frame.structured_output.grammar_calls import GrammarMeter, MeteredGrammar, get_grammar_state
from frame.structured_output.grammar_masks import KNOWN_MEASURED, MIN_MEASURED, GrammarCalls
from tests.core.scheduling.scripted_grammar import Script
from tests.core.scheduling.small_rig import GREEDY, VOCAB, rig

WIDTHS = [3, 2, 4, 1, 1, 1, 3, 2, 5, 4, 3, 1, 2, 3, 4, 2]
WORDS = -(-VOCAB // 32)


class Together:
    """Fills the masks of `Batched` grammars. `counts`: grammars of each batch; `work`: what it does
    before."""

    def __init__(self, work: Callable[[], object] = int) -> None:
        self.counts: list[int] = []
        self.work = work

    def fill_masks(self, handles: Sequence[Batched], rows: Sequence[int], masks: np.ndarray) -> None:
        self.counts.append(len(handles))
        self.work()
        for handle, row in reversed(list(zip(handles, rows, strict=True))):
            Script.fill_mask(handle, masks[row])


class Batched(Script):
    """`fails`: what `finish_mask` raises at output position `at`."""

    def __init__(self, batch: Together, fails: Exception | None = None, at: int = 0) -> None:
        super().__init__(WIDTHS, VOCAB)
        self.batch, self.fails, self.at = batch, fails, at
        self.num_alone = 0

    def fill_mask(self, mask: np.ndarray) -> bool:
        self.num_alone += 1
        self._fail()
        return super().fill_mask(mask)

    def start_mask(self, mask: np.ndarray) -> Any:
        return self

    def finish_mask(self, mask: np.ndarray, seconds: float) -> bool:
        self._fail()
        return True

    def _fail(self) -> None:
        if self.fails is not None and len(self.taken) == self.at:
            raise self.fails


@pytest.fixture(autouse=True)
def _measure_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "MEASURED_SHARE", 0.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("jump_forward", [0, 2])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_tokens_are_those_of_single_calls(monkeypatch: pytest.MonkeyPatch, overlap: bool, jump_forward: int, share: float) -> None:
    monkeypatch.setattr(grammar_masks, "MEASURED_SHARE", share)
    batch, harness = Together(), rig(overlap=overlap, jump_forward=jump_forward)
    for i in range(3):
        harness.add(
            [8, i],
            SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
            grammar=lambda: MeteredGrammar(Batched(batch), GrammarMeter(9.0)),
        )
    harness.add([9], GREEDY)
    harness.add([5, 6], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True), grammar=lambda: Script(WIDTHS, VOCAB))
    harness.run()
    harness.check()
    assert max(batch.counts) >= (1 if share else 2)  # chance decides which masks are filled alone


def test_requests_leave_while_their_masks_are_filled() -> None:
    """Aborted, timed out and preempted by others."""
    batch, harness = Together(lambda: time.sleep(0.002)), rig(num_pages=17)
    rids = [
        harness.add(
            [8, i],
            SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
            deadline=8.0 if i == 1 else None,
            grammar=lambda: Batched(batch),
        )
        for i in range(6)
    ]
    for step in range(6):
        harness.step()
        harness.now = 9.0 * (step == 5)
    harness.abort(rids[0])
    harness.run()
    harness.check()
    assert batch.counts and harness.scheduler.is_idle


@pytest.mark.parametrize("error", [ValueError("it is too complex"), KeyError("lost")])
@pytest.mark.parametrize("at", [1, 4])
def test_a_grammar_at_fault_ends_its_request_alone(error: Exception, at: int) -> None:
    harness, batch = rig(), Together()
    grammars = iter([Batched(batch, error, at), Script(WIDTHS, VOCAB)])  # the second is the rig's, which says what the tokens must be
    bad = harness.add([1, 2], GREEDY, grammar=lambda: next(grammars))
    good = harness.add([1, 3], GREEDY, grammar=lambda: Batched(batch))
    while harness.requests[bad].finish is None or harness.requests[good].finish is None:
        harness.step()
    finish, other = harness.requests[bad].finish, harness.requests[good].finish
    assert finish is not None and finish.error is not None and str(error) in finish.error and len(harness.requests[bad].got) == at
    assert other is not None and other.reason == "length"


def rows_of(grammars: Sequence[Batched]) -> tuple[RequestTable, list[Request], np.ndarray]:
    table = RequestTable(len(grammars), 4)
    requests = [Request(str(i), np.array([1], np.int32), SamplingParams(), 0, i, 0.0, 100.0, 10) for i in range(len(grammars))]
    for request, grammar in zip(requests, grammars, strict=True):
        request.tokens, request.grammar = request.all_tokens(), grammar
        table.add_request(request)
    return table, requests, np.array([request.slot for request in requests])


def accept_first(calls: GrammarCalls, requests: Sequence[Request]) -> None:
    """Accept a token that each grammar allows."""
    drawn = [(request, [request.grammar.allowed()[0]]) for request in requests]  # type: ignore[union-attr]
    assert calls.accept_tokens(drawn, len(requests)) == [None] * len(requests)


def masks_of(requests: Sequence[Request]) -> np.ndarray:
    expected = np.empty((len(requests), WORDS), np.int32)
    for request, mask in zip(requests, expected, strict=True):
        Script.fill_mask(request.grammar, mask)  # type: ignore[arg-type]
    return expected


def test_masks_are_filled_while_the_engine_goes_on() -> None:
    """The first masks of a request are measured one by one; then `accept_tokens` returns before
    they are filled, and `fill_masks` waits for them."""
    go_on, has_begun = threading.Event(), threading.Event()
    batch = Together(lambda: (has_begun.set(), go_on.wait(10.0)))
    table, requests, slots = rows_of([Batched(batch) for _ in range(5)])
    calls = GrammarCalls(VOCAB, 2)
    for _ in range(MIN_MEASURED):
        calls.wait_for_masks()
        accept_first(calls, requests)
    assert not batch.counts
    accept_first(calls, requests)
    assert has_begun.wait(10.0) and all(get_grammar_state(request).mask is None for request in requests)
    go_on.set()
    mask = calls.fill_masks(table, slots)
    assert batch.counts == [5] and (mask == masks_of(requests)).all() and calls.take_stopped() == []
    assert {request.grammar.num_alone for request in requests} == {MIN_MEASURED}  # type: ignore[union-attr]
    calls.close()


def test_a_batch_without_end_holds_its_requests_and_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_calls, "LOST_SECONDS", 0.05)
    go_on = threading.Event()
    table, requests, slots = rows_of([Batched(Together(lambda: go_on.wait(20.0))) for _ in range(3)])
    others_table, others, others_slots = rows_of([Batched(Together()) for _ in range(2)])
    calls = GrammarCalls(VOCAB, 2)
    for each in (*requests, *others):
        get_grammar_state(each).num_measured = MIN_MEASURED
    accept_first(calls, requests)
    calls.wait_for_masks()
    assert calls.take_stopped() == requests
    for request in requests:
        calls.hold_request(request)
    accept_first(calls, others)
    mask = calls.fill_masks(others_table, others_slots)
    assert (mask == masks_of(others)).all() and calls.take_resolved() == [] and len(calls) == 3
    assert [each.grammar.num_alone for each in others] == [1, 1]  # type: ignore[union-attr]
    go_on.set()
    deadline = time.monotonic() + 20.0
    held = []
    while len(held) < 3 and time.monotonic() < deadline:
        held += calls.take_resolved()
    assert sorted(request.rid for request, finish in held if finish is None) == ["0", "1", "2"]
    assert (calls.fill_masks(table, slots) == masks_of(requests)).all()
    calls.close()


def test_masks_after_a_slow_batch_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "QUICK_SECONDS", 0.0)
    batch = Together()
    table, requests, slots = rows_of([Batched(batch) for _ in range(3)])
    calls = GrammarCalls(VOCAB, 2)
    for request in requests:
        get_grammar_state(request).num_measured = MIN_MEASURED
    for _ in range(4):
        accept_first(calls, requests)
        assert (calls.fill_masks(table, slots) == masks_of(requests)).all()
    assert batch.counts == [3, 3] and [request.grammar.num_alone for request in requests] == [2] * 3  # type: ignore[union-attr]
    calls.close()


def test_a_batch_that_raises_is_replaced_by_single_calls() -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    table, requests, slots = rows_of([Batched(Together(fail)) for _ in range(2)])
    calls = GrammarCalls(VOCAB, 2)
    for request in requests:
        get_grammar_state(request).num_measured = MIN_MEASURED
    accept_first(calls, requests)
    assert (calls.fill_masks(table, slots) == masks_of(requests)).all()
    calls.close()


def test_masks_of_batches_are_charged_at_the_mean_of_measured_ones() -> None:
    meters = [GrammarMeter(0.01), GrammarMeter(9.0)]
    table, requests, slots = rows_of([MeteredGrammar(Batched(Together()), meter) for meter in meters])  # type: ignore[misc]
    calls = GrammarCalls(VOCAB, 2)
    for request in requests:
        for _ in range(MIN_MEASURED):
            get_grammar_state(request).measure(0.02)
    calls.fill_masks(table, slots)
    errors = [get_grammar_state(request).error for request in requests]
    assert errors[1] is None and 0.02 <= meters[1].spent < 0.03
    assert errors[0] is not None and errors[0].error is not None and "budget of 0.01 s" in errors[0].error
    calls.close()


def known(count: int, seconds: float = 0.0, batch: Together | None = None) -> tuple[RequestTable, list[Request], np.ndarray]:
    """Requests of which enough masks are measured, each of `seconds`."""
    together = batch or Together()
    table, requests, slots = rows_of([Batched(together) for _ in range(count)])
    for request in requests:
        for _ in range(KNOWN_MEASURED):
            get_grammar_state(request).measure(seconds)
    return table, requests, slots


def test_masks_of_many_rows_are_filled_in_parts() -> None:
    """The first part before the tokens of the last one are accepted."""
    has_begun = threading.Event()
    batch = Together(has_begun.set)
    table, requests, slots = known(70, batch=batch)
    last = requests[-1].grammar
    accept, seen = last.accept_token, []  # type: ignore[union-attr]
    last.accept_token = lambda token: seen.append(has_begun.wait(10.0)) or accept(token)  # type: ignore[union-attr,method-assign]
    calls = GrammarCalls(VOCAB, 4)
    accept_first(calls, requests)
    assert (calls.fill_masks(table, slots) == masks_of(requests)).all()
    assert seen == [True] and sorted(batch.counts) == [16, 18, 18, 18]
    calls.close()


def test_a_new_request_in_a_crowded_step_is_measured_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "CROWDED_SECONDS", 0.0)
    batch = Together()
    table, requests, slots = known(6, batch=batch)
    get_grammar_state(requests[2]).num_measured = MIN_MEASURED
    calls = GrammarCalls(VOCAB, 2)
    for _ in range(3):
        accept_first(calls, requests)
        assert (calls.fill_masks(table, slots) == masks_of(requests)).all()
    assert batch.counts == [6, 5, 5], "the first step does not know that it is crowded"
    assert [request.grammar.num_alone for request in requests] == [0, 0, 2, 0, 0, 0]  # type: ignore[union-attr]
    calls.close()


@pytest.mark.parametrize(("seconds", "is_slow"), [(0.0006, False), (0.006, True)])
def test_a_heavy_request_leaves_a_crowded_step_if_it_takes_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, is_slow: bool
) -> None:
    monkeypatch.setattr(grammar_masks, "CROWDED_SECONDS", 0.0)
    _, requests, _ = known(10, 0.0002)
    get_grammar_state(requests[0]).seconds = seconds
    calls = GrammarCalls(VOCAB, 2)
    accept_first(calls, requests)
    calls.wait_for_masks()
    assert [get_grammar_state(request).is_slow for request in requests] == [is_slow] + [False] * 9
    calls.close()


def test_more_rows_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "QUICK_SECONDS", 0.2)
    for count in (3, 192):
        batch = Together(lambda: time.sleep(0.21))
        table, requests, slots = known(count, batch=batch)
        calls = GrammarCalls(VOCAB, 4)
        for _ in range(2):
            accept_first(calls, requests)
            calls.fill_masks(table, slots)
        assert sum(batch.counts) == (3 if count == 3 else 384)
        calls.close()


def test_a_share_of_many_rows_may_take_as_long_as_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has 3 rows of a step of 192."""
    monkeypatch.setattr(grammar_masks, "QUICK_SECONDS", 0.2)
    monkeypatch.setattr(grammar_masks, "CROWDED_SECONDS", 0.2)
    for total in (0, 192):
        batch = Together(lambda: time.sleep(0.21))
        table, requests, slots = known(3, 0.0002, batch)
        get_grammar_state(requests[0]).seconds = 0.003
        calls = GrammarCalls(VOCAB, 4, slices=1)
        calls.total_rows = total
        accept_first(calls, requests)
        calls.fill_masks(table, slots)
        assert get_grammar_state(requests[0]).is_slow == (total == 0)
        accept_first(calls, requests)
        calls.fill_masks(table, slots)
        assert sum(batch.counts) == (6 if total else 3)
        calls.close()


def test_few_masks_of_a_step_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "MEASURED_SHARE", 1.0)
    table, requests, slots = known(200)
    calls = GrammarCalls(VOCAB, 2)
    for _ in range(3):
        accept_first(calls, requests)
        calls.fill_masks(table, slots)
    assert 0 < sum(request.grammar.num_alone for request in requests) < 60  # type: ignore[union-attr]
    calls.close()

"""Grammar calls in processes: masks, forced tokens and ends are those of the engine's own calls,
whatever happens to the processes."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import threading
import time
from array import array
from typing import Any, cast

import numpy as np
import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.core.scheduling.request_slots import RequestTable
from frame.structured_output import call_processes, grammar_threads, remote_calls
from frame.structured_output.grammar_calls import BROKEN_GRAMMAR, GrammarMeter, MeteredGrammar
from frame.structured_output.grammar_masks import GrammarCalls
from frame.structured_output.jump_forward import JumpForward
from frame.structured_output.remote_calls import LOST, NO_PROCESS, RemoteCalls
from frame.structured_output.served_calls import JumpSettings
from tests.core.scheduling.scripted_grammar import BreakingScript, Free, Script
from tests.structured_output.local_process import make_pool

VOCAB = 70
WIDTHS = {f"script {i}": [random.Random(i).choice((1, 1, 2, 5)) for _ in range(4 + i)] for i in range(6)}
GRAMMARS: dict[str, Any] = {
    **{name: lambda widths=widths: Script(widths, VOCAB) for name, widths in WIDTHS.items()},
    "free": Free,
    "breaking": lambda: BreakingScript([3] * 9, VOCAB, 4),
}


def make_request(number: int, grammar: Any, output: list[int] | None = None) -> Request:
    params = SamplingParams(regex="x")
    request = Request(str(number), np.array([1, 2], np.int32), params, 0, number, 0.0, 1e9, 40, output=array("i", output or []))
    request.tokens = request.all_tokens()
    request.grammar = MeteredGrammar(grammar, GrammarMeter(100.0))
    return request


class Extends:
    """Takes the place of the running requests: notes forced tokens."""

    def __init__(self, table: RequestTable) -> None:
        self.table, self.runs = table, dict[str, list[int]]()

    def extend_request(self, request: Request, run: list[int]) -> None:
        self.runs[request.rid] = run
        self.table.arrays.num_committed_tokens[request.slot] += len(run)


def serve(make_calls: Any, start: Any, names: list[str], before_call: Any = lambda step: None) -> list[Any]:
    """All that the grammars of requests do until they end: masks, forced tokens and ends. start: ->
    the grammar of a name."""
    table = RequestTable(64, 4)
    extends = Extends(table)
    calls = make_calls(extends)
    numbers = [random.Random(i) for i in range(len(names))]
    waiting, running, seen = list(enumerate(names)), list[Request](), list[Any]()
    for step in range(60):
        while waiting and len(running) < 5 and (step % 3 == 0 or not running):
            number, name = waiting.pop(0)
            request = make_request(number, start(name))
            assert calls.start_request(request) is None
            table.add_request(request)
            running.append(request)
        if not running:
            break
        before_call(step)
        masks = calls.fill_masks(table, np.array([request.slot for request in running]))
        assert calls.take_stopped() == [] and masks is not None
        runs, extends.runs = extends.runs, {}
        drawn = []
        for request, mask in zip(running, masks, strict=True):
            bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[:VOCAB]
            seen.append((request.rid, step, bits.tobytes(), runs.get(request.rid)))
            if request.rid not in runs:
                token = numbers[int(request.rid)].choice(np.flatnonzero(bits).tolist())
                is_last = names[int(request.rid)] == "free" and numbers[int(request.rid)].random() < 0.2
                drawn.append((request, [7 if is_last else token]))  # which `Free` refuses
                table.arrays.num_committed_tokens[request.slot] += 1
        before_call(step)
        for (request, _), end in zip(drawn, calls.accept_tokens(drawn, len(running)), strict=True):
            if end is not None:
                seen.append((request.rid, step, end))
                table.remove_request(request)
                running.remove(request)
        del drawn, request
    assert not running and not waiting
    calls.close()
    return seen


def serve_here(names: list[str], jumps: bool) -> list[Any]:
    def make(extends: Any) -> GrammarCalls:
        return GrammarCalls(VOCAB, 1, JumpForward(extends, 2) if jumps else None)

    return serve(make, lambda name: GRAMMARS[name](), names)


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_masks_and_ends_are_those_of_the_engine(jumps: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where processes end before and between the calls of steps, or do not reply."""
    numbers = random.Random(seed)
    monkeypatch.setattr(remote_calls, "MAX_MOVES", 1000)
    monkeypatch.setattr(grammar_threads, "LOST_SECONDS", 60.0)  # on a busy machine, no call is slow
    # The error of a mask is lost with its process; then a token that was drawn without it decides.
    names = [numbers.choice([name for name in GRAMMARS if name != "breaking" or not seed]) for _ in range(14)]
    pool, processes = make_pool(GRAMMARS, VOCAB, 3, JumpSettings(2, 0, 0, 3) if jumps else None)
    backend = pool.start_backend()
    compiled = {name: backend.load("regex", name, b"") for name in GRAMMARS}

    def end_some(step: int) -> None:
        alive = [process for process in processes if process.is_alive]
        if seed and numbers.random() < 0.3 and len(alive) > 1:
            numbers.choice(alive).dies_in = numbers.randrange(2)
        deadline = time.monotonic() + 10
        while len([process for process in processes if process.is_alive]) < 2:  # a replacement comes
            assert time.monotonic() < deadline
            time.sleep(0.001)
            pool.choose(compiled["free"])

    seen = serve(lambda extends: RemoteCalls(pool, extends.extend_request), lambda name: compiled[name].start(), names, end_some)
    assert seen == serve_here(names, jumps)
    assert seed or any(isinstance(each[2], Finish) and each[2].code == "invalid_grammar" for each in seen)
    if seed:
        assert len(processes) > 3  # some were replaced


def started(
    names: list[str], count: int = 2, output: list[int] | None = None
) -> tuple[Any, RemoteCalls, RequestTable, list[Request], list[Any]]:
    pool, processes = make_pool(GRAMMARS, VOCAB, count)
    backend = pool.start_backend()
    calls, table, requests = RemoteCalls(pool, lambda request, run: None), RequestTable(64, 4), []
    for i, name in enumerate(names):
        requests.append(make_request(i, backend.load("regex", name, b"").start(), output))
        assert calls.start_request(requests[-1]) is None
        table.add_request(requests[-1])
    return pool, calls, table, requests, processes


def slots_of(requests: list[Request]) -> np.ndarray:
    return np.array([request.slot for request in requests])


def test_a_recovered_request_replays_its_output() -> None:
    for output, end in (([3, 10], None), ([4, 7], BROKEN_GRAMMAR)):
        _, calls, table, requests, _ = started(["free"], output=output)
        calls.fill_masks(table, slots_of(requests))
        assert calls.accept_tokens([(requests[0], [9])], 1) == [end]


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_that_ends_processes_ends_itself(count: int) -> None:
    _, calls, table, requests, _ = started(["free"], count)
    grammar = cast("Any", requests[0].grammar)
    for _ in range(remote_calls.MAX_MOVES):
        grammar.member.process.is_alive = False
        masks = calls.fill_masks(table, slots_of(requests))
        assert masks is not None and calls.accept_tokens([(requests[0], [9])], 1) == [None]
    grammar.member.process.is_alive = False
    masks = calls.fill_masks(table, slots_of(requests))
    assert masks is not None and (masks == -1).all()
    assert calls.accept_tokens([(requests[0], [9])], 1) == [LOST]


def test_processes_that_cannot_be_replaced_are_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_processes, "RETRY_SECONDS", 0.1)
    pool, processes = make_pool(GRAMMARS, VOCAB, 1)
    backend, calls, table = pool.start_backend(), RemoteCalls(pool, lambda request, run: None), RequestTable(64, 4)
    compiled = backend.load("regex", "free", b"")
    requests = [make_request(i, compiled.start()) for i in range(2)]
    assert calls.start_request(requests[0]) is None
    table.add_request(requests[0])

    def fail() -> Any:
        raise RuntimeError("no memory")

    start, pool._start_process = pool._start_process, fail
    processes[0].is_alive = False
    assert calls.fill_masks(table, slots_of(requests[:1])) is not None
    assert calls.accept_tokens([(requests[0], [9])], 1) == [NO_PROCESS]
    assert calls.start_request(requests[1]) == NO_PROCESS
    pool._start_process = start
    deadline = time.monotonic() + 10
    while calls.start_request(make_request(2, compiled.start())) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    calls.close()


def test_processes_that_do_not_reply_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams without grammars wait as long."""
    monkeypatch.setattr(remote_calls, "REPLY_SECONDS", 0.5)
    pool, calls, table, requests, processes = started(["free"] * 12, 4)
    for process in processes:
        process.is_stopped = True
    began = time.monotonic()
    masks = calls.fill_masks(table, slots_of(requests))
    assert 0.5 <= time.monotonic() - began < 1.0
    assert masks is not None and calls.accept_tokens([(request, [9]) for request in requests], 12) == [None] * 12
    assert not any(member.process in processes[:4] for member in pool.members)
    calls.close()


def test_a_process_that_a_load_finds_ended_keeps_its_requests_until_they_move() -> None:
    pool, calls, table, requests, _ = started(["free"] * 2, 2)
    assert calls.fill_masks(table, slots_of(requests)) is not None
    ended = cast("Any", requests[0].grammar).member
    ended.process.is_alive = False
    loads = [pool.load("regex", f"script {i}", b"") for i in range(2)]  # one of them meets it
    assert len(loads) == 2 and ended not in pool.members and not ended.process.is_closed
    assert calls.accept_tokens([(request, [9]) for request in requests], 2) == [None] * 2
    assert cast("Any", requests[0].grammar).member in pool.members and ended.process.is_closed
    calls.close()


def test_what_is_not_used_leaves_the_processes() -> None:
    pool, calls, table, requests, processes = started([*GRAMMARS], 2)
    other = make_request(90, pool.load("regex", "free", b"").start())
    assert calls.start_request(other) is None
    table.add_request(other)
    calls.fill_masks(table, slots_of([*requests[:6], other]))
    for request in requests:
        table.remove_request(request)
    del request
    requests.clear()
    gc.collect()
    others = [other]
    while len(others) < 4:  # each process gets a message
        others.append(make_request(len(others), pool.load("regex", "free", b"").start()))
        assert calls.start_request(others[-1]) is None
        table.add_request(others[-1])
    calls.fill_masks(table, slots_of(others))
    left = [len([each for each in process.calls._table.requests if each is not None]) for process in processes]
    assert sum(left) == 4 and min(left) == 2
    assert [len(process.calls._compiled) for process in processes] == [2, 2]


def count_places(processes: list[Any]) -> list[int]:
    return [len([each for each in process.calls._table.requests if each is not None]) for process in processes]


def test_requests_of_a_grammar_share_a_process_until_it_has_more_than_others() -> None:
    pool, processes = make_pool(GRAMMARS, VOCAB, 4, rows=24)
    backend, calls, table = pool.start_backend(), RemoteCalls(pool, lambda request, run: None), RequestTable(64, 4)
    names = ["free"] * 12 + [f"script {i}" for i in range(4) for _ in range(3)]
    compiled = {name: backend.load("regex", name, b"") for name in dict.fromkeys(names)}
    assert sorted(process.num_loads for process in processes) == [1, 1, 1, 2]
    requests = [make_request(i, compiled[name].start()) for i, name in enumerate(names)]
    for request in requests:
        assert calls.start_request(request) is None
        table.add_request(request)
    calls.fill_masks(table, slots_of(requests))
    places = count_places(processes)
    assert sum(places) == 24 and max(places) - min(places) <= call_processes.MAX_UNEVEN + 1
    alone = [each for each in requests if len({id(cast("Any", other.grammar).member) for other in requests
             if cast("Any", other.grammar).compiled is cast("Any", each.grammar).compiled}) == 1]  # fmt: skip
    assert len(alone) >= 6
    assert sum(len(process.calls._compiled) for process in processes) < 4 * len(compiled)


def test_a_process_that_cannot_load_what_another_has_loaded_ends_those_requests() -> None:
    pool, _ = make_pool(GRAMMARS, VOCAB, 2)
    backend, calls, table = pool.start_backend(), RemoteCalls(pool, lambda request, run: None), RequestTable(64, 4)
    compiled = backend.load("regex", "free", b"")
    cast("Any", pool.members[1].process).calls._backend.compiled.clear()
    requests = [make_request(i, compiled.start()) for i in range(8)]
    for request in requests:
        assert calls.start_request(request) is None
        table.add_request(request)
    masks = calls.fill_masks(table, slots_of(requests))
    assert masks is not None
    ends = calls.accept_tokens([(request, [9]) for request in requests], 8)
    bad = [i for i, request in enumerate(requests) if cast("Any", request.grammar).member is pool.members[1]]
    assert bad and [i for i, end in enumerate(ends) if end is not None] == bad
    assert all("error" in str(ends[i]) for i in bad)


class Slow(Free):
    """Its masks take CPU until the test lets it go."""

    until = threading.Event()

    def fill_mask(self, mask: np.ndarray) -> bool:
        end = time.thread_time() + 30
        while not self.until.is_set() and time.thread_time() < end:
            sum(range(1000))
        return False


@pytest.mark.parametrize("fault", ["", "ends", "released"])
def test_a_slow_call_holds_its_request_alone(fault: str) -> None:
    Slow.until = threading.Event()
    pool, _ = make_pool({"slow": Slow, "free": Free}, VOCAB, 2)
    backend = pool.start_backend()
    calls, table = RemoteCalls(pool, lambda request, run: None), RequestTable(64, 4)
    requests = [make_request(i, backend.load("regex", name, b"").start()) for i, name in enumerate(["slow", "free"])]
    for request in requests:
        assert calls.start_request(request) is None
        table.add_request(request)
    calls.fill_masks(table, slots_of(requests))
    assert calls.take_stopped() == requests[:1]
    table.remove_request(requests[0])
    calls.hold_request(requests[0])
    assert len(calls) == 1 and calls.take_resolved() == []
    if fault == "ends":
        member = cast("Any", requests[0].grammar).member
        member.process.is_alive = False
        calls.fill_masks(table, slots_of(requests[1:]))
        resolved = calls.take_resolved()
    elif fault == "released":
        assert calls.release_request(requests[0]) and not calls.release_request(requests[0])
        Slow.until.set()
        resolved = [(requests[0], None)]
    else:
        Slow.until.set()
        deadline, resolved = time.monotonic() + 10, []
        while not resolved:
            assert time.monotonic() < deadline
            resolved = calls.take_resolved()
    assert resolved == [(requests[0], None)] and len(calls) == 0
    Slow.until.set()
    calls.close()


def test_a_held_request_is_not_moved_by_another_process() -> None:
    """It had moved before; its present process still makes its call."""
    Slow.until = threading.Event()
    pool, _ = make_pool({"slow": Slow, "free": Free}, VOCAB, 2)
    backend, calls, table = pool.start_backend(), RemoteCalls(pool, lambda request, run: None), RequestTable(64, 4)
    requests = [make_request(i, backend.load("regex", name, b"").start()) for i, name in enumerate(["slow", "free"])]
    for request in requests:
        assert calls.start_request(request) is None
        table.add_request(request)
    slow, free = (cast("Any", request.grammar) for request in requests)
    slow.num_moves = 1
    calls.fill_masks(table, slots_of(requests))
    assert calls.take_stopped() == requests[:1]
    table.remove_request(requests[0])
    calls.hold_request(requests[0])
    free.member.process.is_alive = False
    calls.fill_masks(table, slots_of(requests[1:]))
    assert calls.take_resolved() == [] and len(calls) == 1
    Slow.until.set()
    calls.close()


ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
ASKED: list[dict[str, Any]] = [
    {"json_schema": json.dumps({"type": "array", "minItems": 100, "items": ITEM})},
    {"regex": "([a-z]{1,9} ){400}"},
    {},
    {"choice": ["red", "green", "blue"]},
    {"ebnf": 'root ::= "a" root "b" | "c"'},
]


def generate(kill: bool = False, **settings: Any) -> list[Any]:
    from frame import Engine

    with Engine(dtype="float32", threads=1, max_model_len=256, max_running_requests=8, sampling_grammar_workers=0, **settings) as engine:
        prompts = [[5 + (7 * i + 3 * j) % 1900 for j in range(24)] for i in range(18)]
        params = [SamplingParams(max_tokens=60, temperature=1.0, seed=i, **ASKED[i % len(ASKED)]) for i in range(18)]
        killed: list[int] = []
        timer = threading.Timer(0.2, kill_mask_process, [killed])
        if kill:
            engine.generate(prompts[:1], params[:1])  # the processes have started
            timer.start()
        outputs = [(output.token_ids, output.finish_reason) for output in engine.generate(prompts, params)]
        assert bool(killed) == kill
        return outputs


def kill_mask_process(killed: list[int]) -> None:
    import psutil

    children = [each for each in psutil.Process().children(recursive=True) if any("grammar_process" in word for word in each.cmdline())]
    if len(children) == 2:
        os.kill(children[0].pid, signal.SIGKILL)
        killed.append(children[0].pid)


@pytest.mark.slow
@pytest.mark.parametrize("jumps", [0, 2])
def test_outputs_of_an_engine_are_the_same(jumps: int) -> None:
    """Two real processes, one of which is killed while it serves."""
    pytest.importorskip("llguidance")
    expected = generate(grammar_jump_forward=jumps)
    assert generate(grammar_jump_forward=jumps, sampling_grammar_mask_processes=2, kill=True) == expected

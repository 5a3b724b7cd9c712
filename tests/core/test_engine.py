"""The engine's loop with a fake runner: tokens, overlap, commands, failed steps, idle
self-checks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from frame.core.engine import Engine, EngineOptions, Observers
from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.cache import PrefixCacheContext
from frame.core.interfaces.runner import DeviceLost, ModelRunner, UnsampledStep
from frame.core.interfaces.sampling import CompiledGrammar, Grammar, GrammarBackend
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.ipc.transport import InProcessTransport
from frame.core.messages import Abort, AnyMessage, Control, ControlReply, Fatal, Generate, Heartbeat, StepTokens
from frame.core.scheduling.scheduler import SchedulerConfig
from frame.entrypoints.processes.build_scheduler import assemble_scheduler
from frame.loading.engine_states import EngineStates
from frame.plugins.eviction_policies.lru import Lru
from frame.plugins.prefix_caches.radix import RadixCache
from frame.plugins.scheduling_policies.fcfs import Fcfs
from frame.structured_output.grammar_compiler import GrammarCompiler
from frame.testing.contexts import EVICTION, SCHEDULING
from frame.testing.page_allocators import make_allocator

VOCAB = 64
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)


class Step:
    def __init__(self, result: StepResult | Exception) -> None:
        self._result = result

    def wait(self) -> StepResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Unsampled(UnsampledStep):
    """Records the mask."""

    def __init__(self, result: StepResult, masks: list[np.ndarray]) -> None:
        self._result = result
        self._masks = masks
        self._is_sampled = False

    def sample(self, mask: np.ndarray | None) -> None:
        self._is_sampled = True
        if mask is not None:
            self._masks.append(mask)

    def wait(self) -> StepResult:
        assert self._is_sampled
        return self._result


class Counting(ModelRunner):
    """Token = 1 + the row's position. `fails`: the errors that steps raise; `in_wait`: they raise
    in `wait`, not in `launch`."""

    def __init__(self, fails: dict[int, Exception] | None = None, in_wait: bool = False) -> None:
        self.fails = fails or {}
        self.in_wait = in_wait
        self.launched: list[int] = []
        self.masks: list[np.ndarray] = []
        self.closed = False

    def launch(self, batch: ScheduledBatch) -> Step | Unsampled:
        self.launched.append(batch.step)
        if batch.grammar_mask is not None:
            self.masks.append(batch.grammar_mask.copy())
        error = self.fails.get(batch.step)
        if error is not None and not self.in_wait:
            raise error
        tokens = ((batch.num_computed + batch.num_scheduled)[batch.samples] % VOCAB).astype(np.int32)
        if batch.has_deferred_grammar_mask:
            return Unsampled(StepResult(step=batch.step, token_ids=tokens), self.masks)
        return Step(error or StepResult(step=batch.step, token_ids=tokens))

    def close(self) -> None:
        self.closed = True


class Running:
    """An engine in a thread, and the messages that it sent."""

    def __init__(self, runner: ModelRunner, overlap: bool = False, grammars: GrammarCompiler | None = None, **more: Any) -> None:
        config = SchedulerConfig(
            page_size=4, num_pages=65, max_running=8, token_budget=32, max_context=64, vocab_size=VOCAB, overlap=overlap
        )
        self.scheduler = assemble_scheduler(
            config, RadixCache(PrefixCacheContext(4, 4096, Lru(EVICTION))), make_allocator(65), Fcfs(SCHEDULING)
        )
        self.near, far = InProcessTransport.pair()
        self.runner = runner
        observers = more.pop("observers", None)
        options = EngineOptions(overlap=overlap, **{"make_states": EngineStates, **more})
        self.engine = Engine(self.scheduler, runner, far, options, observers, grammars)
        self.error: BaseException | None = None
        self.seen: list[AnyMessage] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.engine.run()
        except BaseException as error:
            self.error = error

    def until(self, condition: Callable[[Sequence[AnyMessage]], bool]) -> None:
        while not condition(self.seen):
            found = self.near.receive(10.0)
            assert found, f"nothing more came; so far {self.seen}"
            self.seen += found

    def finish(self, *rids: str) -> dict[str, tuple[list[int], Any]]:
        """Wait until these requests have ended. -> their tokens and finishes."""
        self.until(lambda seen: set(rids) <= {m.rids[i] for m in seen if isinstance(m, StepTokens) for i in m.finishes})
        result: dict[str, tuple[list[int], Any]] = {rid: ([], None) for rid in rids}
        for message in self.seen:
            if isinstance(message, StepTokens):
                for i, rid in enumerate(message.rids):
                    if rid in result:
                        result[rid] = (result[rid][0] + message.token_ids[i], message.finishes.get(i))
        return result

    def ask(self, action: Any) -> ControlReply:
        self.near.send(Control(id=action, action=action))
        self.until(lambda seen: any(isinstance(m, ControlReply) and m.id == action for m in seen))
        return next(m for m in reversed(self.seen) if isinstance(m, ControlReply) and m.id == action)

    def stop(self) -> None:
        self.near.send(Control(id="stop", action="shutdown"))
        self.thread.join(10)
        assert not self.thread.is_alive()


def generate(rid: str, length: int = 5, params: SamplingParams = GREEDY) -> Generate:
    return Generate(rid=rid, token_ids=[i % VOCAB for i in range(length)], params=params)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def start(overlap: bool) -> Iterator[Callable[..., Running]]:
    running: list[Running] = []

    def make(runner: ModelRunner | None = None, **more: Any) -> Running:
        running.append(Running(runner or Counting(), overlap, **more))
        return running[-1]

    yield make
    for each in running:
        each.stop()
        assert each.runner.closed  # type: ignore[attr-defined]


def test_overlap_changes_no_token(start: Callable[..., Running]) -> None:
    running = start()
    running.near.send_all([generate(f"r{i}", 3 + i) for i in range(12)])
    done = running.finish(*(f"r{i}" for i in range(12)))
    for i in range(12):
        assert done[f"r{i}"][0] == [(3 + i + k) % VOCAB for k in range(6)]
        assert done[f"r{i}"][1].reason == "length"
    running.ask("check_integrity")
    assert running.ask("server_info").data["used_pages"] == 0


def test_each_control_is_answered_once(start: Callable[..., Running]) -> None:
    running = start(info={"model": "m"})
    running.near.send(generate("x", 9))
    running.finish("x")
    assert running.ask("ping").ok
    info = running.ask("server_info").data
    assert (info["model"], info["running"], info["waiting"]) == ("m", 0, 0)
    assert info["evictable_pages"] > 0
    assert running.ask("flush_cache").data["pages"] == info["evictable_pages"]
    assert running.ask("check_integrity").ok
    assert len([m for m in running.seen if isinstance(m, ControlReply)]) == 4


def test_pause_and_resume(start: Callable[..., Running]) -> None:
    running = start()
    running.ask("pause")
    running.near.send(generate("x"))
    assert running.ask("server_info").data["waiting"] == 1
    steps = len(running.runner.launched)  # type: ignore[attr-defined]
    assert running.ask("ping").ok
    assert len(running.runner.launched) == steps  # type: ignore[attr-defined]
    running.ask("resume")
    assert len(running.finish("x")["x"][0]) == 6


def test_refusals_and_aborts_are_answered(start: Callable[..., Running]) -> None:
    running = start()
    running.ask("pause")
    running.near.send_all([generate("long", 100), generate("gone"), Abort(rids=["gone", "never-seen"])])
    done = running.finish("long", "gone")
    assert done["long"][1].reason == "error"
    assert "context" in done["long"][1].error
    assert done["gone"][1].reason == "abort"


@pytest.mark.parametrize("in_wait", [False, True], ids=["launch", "wait"])
def test_a_failed_step_ends_only_the_request_that_fails_alone(start: Callable[..., Running], in_wait: bool) -> None:
    """Step 1 has both requests, and step 2 or 3 runs the first one alone."""
    fails = RuntimeError("no such kernel\nsecond line")
    runner = Counting(in_wait=in_wait)
    running = start(runner)
    runner.fails = dict.fromkeys((1, 3 if running.engine.options.overlap else 2), fails)
    running.near.send_all([generate("a"), generate("b")])
    done = running.finish("a", "b")
    assert (done["a"][1].reason, done["a"][1].error) == ("error", "the model failed on this request: RuntimeError: no such kernel")
    assert (done["b"][1].reason, len(done["b"][0])) == ("length", 6)
    assert running.ask("check_integrity").ok


def test_a_lost_device_ends_the_engine(overlap: bool) -> None:
    runner = Counting({0: DeviceLost("gone")})
    running = Running(runner, overlap)
    running.near.send(generate("a"))
    running.until(lambda seen: any(isinstance(m, Fatal) for m in seen))
    assert not any(isinstance(m, StepTokens) for m in running.seen)  # the request may go on elsewhere
    running.thread.join(10)
    assert isinstance(running.error, DeviceLost)
    assert runner.closed


def test_repeated_failures_end_the_engine(overlap: bool) -> None:
    runner = Counting(dict.fromkeys(range(100), RuntimeError("always")))
    running = Running(runner, overlap)
    for i in range(3):
        running.near.send(generate(f"r{i}"))
        running.finish(f"r{i}")
    running.until(lambda seen: any(isinstance(m, Fatal) and "lost" in m.error for m in seen))
    running.thread.join(10)
    assert isinstance(running.error, DeviceLost)


def test_shutdown_aborts_running_requests(overlap: bool) -> None:
    running = Running(Counting(), overlap)
    running.ask("pause")
    running.near.send(generate("a"))
    running.stop()
    assert running.finish("a")["a"][1].reason == "abort"


def test_an_idle_engine_sends_heartbeats(start: Callable[..., Running]) -> None:
    running = start(heartbeat=0.05)
    running.until(lambda seen: sum(isinstance(m, Heartbeat) for m in seen) >= 3)
    assert running.runner.launched == []  # type: ignore[attr-defined]
    beat = next(m for m in running.seen if isinstance(m, Heartbeat))
    assert (beat.running, beat.total_pages) == (0, 64)


def test_idle_self_check(overlap: bool) -> None:
    running = Running(Counting(), overlap, check_integrity="fatal")
    running.ask("pause")
    running.scheduler.audit_integrity = lambda: (_ for _ in ()).throw(RuntimeError("page 3 is lost"))  # type: ignore[method-assign]
    running.until(lambda seen: any(isinstance(m, Fatal) and "page 3 is lost" in m.error for m in seen))
    running.thread.join(10)
    assert isinstance(running.error, RuntimeError)


def test_idle_self_check_repairs(start: Callable[..., Running]) -> None:
    running = start(check_integrity="repair")
    repaired = threading.Event()
    running.scheduler.repair_integrity = lambda: repaired.set() or []  # type: ignore[method-assign,func-returns-value]
    running.scheduler.audit_integrity = lambda: (_ for _ in ()).throw(RuntimeError("page 3 is lost"))  # type: ignore[method-assign]
    running.near.send(generate("a"))
    running.finish("a")
    assert repaired.wait(10)
    running.near.send(generate("b"))
    assert len(running.finish("b")["b"][0]) == 6


def test_messages_are_handled_between_parts_of_the_self_check(start: Callable[..., Running]) -> None:
    running = start(check_integrity="fatal")
    seen: list[Any] = []  # the parts of each round, with the steps that had been launched before
    whole = threading.Event()

    def audit() -> Iterator[None]:
        number = len(seen)
        seen.append([])
        for part in range(5):
            if number == 0 and part == 2:
                running.near.send(generate("late"))
            seen[number].append(len(running.runner.launched))  # type: ignore[attr-defined]
            yield
        whole.set()

    running.scheduler.audit_integrity = audit  # type: ignore[method-assign]
    running.near.send(generate("early"))
    assert len(running.finish("early", "late")["late"][0]) == 6
    assert whole.wait(10)
    before, after = seen[0][0], len(running.runner.launched)  # type: ignore[attr-defined]
    assert seen == [[before] * 3, [after] * 5]  # left alone after the part in which it came; then all of it, once
    assert after > before


def test_observers_are_called_for_steps(start: Callable[..., Running]) -> None:
    steps: list[dict[str, Any]] = []
    stopped = threading.Event()
    running = start(observers=Observers(on_step=lambda **model_config: steps.append(model_config), on_stop=stopped.set))
    running.near.send(generate("a"))
    running.finish("a")
    running.stop()
    assert stopped.is_set()
    assert [model_config["num_tokens"] for model_config in steps][:2] == [5, 1]
    assert all(set(model_config) == {"step", "num_running", "num_waiting", "num_tokens", "seconds"} for model_config in steps)


# grammars -----------------------------------------------------------------------------------------


class EvenOnly:
    """Allows even tokens; ends after three."""

    def __init__(self) -> None:
        self.count = 0

    def fill_mask(self, mask: np.ndarray) -> bool:
        mask[:] = 0x55555555
        return True

    def accept_token(self, token_id: int) -> bool:
        self.count += 1
        return True

    def is_finished(self) -> bool:
        return self.count >= 3


class Compiled:
    num_bytes = 100

    def start(self) -> Grammar:
        return EvenOnly()


class Backend(GrammarBackend):
    def __init__(self) -> None:
        self.gate = threading.Event()

    def compile(self, kind: str, source: str) -> CompiledGrammar:
        assert self.gate.wait(10)
        if source == "bad":
            raise ValueError("unbalanced bracket")
        return Compiled()


def test_grammars_are_compiled_off_the_loop(start: Callable[..., Running]) -> None:
    backend = Backend()
    running = start(grammars=GrammarCompiler(lambda: backend))
    constrained = SamplingParams(max_tokens=6, temperature=0.0, regex="x")
    bad = SamplingParams(max_tokens=6, regex="bad")
    running.near.send_all([generate("g", params=constrained), generate("b", params=bad), generate("c", params=bad), generate("plain")])
    assert len(running.finish("plain")["plain"][0]) == 6  # others do not wait for the compiler
    running.near.send(Abort(rids=["c"]))
    assert running.finish("c")["c"][1].reason == "abort"
    assert running.ask("outline_requests").data["phases"]["grammar"] == 2
    backend.gate.set()
    done = running.finish("g", "b")
    assert len(done["g"][0]) == 3
    assert done["g"][1].reason == "stop"
    assert done["b"][1].error == "invalid grammar: unbalanced bracket"
    assert (done["b"][1].code, done["b"][1].param) == ("invalid_grammar", "regex")
    masks = running.runner.masks  # type: ignore[attr-defined]
    assert len(masks) == 3
    assert all((mask == 0x55555555).all() for mask in masks)


def test_a_deadline_ends_a_request_whose_grammar_compiles(start: Callable[..., Running]) -> None:
    backend = Backend()
    running = start(grammars=GrammarCompiler(lambda: backend))
    running.near.send(msgspec.structs.replace(generate("g", params=SamplingParams(max_tokens=6, regex="x")), deadline=0.01))
    assert running.finish("g")["g"][1].code == "deadline_exceeded"  # no compilation has ended by then
    backend.gate.set()

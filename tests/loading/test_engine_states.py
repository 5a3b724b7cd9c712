"""Pauses, sleeps and updates: what becomes of requests, when commands are acknowledged, and in
which order they may come."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

import pytest

from frame.core.interfaces.batch import ScheduledBatch, StepResult
from frame.core.interfaces.runner import MemoryOrder, PauseMode
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Abort, Control, ControlReply, Generate, NewWeights, StepTokens
from frame.loading.engine_states import EngineStates
from tests.core.test_engine import GREEDY, Counting, Running, generate

LONG = SamplingParams(max_tokens=40, temperature=0.0)


class Gated(Counting):
    """A step ends when `gate` is set, which step `stop_at` clears. `orders`: those for the memory,
    and whether no step ran then."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.blocked = threading.Event()  # a step waits for the gate
        self.orders: list[tuple[MemoryOrder, bool]] = []
        self.open = 0
        self.stop_at = -1

    def launch(self, batch: ScheduledBatch) -> Any:
        self.open += 1
        return GatedStep(super().launch(batch), self, batch.step)

    def change_memory(self, order: MemoryOrder, beat: Callable[[], object]) -> str:
        self.orders.append((order, self.open == 0))
        return ""


class GatedStep:
    def __init__(self, step: Any, runner: Gated, number: int) -> None:
        self._step, self._runner, self._number = step, runner, number

    def wait(self) -> StepResult:
        runner = self._runner
        if self._number == runner.stop_at:
            runner.gate.clear()
            runner.blocked.set()
        assert runner.gate.wait(10)
        runner.open -= 1
        result: StepResult = self._step.wait()
        return result


class Weights:
    """Commands for weights that load at once."""

    holds_steps = awaits_trainers = is_open = False

    def check_deadline(self) -> None: ...

    def take_replies(self, beat: Callable[[], object]) -> list[ControlReply]:
        return []

    def update(self, control: Control, clear: Callable[[], int], beat: Callable[[], object]) -> ControlReply:
        if control.arguments.get("step") in ("begin", "cancel"):
            self.is_open = control.arguments["step"] == "begin"
            return ControlReply(id=control.id, ok=True)
        version = str(control.arguments["version"])
        if control.arguments.get("phase") == "check":
            return ControlReply(id=control.id, ok=True)
        return ControlReply(id=control.id, ok=True, data={"weights_path": "", "weight_version": version, "num_preempted": clear()})


class States(Running):
    """`Running` with arguments of commands, each with an id of its own."""

    count = 0

    def send(self, action: Any, **arguments: Any) -> str:
        self.count += 1
        self.near.send(Control(id=f"c{self.count}", action=action, arguments=arguments))
        return f"c{self.count}"

    def reply_to(self, name: str) -> ControlReply:
        self.until(lambda seen: any(isinstance(m, ControlReply) and m.id == name for m in seen))
        return next(m for m in self.seen if isinstance(m, ControlReply) and m.id == name)

    def command(self, action: Any, **arguments: Any) -> ControlReply:
        return self.reply_to(self.send(action, **arguments))

    def start(self, *messages: Generate, steps: int = 6) -> None:
        """Start requests, and return while one of their first steps runs, which ends with the next
        command."""
        runner = gate_of(self)
        runner.blocked.clear()
        runner.stop_at = len(runner.launched) + steps
        self.near.send_all(list(messages))
        assert runner.blocked.wait(10)

    def interrupt(self, action: Any, **arguments: Any) -> ControlReply:
        """A command while that step runs."""
        name = self.send(action, **arguments)
        gate_of(self).gate.set()
        return self.reply_to(name)

    def tokens_of(self, rid: str) -> int:
        return sum(len(m.token_ids[m.rids.index(rid)]) for m in self.seen if isinstance(m, StepTokens) and rid in m.rids)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def states(request: pytest.FixtureRequest) -> Iterator[States]:
    running = States(Gated(), bool(request.param), make_states=partial(EngineStates, weights=Weights(), sleep_obstacle=""))
    yield running
    running.runner.gate.set()  # type: ignore[attr-defined]
    running.stop()
    assert running.error is None


def gate_of(states: States) -> Gated:
    assert isinstance(states.runner, Gated)
    return states.runner


def cached(states: States) -> int:
    return int(states.command("server_info").data["cached_tokens"])


def test_a_pause_is_acknowledged_when_no_step_runs(states: States) -> None:
    runner = gate_of(states)
    states.start(generate("a", params=LONG))
    name = states.send("pause", mode="keep")
    launched = len(runner.launched)
    states.seen += states.near.receive(0.1)
    assert not any(isinstance(m, ControlReply) and m.id == name for m in states.seen)
    runner.gate.set()
    assert states.reply_to(name).ok
    assert runner.orders == [(MemoryOrder(), True)] and runner.open == 0
    assert len(runner.launched) <= launched + 2
    launched = len(runner.launched)
    assert states.command("ping").ok and len(runner.launched) == launched
    assert states.command("resume").ok
    assert len(states.finish("a")["a"][0]) == 40
    assert states.command("server_info").data["preempted"] == 0


def test_a_resume_withdraws_a_pause_that_waits(states: States) -> None:
    """As that of a restarted engine, whose first step runs: it must not stop the engine later."""
    states.start(generate("a", params=LONG))
    paused, resumed = states.send("pause", mode="keep"), states.send("resume")
    gate_of(states).gate.set()
    assert states.reply_to(resumed).ok
    refused = states.reply_to(paused)
    assert not refused.ok and "continued before the pause" in (refused.error or "")
    assert len(states.finish("a")["a"][0]) == 40
    assert not states.command("server_info").data["paused"]


def test_messages_of_trainers_do_not_refuse_each_other(states: States) -> None:
    """They are carried out one after another; a folder beside them is refused."""
    states.start(generate("a", params=LONG))
    names = [states.send("transfer_weights", version=f"v{number}") for number in range(3)]
    folder = states.send("update_weights", version="folder")
    gate_of(states).gate.set()
    refused = states.reply_to(folder)
    assert (refused.ok, refused.code) == (False, "conflict") and "another update of the weights waits" in (refused.error or "")
    assert [states.reply_to(name).data["weight_version"] for name in names] == ["v0", "v1", "v2"]
    assert len(states.finish("a")["a"][0]) == 40


@pytest.mark.parametrize("mode", ["abort", "wait", "keep", "retract"])
def test_what_becomes_of_requests(states: States, mode: str) -> None:
    states.start(generate("a", params=LONG), generate("b", 7, params=LONG))
    reply = states.interrupt("pause", mode=mode)
    assert reply.ok and reply.data["num_preempted"] == (2 if mode == "retract" else 0)
    states.near.send(generate("late"))
    info = states.command("server_info").data
    assert (info["paused"], info["pause_mode"]) == (True, mode)
    running, waiting = {"abort": (0, 1), "wait": (0, 1), "keep": (2, 1), "retract": (0, 3)}[mode]
    assert (info["running"], info["waiting"]) == (running, waiting)
    if mode == "retract":
        assert info["used_pages"] == 0 == info["evictable_pages"]
    assert states.command("resume").ok
    done = states.finish("a", "b", "late")
    assert len(done["late"][0]) == 6
    for rid, length in (("a", 5), ("b", 7)):
        if mode == "abort":
            assert done[rid][1].reason == "abort" and len(done[rid][0]) < 40
        else:
            assert done[rid][0] == [(length + k) % 64 for k in range(40)]
    assert states.command("check_integrity").ok


def test_a_wait_admits_nothing_and_may_be_ended(states: States) -> None:
    runner = gate_of(states)
    states.start(generate("a", params=LONG))
    name = states.send("pause", mode="wait")
    states.near.send(generate("late"))
    runner.gate.set()
    assert states.reply_to(name).ok
    assert states.tokens_of("a") == 40 and states.tokens_of("late") == 0
    assert states.command("resume").ok
    states.finish("late")
    states.start(generate("b", params=LONG))
    names = [states.send("pause", mode="wait"), states.send("pause", mode="wait")]
    resumed = states.send("resume")
    runner.gate.set()
    assert [states.reply_to(each).ok for each in (*names, resumed)] == [False, False, True]
    errors = [states.reply_to(each).error or "" for each in names]
    assert "another pause was sent" in errors[0] and "generation was continued" in errors[1]
    states.near.send(generate("c"))
    states.finish("b", "c")


def test_a_wait_ends_with_an_aborted_request(states: States) -> None:
    runner = gate_of(states)
    states.start(generate("a", params=LONG))
    name = states.send("pause", mode="wait")
    states.near.send(Abort(rids=["a"]))
    runner.gate.set()
    assert states.reply_to(name).ok
    assert states.command("resume").ok


ORDER: list[tuple[list[tuple[str, dict[str, Any]]], str]] = [
    ([("resume", {})], "is not paused: pause it first"),
    ([("wake", {})], "the engine is not asleep: nothing to wake"),
    ([("sleep", {}), ("sleep", {"tags": ["kv_cache"]})], "kv_cache is released already"),
    ([("sleep", {"tags": ["kv_cache"]}), ("wake", {"tags": ["weights"]})], "only the memory of kv_cache is released"),
    ([("sleep", {}), ("update_weights", {"path": "x", "version": "x"})], r"wake the engine first \(tags: weights\)"),
    ([("sleep", {}), ("resume", {})], "the engine is asleep: wake it"),
]
BEGIN, CANCEL = ("transfer_weights", {"step": "begin"}), ("transfer_weights", {"step": "cancel"})
INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("pause", {"mode": "later"}, "mode is 'later'; it may be " + ", ".join(get_args(PauseMode))),
    ("sleep", {"tags": ["graphs"]}, "tags has 'graphs'; it may have weights, kv_cache"),
    ("sleep", {"level": 3}, "level is 3; it may be 1 to 2"),
]


@pytest.mark.parametrize(("commands", "sentence"), ORDER, ids=[sentence for _, sentence in ORDER])
def test_commands_out_of_order(states: States, commands: list[tuple[str, dict[str, Any]]], sentence: str) -> None:
    *before, (action, arguments) = commands
    assert all(states.command(name, **more).ok for name, more in before)
    reply = states.command(action, **arguments)
    assert (reply.ok, reply.code) == (False, "conflict")
    assert re.search(sentence, reply.error or ""), reply.error


def test_the_weights_stay_while_a_trainer_updates_them(states: States) -> None:
    assert states.command(BEGIN[0], **BEGIN[1]).ok
    for tags in ({}, {"tags": ["weights"]}):
        reply = states.command("sleep", **tags)
        assert (reply.ok, reply.code) == (False, "conflict")
        assert "end or cancel the update first" in (reply.error or "")
    assert states.command("sleep", tags=["kv_cache"]).ok
    assert states.command("wake").ok
    assert states.command(CANCEL[0], **CANCEL[1]).ok
    assert states.command("sleep").ok
    assert not states.command(BEGIN[0], **BEGIN[1]).ok
    assert states.command(CANCEL[0], **CANCEL[1]).ok, "a trainer may always cancel"
    assert states.command("wake").ok


@pytest.mark.parametrize(("action", "arguments", "sentence"), INVALID, ids=["mode", "tags", "level"])
def test_invalid_arguments(states: States, action: str, arguments: dict[str, Any], sentence: str) -> None:
    reply = states.command(action, **arguments)
    assert (reply.ok, reply.code, reply.error) == (False, "invalid", sentence)


def test_running_requests_of_a_pause_cannot_be_waited_for(states: States) -> None:
    states.start(generate("a", params=LONG))
    assert states.interrupt("pause", mode="keep").ok
    assert "running requests cannot end" in (states.command("pause", mode="wait").error or "")
    assert states.command("pause", mode="retract").data["num_preempted"] == 1
    assert states.command("pause", mode="wait").error  # it has run
    assert states.command("pause", mode="abort").ok
    assert states.command("pause", mode="wait").ok
    assert states.command("resume").ok


def test_running_requests_of_a_stopped_engine_cannot_be_waited_for(states: States) -> None:
    """The reply says which command comes first."""
    states.start(generate("a", params=LONG))
    assert states.interrupt("pause", mode="keep").ok
    assert "or continue first" in (states.command("sleep", mode="wait").error or "")
    assert states.command("sleep", mode="keep", tags=["kv_cache"]).ok
    for action in ("pause", "sleep"):
        reply = states.command(action, mode="wait", tags=["weights"])
        assert (reply.ok, reply.code) == (False, "conflict")
        assert "or wake the engine first (tags: kv_cache)" in (reply.error or "")
    assert states.command("wake").ok and states.command("resume").ok
    assert len(states.finish("a")["a"][0]) == 40


def test_a_resume_without_weights_names_the_update(states: States) -> None:
    assert states.command("sleep", level=2).ok and states.command("wake").ok
    assert "update them" in (states.command("resume").error or "")
    assert states.command("update_weights", path="x", version="new").ok


def test_no_request_reads_what_older_weights_have_cached(states: States) -> None:
    """Over 20 versions, also while requests of older ones run."""
    prompt = 21
    for version in range(20):
        before = cached(states)
        states.near.send(generate(f"first-{version}", prompt))
        states.finish(f"first-{version}")
        assert cached(states) == before, "nothing of other weights is read"
        states.near.send(generate(f"second-{version}", prompt))
        states.finish(f"second-{version}")
        assert cached(states) > before
        keeps = version % 2 == 0
        if not keeps:  # it has run beside the requests of this version
            states.finish(f"kept-{version - 1}")
        if keeps:
            states.start(generate(f"kept-{version}", prompt, LONG))
            assert states.interrupt("pause", mode="keep").ok
        reply = states.command("update_weights", path="x", version=f"v{version}")
        assert reply.ok and not reply.data["num_preempted"]
        if keeps:
            assert states.command("resume").ok
    assert [m.version for m in states.seen if isinstance(m, NewWeights)] == [f"v{version}" for version in range(20)]
    assert states.command("check_integrity").ok


def test_pages_of_several_versions_are_not_cached(states: States) -> None:
    """Neither at the request's end, nor when it is preempted: it is computed anew then."""
    states.start(generate("a", 9, LONG), generate("b", 10, LONG))
    assert states.interrupt("pause", mode="keep").ok
    assert states.command("update_weights", path="x", version="new").data["num_preempted"] == 0
    assert states.command("server_info").data["evictable_pages"] == 0
    assert states.command("pause", mode="retract").data["num_preempted"] == 2
    assert states.command("resume").ok
    done = states.finish("a", "b")
    assert [len(done[rid][0]) for rid in "ab"] == [40, 40]
    before = cached(states)
    states.near.send(generate("c", 9))  # after the preemption all was computed with the new weights
    states.finish("c")
    assert cached(states) > before
    assert states.command("flush_cache").ok
    states.start(generate("d", 13, LONG))
    assert states.interrupt("pause", mode="keep").ok
    assert states.command("update_weights", path="x", version="newer").ok
    assert states.command("resume").ok
    states.finish("d")
    before = cached(states)
    states.near.send(generate("e", 13))
    states.finish("e")
    assert cached(states) == before
    assert states.command("check_integrity").ok


def test_an_update_without_a_pause_computes_anew(states: States) -> None:
    states.start(generate("a", params=LONG))
    assert states.interrupt("update_weights", path="x", version="new").data["num_preempted"] == 1
    assert len(states.finish("a")["a"][0]) == 40


def test_phases_of_an_update_hold_the_engine(states: States) -> None:
    runner = gate_of(states)
    for last in ("commit", "cancel"):
        states.start(generate(last, params=LONG))
        assert states.interrupt("update_weights", path="x", version=last, phase="check").ok
        launched = len(runner.launched)
        assert states.command("ping").ok and len(runner.launched) == launched
        if last == "commit":
            assert states.command("update_weights", path="x", version=last, phase="load").data["num_preempted"] == 1
            assert states.command("ping").ok and len(runner.launched) == launched
        assert states.command("update_weights", phase=last).ok
        assert len(states.finish(last)[last][0]) == 40
    assert [m.version for m in states.seen if isinstance(m, NewWeights)] == ["commit"]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_sleep_and_wake(states: States, mode: str) -> None:
    runner = gate_of(states)
    states.start(generate("a", params=LONG))
    assert states.interrupt("sleep", mode=mode, level=2).data["released"] == ["weights", "kv_cache"]
    states.near.send(generate("late", params=GREEDY))
    launched = len(runner.launched)
    assert states.command("server_info").data["released"] == ["weights", "kv_cache"]
    assert states.command("wake", tags=["weights"]).data == {"released": ["kv_cache"], "needs_weights": True}
    assert states.command("update_weights", path="x", version="new").ok
    assert len(runner.launched) == launched
    assert states.command("wake").data == {"released": [], "needs_weights": False}
    done = states.finish("a", "late")
    assert len(done["late"][0]) == 6 and len(done["a"][0]) == 40 if mode != "abort" else done["a"][1].reason == "abort"
    orders = [order for order, _ in runner.orders]
    released = MemoryOrder(released=["weights", "kv_cache"], drops_weights=True)
    assert orders == [released, MemoryOrder(mapped=["weights"]), MemoryOrder(mapped=["kv_cache"])]
    assert all(is_quiet for _, is_quiet in runner.orders)


@pytest.mark.parametrize("action", ["update_weights", "transfer_weights"])
def test_dropped_weights_keep_the_engine_stopped(states: States, action: str) -> None:
    assert states.command("sleep", level=2).ok
    assert "wake the engine first" in str(states.command(action, path="x", version="new").error)
    assert states.command("wake").data["needs_weights"]
    states.near.send(generate("a"))
    info = states.command("server_info").data
    assert "update them" in info["problem"] and info["waiting"] == 1
    assert not gate_of(states).launched
    assert "partial is set" in str(states.command(action, path="x", version="new", partial=True).error)
    assert states.command(action, path="x", version="new").ok
    assert not states.command("server_info").data["problem"]
    assert len(states.finish("a")["a"][0]) == 6


def test_an_engine_that_cannot_sleep_says_why() -> None:
    running = States(Counting())
    reply = running.command("sleep")
    assert (reply.ok, reply.code, reply.error) == (False, "conflict", "this engine cannot release its memory")
    running.stop()

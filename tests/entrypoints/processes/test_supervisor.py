"""When a child is restarted, and when it is enough, over children that the test plays."""

from __future__ import annotations

import errno
import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Fatal, Generate, Heartbeat, Ready
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import ClientLimits
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.entrypoints.processes import supervisor as module
from frame.entrypoints.processes.deployment import Child
from frame.entrypoints.processes.resource_monitor import ResourceMonitor, Usage, UsageLimits
from frame.entrypoints.processes.supervisor import RestartPolicy, Supervisor
from tests.entrypoints.submitting import Link, submit_request


class Process:
    """A `Popen` that lives until it is told otherwise."""

    pid = 0

    def __init__(self) -> None:
        Process.pid += 1
        self.pid = Process.pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = self.code or -9


class Deployment:
    def __init__(self, *names: str) -> None:
        self.children = {name: Child(name, [], {}) for name in names}
        self.started: list[str] = []
        self.asked: list[str] = []
        self.standbys = 0  # calls of `prepare_standby`
        self.refusals: list[tuple[str, Exception]] = []  # of the next starts of a process
        for name in names:
            self.start_children([name])
            self.children[name].is_ready = True
        self.started.clear()

    def start_children(self, names: list[str]) -> None:
        if self.refusals and self.refusals[0][0] in names:
            raise self.refusals.pop(0)[1]
        for name in names:
            self.started.append(name)
            child = self.children[name]
            child.process, child.is_ready, child.silence, child.device_memory = Process(), False, 0.0, 0  # type: ignore[assignment]
            child.last_error = None

    def prepare_standby(self) -> None:
        self.standbys += 1

    def kill_and_wait(self, names: list[str]) -> None:
        for name in names:
            if self.children[name].process.poll() is None:
                self.children[name].process.code = -9  # type: ignore[attr-defined]

    def kill_children(self, names: list[str]) -> None:
        for name in names:
            self.children[name].process.kill()

    def label(self, name: str) -> str:
        return name

    def read_inflight(self) -> dict[int, int]:
        return {}

    def request_stack_dump(self, name: str) -> None:
        self.children[name].is_dump_requested = True
        self.asked.append(name)

    def read_inflight_text(self) -> frozenset[int]:
        return frozenset()

    def set_weights(self, folder: str, version: str) -> None:
        self.weights = (folder, version)

    def handle_message(self, message: Any) -> None:
        from frame.entrypoints.processes.deployment import Deployment as Real

        Real.handle_message(self, message)  # type: ignore[arg-type]


class Rig(Link):
    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str, max_restarts: int = 5, heartbeat_timeout: float = 10.0) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        super().__init__()
        self.lines: list[str] = []
        self.asked_again: list[int] = []
        self.client = EngineClient(self, ClientLimits(8, 64, 100, 64))
        self.deployment = Deployment(*names)
        policy = RestartPolicy(max_restarts, heartbeat_timeout, 1.0)
        self.held: dict[int, Usage] = {}  # by pid
        watch = ResourceMonitor(UsageLimits(memory=1000, device_memory=1000), self.lines.append, lambda pid: self.held.get(pid, Usage()))
        self.supervisor = Supervisor(self.deployment, self.client, policy, self.lines.append, self.asked_again.append, watch)  # type: ignore[arg-type]

    async def tick(self, *messages: Any, seconds: float = 0.1) -> None:
        self.inbox += messages
        self.now += seconds
        await self.supervisor.tick()

    async def tick_until_a_line(self) -> None:
        """At most 50 ticks."""
        for _ in range(50):
            await self.tick()
            if self.lines:
                return
        raise AssertionError("the supervisor says nothing")

    async def kill(self, name: str, code: int = -9) -> None:
        self.deployment.children[name].process.code = code  # type: ignore[attr-defined]
        await self.tick()

    async def get_ready(self) -> None:
        await self.tick()
        await self.tick(*(Ready(process=name, pid=child.process.pid) for name, child in self.deployment.children.items()))


def started(rig: Rig) -> SequenceState:
    """A request that is in the engine."""
    rig.client.reserve_sequences(1)
    return submit_request(rig.client, [[1, 2, 3]], [SamplingParams(max_tokens=8)]).sequences[0]


ALL = ("engine", "rank-1", "detokenizer", "tokenizer-0", "tokenizer-1")


@pytest.mark.parametrize(
    ("name", "restarted"),
    [
        ("engine", ["engine", "rank-1", "detokenizer"]),
        ("rank-1", ["engine", "rank-1", "detokenizer"]),
        ("detokenizer", ["detokenizer"]),
        ("tokenizer-1", ["tokenizer-1"]),
    ],
)
async def test_what_is_restarted_with_what(monkeypatch: pytest.MonkeyPatch, name: str, restarted: list[str]) -> None:
    rig = Rig(monkeypatch, *ALL)
    await rig.kill(name)
    assert f"the {name} process was killed by signal 9" in rig.lines[0]
    assert (rig.client.unavailable_reason is None) == (name == "tokenizer-1")
    await rig.get_ready()
    assert sorted(rig.deployment.started) == sorted(restarted)
    assert rig.client.unavailable_reason is None
    assert rig.asked_again == ([1] if name == "tokenizer-1" else [])
    assert sum(rig.client.stats.restarts.values()) == 1


@pytest.mark.parametrize("restarts", [5, 0])
async def test_processes_of_the_next_start_wait_for_an_engine_that_is_up(monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    rig = Rig(monkeypatch, "engine", "rank-1", "detokenizer", max_restarts=restarts, heartbeat_timeout=0.0)
    await rig.tick(seconds=module.STANDBY_DELAY - 1)
    assert rig.deployment.standbys == 0
    for _ in range(2):
        await rig.tick(seconds=1)
    assert rig.deployment.standbys == min(restarts, 1)
    if not restarts:
        return
    await rig.kill("detokenizer")
    await rig.get_ready()
    await rig.kill("rank-1")
    await rig.get_ready()
    await rig.tick(seconds=module.STANDBY_DELAY - 1)
    assert rig.deployment.standbys == 1  # a crash soon after a start finds none
    await rig.tick(seconds=1)
    assert rig.deployment.standbys == 2


async def test_a_restart_reports_the_phases_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine")
    await rig.kill("engine")
    await rig.tick()
    data = {"phases": {"imports": 3.0, "load": 1.5}, "max_total_tokens": 64}
    await rig.tick(Ready(process="engine", pid=rig.deployment.children["engine"].process.pid, data=data), seconds=4.0)
    assert rig.lines[-1] == "engine ready again after 4.0 s (load 1.5 s, other 2.5 s; 64 tokens of KV cache)"


async def test_silence_is_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine", "detokenizer")
    for _ in range(200):
        await rig.tick(Heartbeat(process="engine"), Heartbeat(process="detokenizer"))
    await rig.tick(seconds=3600.0)  # it was this process that slept
    assert rig.client.unavailable_reason is None
    ticks = 0
    while not rig.deployment.asked:
        await rig.tick(Heartbeat(process="detokenizer"))
        ticks += 1
    assert rig.deployment.asked == ["engine"]  # where it hangs
    assert 96 <= ticks <= 99  # ten seconds, with those that it was silent for while this process slept
    assert rig.client.unavailable_reason is None
    await rig.tick(Heartbeat(process="detokenizer"))
    assert "engine process has been silent for 10 s" in (rig.client.unavailable_reason or "")
    await rig.tick()
    assert rig.deployment.started == ["detokenizer", "engine"]


async def test_a_stopped_rank_is_seen_within_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, *ALL)
    stopped: set[int] = set()
    monkeypatch.setattr(Child, "is_stopped", property(lambda child: child.process.pid in stopped))
    stopped.add(rig.deployment.children["rank-1"].process.pid)
    for _ in range(20):
        await rig.tick()
    stopped.clear()
    await rig.tick()  # it goes on in time
    assert rig.lines == []
    stopped.add(rig.deployment.children["rank-1"].process.pid)
    await rig.tick_until_a_line()
    assert "the rank-1 process has been stopped by a signal for 3 s" in rig.lines[0]
    await rig.get_ready()
    assert sorted(rig.deployment.started) == ["detokenizer", "engine", "rank-1"]


async def test_a_rank_that_fails_and_does_not_end_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, *ALL)
    await rig.tick(Fatal(process="rank-1", error="no such batch"))
    await rig.tick_until_a_line()
    assert "the rank-1 process has failed and does not end (no such batch)" in rig.lines[0]


@pytest.mark.parametrize("name", ["engine", "rank-1", "detokenizer", "tokenizer-1"])
async def test_a_process_that_holds_too_much_is_restarted(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rig = Rig(monkeypatch, *ALL)
    stream = started(rig)
    rig.held[rig.deployment.children[name].process.pid] = Usage(memory=1001)
    await rig.tick()
    assert rig.deployment.started == []  # the last look was less than a second ago
    await rig.tick(seconds=1.0)
    assert f"the {name} process holds 0 MB of memory, more than server.max_process_memory" in rig.lines[1]
    await rig.get_ready()
    assert name in rig.deployment.started
    await rig.tick(seconds=1.0)
    assert sum(rig.client.stats.restarts.values()) == 1
    assert stream.finish is None
    assert stream.recovery.num_crashes == 0  # it is no fault of the request
    assert stream.recovery.num_admissions == (1 if name == "tokenizer-1" else 2)


async def test_what_a_heartbeat_tells_of_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine")
    await rig.tick(Heartbeat(process="engine", device_memory=1001), seconds=1.0)
    assert "0 MB of device memory, more than server.max_device_memory" in rig.lines[1]
    await rig.get_ready()
    await rig.tick(seconds=1.0)  # its successor has told nothing yet
    assert rig.client.stats.restarts == {"engine": 1}


async def test_a_start_that_never_ends_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine", heartbeat_timeout=0.0)
    await rig.kill("engine")
    for _ in range(640):
        await rig.tick()
    assert rig.deployment.started == ["engine"]
    for _ in range(50):
        await rig.tick()
    assert rig.deployment.started == ["engine", "engine"]
    stale = Ready(process="engine", pid=0)
    await rig.tick(stale)
    assert rig.client.unavailable_reason is not None
    await rig.get_ready()
    assert rig.client.unavailable_reason is None


async def test_enough_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine", max_restarts=2)
    for _ in range(2):
        await rig.kill("engine")
        await rig.get_ready()
    rig.inbox.append(Fatal(process="engine", error="no memory is left"))
    await rig.kill("engine", 1)
    assert rig.client.dead_reason == "the engine process ended with exit code 1 (no memory is left); the server cannot go on"
    assert rig.supervisor.exit_code == 1


async def test_old_restarts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine", max_restarts=1)
    for _ in range(3):
        await rig.kill("engine")
        await rig.get_ready()
        rig.now += 700.0
        await rig.tick(Heartbeat(process="engine"))
    assert rig.client.dead_reason is None


async def test_a_wrong_configuration_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine")
    await rig.kill("engine")
    await rig.tick()
    await rig.kill("engine", 78)
    assert rig.client.dead_reason is not None
    assert rig.supervisor.exit_code == 78


async def test_starts_that_fail_are_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine", max_restarts=100)
    await rig.kill("engine")
    starts = []
    for _ in range(6):
        while not rig.deployment.started:
            await rig.tick()
        starts.append(rig.now)
        rig.deployment.started.clear()
        await rig.kill("engine", 1)
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert all(later > 1.5 * earlier for earlier, later in pairwise(gaps))
    assert not any(isinstance(message, Generate) for message in rig.sent)


@pytest.mark.parametrize("name", ["engine", "detokenizer", "tokenizer-0"])
async def test_starts_that_the_system_refuses_are_tried_again(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rig = Rig(monkeypatch, "engine", "detokenizer", "tokenizer-0", max_restarts=10)
    stream = started(rig)
    errors = (OSError(errno.EMFILE, "no files"), BlockingIOError(errno.EAGAIN, "no processes"), MemoryError(), RuntimeError("no thread"))
    rig.deployment.refusals += [(name, error) for error in errors]
    await rig.kill(name)
    since = rig.now
    while rig.deployment.refusals:
        await rig.tick()
        assert rig.client.dead_reason is None
    assert rig.now - since == pytest.approx(0.1 + 0.5 + 1 + 2, abs=0.5)  # with back-off
    assert sum("could not be started" in line for line in rig.lines) == 4
    while name not in rig.deployment.started:
        await rig.tick()
    await rig.get_ready()
    assert rig.client.unavailable_reason is None
    assert stream.finish is None


async def test_refused_starts_count_as_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, "engine", max_restarts=3)
    rig.deployment.refusals += [("engine", OSError(errno.ENOMEM, "no memory"))] * 9
    await rig.kill("engine")
    for _ in range(200):
        await rig.tick()
    assert rig.client.dead_reason == "engine could not be started ([Errno 12] no memory); the server cannot go on"
    assert len(rig.deployment.refusals) == 6


def test_a_process_of_another_host_is_not_looked_up_on_this_one() -> None:
    child = Child("rank-1", [], {}, 1)
    child.process = SimpleNamespace(pid=os.getpid(), is_stopped=True)  # type: ignore[assignment]
    assert (child.local_pid, child.is_stopped) == (os.getpid(), False)
    child.is_local = False
    assert (child.local_pid, child.is_stopped) == (0, True)

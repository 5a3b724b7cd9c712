"""`Supervisor`: notices that a child died or hangs, starts it again, and tells the client what to hold and when to go on.

Ranks restart together. The detokenizer restarts alone, and with the ranks, so that nothing is left of what they sent it; tokenizers
restart alone. One that holds more than it may is restarted likewise. Decides when it is enough. Knows no request and no HTTP.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.processes.deployment import EXIT_CONFIGURATION, Child, Deployment
from frame.entrypoints.processes.resource_monitor import UsageWatch

TICK = 0.1  # seconds between two looks at the children
POLL = 0.01  # seconds between two looks at a process that was killed
WATCH = 1.0  # seconds between two looks at what they hold
WINDOW = 600.0  # seconds in which restarts are counted
BACKOFF = 0.5  # seconds before the second attempt at a start that failed; doubles
MAX_BACKOFF = 30.0
START_FACTOR, START_SLACK = 5.0, 60.0  # a restart may take so many times as long as the first start, and so many seconds more
EXIT_DIED = 1


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """`max_restarts` within ten minutes (0: none at all). `heartbeat_timeout` in seconds (0: silence is no failure), `start_seconds` is
    what the first start took."""

    max_restarts: int
    heartbeat_timeout: float
    start_seconds: float


@dataclass(slots=True)
class Unit:
    """Children that live and die together."""

    name: str
    children: list[Child]
    state: Literal["up", "down", "starting"] = "up"
    since: float = 0.0  # when the state began
    failed_starts: int = 0
    resume_at: float = 0.0

    @property
    def names(self) -> list[str]:
        return [child.name for child in self.children]


@dataclass(slots=True)
class Units:
    """All units of a deployment; `path` are those that tokens come through."""

    engine: Unit
    path: list[Unit] = field(default_factory=list)
    tokenizers: list[Unit] = field(default_factory=list)

    @classmethod
    def of(cls, deployment: Deployment) -> Units:
        children = deployment.children.values()
        engine = Unit("engine", [child for child in children if child.is_rank])
        alone = [Unit(child.name, [child]) for child in children if not child.is_rank]
        path = [engine, *(unit for unit in alone if unit.name == "detokenizer")]
        return cls(engine, path, [unit for unit in alone if unit.name != "detokenizer"])


class Supervisor:
    """Call `tick` every `TICK` seconds until `client.dead_reason` is set; `exit_code` is then the exit code of the server."""

    def __init__(
        self,
        deployment: Deployment,
        client: EngineClient,
        policy: RestartPolicy,
        report: Callable[[str], None],
        ask_again: Callable[[int], None] | None = None,
        watch: UsageWatch | None = None,
    ) -> None:
        self.exit_code = EXIT_DIED
        self._deployment = deployment
        self._client = client
        self._policy = policy
        self._report = report
        self._ask_again = ask_again  # what a tokenizer lost, by its number
        self._watch = watch
        self._watched = time.monotonic()
        self._units = Units.of(deployment)
        self._restarts: deque[float] = deque()
        self._looked = time.monotonic()
        client.on_notice = deployment.note

    async def tick(self) -> None:
        """One look at every child. Sets `client.dead_reason` when the server cannot go on."""
        self._client.receive_messages()  # heartbeats that waited for us are no silence
        now = time.monotonic()
        passed = min(now - self._looked, 2 * TICK)  # while this process did not run nobody was silent
        self._looked = now
        units = (*self._units.path, *self._units.tokenizers)
        for unit in units:
            if self._client.dead_reason is None:
                await self._look(unit, now, passed)
        if self._watch is not None and now - self._watched >= WATCH:
            self._watched = now
            self._watch.look("main", os.getpid())  # which only warns: all requests hang on this process
            for unit in units:
                if self._client.dead_reason is None and unit.state == "up":
                    await self._weigh(unit, self._watch)
        self._client.expire_requests()

    async def _weigh(self, unit: Unit, watch: UsageWatch) -> None:
        """Restart a unit that holds too much. It is nobody's fault among the requests."""
        found = [watch.look(child.name, child.process.pid, child.device_memory) for child in unit.children]
        why = next(filter(None, found), None)
        if why is not None:
            await self._fail(unit, why, is_death=False)

    async def _look(self, unit: Unit, now: float, passed: float) -> None:
        if unit.state == "down":
            if now >= unit.resume_at:
                await self._start(unit)
            return
        why = self._failure(unit, passed)
        if why is not None:
            await self._fail(unit, why)
        elif unit.state == "starting" and all(child.is_ready for child in unit.children):
            unit.state = "up"
            self._report(f"{unit.name} ready again after {now - unit.since:.1f} s")
            self._came_up(unit)

    def _failure(self, unit: Unit, passed: float) -> str | None:
        """Why a unit has to be restarted, if it has."""
        policy = self._policy
        for child in unit.children:
            how = child.how_it_ended()
            if how is not None:
                return how
            child.silence += passed
            if unit.state == "up" and child.beats and 0 < policy.heartbeat_timeout < child.silence:
                if not child.is_asked:  # it has until the next look to answer
                    self._deployment.ask_where(child.name)
                    continue
                return f"the {child.name} process has been silent for {child.silence:.0f} s"
        patience = policy.start_seconds * START_FACTOR + START_SLACK
        if unit.state == "starting" and time.monotonic() - unit.since > patience:
            return f"{unit.name} was not ready {patience:.0f} s after its restart"
        return None

    async def _fail(self, unit: Unit, why: str, is_death: bool = True) -> None:
        """A unit died or hangs, or has to go: make sure of its end, keep its requests, have it started again."""
        is_configuration = any(child.process.poll() == EXIT_CONFIGURATION for child in unit.children)
        was_up = unit.state == "up"
        if is_configuration or not self._may_restart():
            self.exit_code = EXIT_CONFIGURATION if is_configuration else EXIT_DIED
            self._client.fail_requests(f"{why}; the server cannot go on")
            return
        self._report(f"{why}; {unit.name} is restarted")
        self._client.stats.restarts[unit.name] = self._client.stats.restarts.get(unit.name, 0) + 1
        unit.failed_starts = 0 if was_up else unit.failed_starts + 1
        await self._take_down(unit)
        if unit is self._units.engine:
            for other in self._units.path[1:]:
                await self._take_down(other)
        self._client.receive_messages()
        if unit in self._units.path:
            has_victims = was_up and is_death
            is_engine = unit is self._units.engine
            inflight = self._deployment.inflight() if has_victims and is_engine else None
            inflight_text = self._deployment.inflight_text() if has_victims and not is_engine else frozenset()
            self._client.begin_recovery(f"{why}; it is being restarted", inflight, inflight_text)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > WINDOW:
            self._restarts.popleft()
        if len(self._restarts) >= self._policy.max_restarts:
            return False
        self._restarts.append(now)
        return True

    async def _take_down(self, unit: Unit) -> None:
        self._deployment.kill_children(unit.names)
        # No thread waits for their ends, since there may be none to be had; a device may take its time.
        while any(child.process.poll() is None for child in unit.children):  # noqa: ASYNC110 - a process tells nobody of its end
            await asyncio.sleep(POLL)
        self._deployment.end(unit.names)
        delay = min(MAX_BACKOFF, BACKOFF * 2 ** (unit.failed_starts - 1)) if unit.failed_starts else 0.0
        unit.state, unit.resume_at = "down", time.monotonic() + delay

    async def _start(self, unit: Unit) -> None:
        unit.state, unit.since = "starting", time.monotonic()
        try:
            self._deployment.start(unit.names)  # in this thread, the main one, at whose end the kernel ends the child
        except Exception as error:  # noqa: BLE001 - descriptors, processes, memory, room: there may be some later
            await self._fail(unit, f"{unit.name} could not be started ({error})")

    def _came_up(self, unit: Unit) -> None:
        if unit in self._units.tokenizers:
            if self._ask_again is not None:
                self._ask_again(self._units.tokenizers.index(unit))
        elif all(other.state == "up" for other in self._units.path):
            self._client.resume_requests()

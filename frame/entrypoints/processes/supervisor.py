"""`Supervisor`: restarts child processes that crashed, hang or exceed a resource limit, and has the
client hold and resume requests.

All ranks restart together. The detokenizer restarts alone, and with the ranks, so that nothing is
left of their messages; tokenizers restart alone. After too many restarts the server stops. Used by
the HTTP server. Must not know a request or HTTP.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from frame.core.blame import explain
from frame.core.errors import EXIT_CONFIGURATION
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.processes.deployment import Child, Deployment
from frame.entrypoints.processes.launch import describe_phases
from frame.entrypoints.processes.resource_monitor import ResourceMonitor

TICK = 0.1  # seconds between checks of the children
POLL = 0.01  # seconds between checks of a process that was killed
RESOURCE_INTERVAL = 1.0  # seconds between checks of resource usage
WINDOW = 600.0  # seconds in which restarts are counted
BACKOFF = 0.5  # seconds before the second attempt after a failed start; doubles with each attempt
MAX_BACKOFF = 30.0
START_FACTOR, START_SLACK = 5.0, 60.0  # a restart may take START_FACTOR times as long as the first start, plus START_SLACK seconds
EXIT_CRASHED = 1
STANDBY_DELAY = 10.0  # seconds that an engine is up before the processes of its next start import torch
STOPPED_LIMIT = 3.0  # seconds that a rank may be stopped by a signal; the other ranks wait for it
ERROR_LIMIT = 3.0  # seconds that a rank may take to end after its error


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a child is restarted, and how often."""

    max_restarts: int  # within WINDOW; 0: none
    heartbeat_timeout: float  # seconds; 0: a child without heartbeats is not restarted
    start_seconds: float  # duration of the first start


@dataclass(slots=True)
class Unit:
    """Children that are started and ended together."""

    name: str
    children: list[Child]
    state: Literal["up", "down", "starting"] = "up"
    since: float = 0.0  # when the state began (time.monotonic)
    failed_starts: int = 0
    resume_at: float = 0.0

    @property
    def names(self) -> list[str]:
        return [child.name for child in self.children]


class Supervisor:
    """Call `tick` every `TICK` seconds until `client.dead_reason` is set; `exit_code` is then the
    exit code of the server."""

    def __init__(
        self,
        deployment: Deployment,
        client: EngineClient,
        policy: RestartPolicy,
        report: Callable[[str], None],
        resend_requests: Callable[[int], None] | None = None,
        monitor: ResourceMonitor | None = None,
    ) -> None:
        self.exit_code = EXIT_CRASHED
        self._deployment = deployment
        self._client = client
        self._policy = policy
        self._report = report
        self._resend_requests = resend_requests  # by number of the tokenizer that was restarted
        self._monitor = monitor
        self._monitored_at = time.monotonic()
        children = deployment.children.values()
        alone = [Unit(child.name, [child]) for child in children if not child.is_rank]
        self._engine = Unit("engine", [child for child in children if child.is_rank])
        self._path = [self._engine, *(unit for unit in alone if unit.name == "detokenizer")]  # that tokens pass through
        self._tokenizers = [unit for unit in alone if unit.name != "detokenizer"]
        self._restarts: deque[float] = deque()
        self._ticked_at = self._engine.since = time.monotonic()
        self._needs_standby = policy.max_restarts > 0
        client.on_notice = deployment.handle_message
        client.watch_weights(deployment.set_weights)

    async def tick(self) -> None:
        """Check every child once. Sets `client.dead_reason` when the server has to stop."""
        self._client.receive_messages()  # heartbeats that have arrived must count
        now = time.monotonic()
        passed = min(now - self._ticked_at, 2 * TICK)  # time in which this process did not run does not count as silence
        self._ticked_at = now
        units = (*self._path, *self._tokenizers)
        for unit in units:
            if self._client.dead_reason is None:
                await self._check_unit(unit, now, passed)
        if self._monitor is not None and now - self._monitored_at >= RESOURCE_INTERVAL:
            self._monitored_at = now
            self._monitor.check_main_process()
            for unit in units:
                if self._client.dead_reason is None and unit.state == "up":
                    await self._check_resources(unit, self._monitor)
        self._client.expire_requests()

    async def _check_resources(self, unit: Unit, monitor: ResourceMonitor) -> None:
        """Restart a unit that exceeds a limit, which is no crash of its requests."""
        label = self._deployment.label
        problems = [monitor.check_process(label(child.name), child.local_pid, child.device_memory) for child in unit.children]
        why = next(filter(None, problems), None)
        if why is not None:
            await self._fail(unit, why, is_crash=False)

    async def _check_unit(self, unit: Unit, now: float, passed: float) -> None:
        if unit.state == "down":
            if now >= unit.resume_at:
                await self._start(unit)
            return
        why = self._failure(unit, passed)
        if why is not None:
            await self._fail(unit, why)
        elif unit.state == "starting" and all(child.is_ready for child in unit.children):
            self._report(f"{unit.name} ready again after {now - unit.since:.1f} s{_describe_start(unit, now)}")
            unit.state, unit.since = "up", now
            self._handle_ready(unit)
        elif unit is self._engine and unit.state == "up" and self._needs_standby and now - unit.since >= STANDBY_DELAY:
            self._needs_standby = False
            try:
                self._deployment.prepare_standby()  # in the main thread, as `start_children`
            except Exception as error:  # noqa: BLE001 - a restart imports torch then
                self._report(f"no processes wait for a restart of the engine: {explain(error)}")

    def _failure(self, unit: Unit, passed: float) -> str | None:
        """Why a unit has to be restarted; None if it has not."""
        policy = self._policy
        for child in unit.children:
            how = child.describe_exit()
            if how is not None:
                return how
            child.silence += passed
            if unit.state == "up" and child.is_rank:
                child.stopped = child.stopped + passed if child.is_stopped else 0.0
                if child.stopped > STOPPED_LIMIT:
                    return f"the {child.name} process has been stopped by a signal for {child.stopped:.0f} s"
                if child.last_error is not None and child.silence > ERROR_LIMIT:  # it waits for its device, which waits for other ranks
                    return f"the {child.name} process has failed and does not end ({child.last_error})"
            if unit.state == "up" and child.has_heartbeat and 0 < policy.heartbeat_timeout < child.silence:
                if not child.is_dump_requested:  # it writes its stacks before the next check
                    self._deployment.request_stack_dump(child.name)
                    continue
                return f"the {child.name} process has been silent for {child.silence:.0f} s"
        patience = policy.start_seconds * START_FACTOR + START_SLACK
        if unit.state == "starting" and time.monotonic() - unit.since > patience:
            return f"{unit.name} was not ready {patience:.0f} s after its restart"
        return None

    async def _fail(self, unit: Unit, why: str, is_crash: bool = True) -> None:
        """Restart a unit that crashed, hangs or exceeds a limit: end it, hold its requests,
        schedule its start."""
        is_configuration = any(child.process.poll() == EXIT_CONFIGURATION for child in unit.children)
        is_killed = any(child.process.poll() == -signal.SIGKILL for child in unit.children)
        was_up = unit.state == "up"
        if is_configuration or not self._may_restart():
            self.exit_code = EXIT_CONFIGURATION if is_configuration else EXIT_CRASHED
            self._client.fail_requests(f"{why}; the server cannot go on")
            return
        self._report(f"{why}; {unit.name} is restarted")
        self._client.stats.restarts[unit.name] = self._client.stats.restarts.get(unit.name, 0) + 1
        unit.failed_starts = 0 if was_up else unit.failed_starts + 1
        await self._take_down(unit)
        if unit is self._engine:
            self._client.record_loss()
            for other in self._path[1:]:
                await self._take_down(other)
        self._client.receive_messages()
        if unit in self._path:
            counts_crash = was_up and is_crash
            is_engine = unit is self._engine
            inflight = self._deployment.read_inflight() if counts_crash and is_engine else None
            inflight_text = self._deployment.read_inflight_text() if counts_crash and not is_engine else frozenset()
            self._client.begin_recovery(f"{why}; it is being restarted", inflight, inflight_text, is_killed=is_killed)

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
        # Polled, because starting a thread to wait may fail; releasing a device may take long.
        while any(child.process.poll() is None for child in unit.children):  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(POLL)
        self._deployment.kill_and_wait(unit.names)
        delay = min(MAX_BACKOFF, BACKOFF * 2 ** (unit.failed_starts - 1)) if unit.failed_starts else 0.0
        unit.state, unit.resume_at = "down", time.monotonic() + delay

    async def _start(self, unit: Unit) -> None:
        unit.state, unit.since = "starting", time.monotonic()
        if unit is self._engine:
            self._needs_standby = True
        try:
            self._deployment.start_children(unit.names)  # in the main thread: the kernel ends a child with the thread that started it
        except Exception as error:  # noqa: BLE001 - a shortage of descriptors, processes, memory or disk may pass
            await self._fail(unit, f"{unit.name} could not be started ({error})")

    def _handle_ready(self, unit: Unit) -> None:
        if unit in self._tokenizers:
            if self._resend_requests is not None:
                self._resend_requests(self._tokenizers.index(unit))
        elif all(other.state == "up" for other in self._path):
            self._client.resume_requests()


def _describe_start(unit: Unit, now: float) -> str:
    """The phases of an engine's start. Its imports may be older; the rest has them if not."""
    data = unit.children[0].start
    phases = {name: seconds for name, seconds in data.get("phases", {}).items() if name != "imports"}
    return describe_phases({**data, "phases": phases}, now - unit.since)

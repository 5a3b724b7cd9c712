"""The engine's loop: receive messages, schedule, launch, commit (vLLM: `EngineCore.run_busy_loop`).

There is one loop for all uses; uses differ by the objects given to it. With overlap, the step in
flight is committed after the next one was launched, otherwise at once. It must not know plugins,
sockets, tensors or text.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import msgspec

from frame.core.blame import explain
from frame.core.interfaces.runner import DeviceLost, ProfileError, ProfileRequest, UnsampledStep
from frame.core.messages import Abort, AbortAll, Control, ControlReply, Fatal, Finish, FinishReason, Generate, Heartbeat, StepTokens

if TYPE_CHECKING:
    import numpy as np

    from frame.core.interfaces.batch import ScheduledBatch, StepResult
    from frame.core.interfaces.runner import ModelRunner, PendingStep
    from frame.core.interfaces.sampling import Grammar
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.ipc.transport import Transport
    from frame.core.messages import AnyMessage, Message
    from frame.core.scheduling.kv_cache_manager import KVCacheManager
    from frame.core.scheduling.scheduler import FailedRequests, SchedulerConfig

log = logging.getLogger(__name__)

STALLED_WAIT = 0.005  # seconds between attempts while requests wait but none can run (paused, grammar compiling)
NUM_SHORT_WAITS = 100  # after a step, each a fifth of that: blocks of a peer arrive within 0.1 s
SELF_CHECK_DELAY = 0.2  # seconds of idleness before the self-check, so that it does not delay a request that follows at once
MIN_HEARTBEAT = 0.1  # seconds between two heartbeats of a busy engine
MAX_FAILURES = 3  # steps in a row that may fail before the device counts as lost; retries of their requests do not count


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the loop."""

    overlap: bool = False  # launch a step before the last one is committed
    check_integrity: Literal["off", "repair", "fatal"] = "fatal"  # what a failed self-check does
    heartbeat: float | None = None  # seconds between heartbeats; None: none are sent
    info: dict[str, Any] = field(default_factory=dict)  # added to the reply to `server_info`
    device_memory: Callable[[], int] = int  # -> bytes of device memory that this process holds
    expert_imbalance: Callable[[], list[float]] = list  # see `Heartbeat`
    adapters: AdapterCommands | None = None  # None: they are off
    make_states: Callable[[StateContext], EngineStates] | None = None  # None: it never stops
    check_params: Callable[[SamplingParams], Finish | None] | None = None  # -> how a request ends whose parameters a plugin refuses


@dataclass(frozen=True, slots=True)
class Observers:
    """Callables that are called with the keywords of the hooks of the same names; their results are
    ignored."""

    on_step: Callable[..., object] | None = None
    on_stop: Callable[..., object] | None = None


class EngineScheduler(Protocol):
    """A `Scheduler`, which documents these methods, or those of several attention groups as one."""

    config: SchedulerConfig

    @property
    def is_idle(self) -> bool: ...
    def add_request(self, message: Generate, grammar: Grammar | None = None, arrival: float | None = None) -> Finish | None: ...
    def abort(self, rids: Sequence[str], reason: FinishReason = "abort") -> None: ...
    def abort_all(self, reason: FinishReason = "abort") -> None: ...
    def drain_outputs(self) -> StepTokens | None: ...
    def close(self) -> None: ...
    def schedule_batch(self, now: float | None = None) -> ScheduledBatch | None: ...
    def poll_tiers(self, now: float) -> None: ...
    def fill_deferred_mask(self, batch: ScheduledBatch) -> np.ndarray | None: ...
    def commit(self, batch: ScheduledBatch, result: StepResult) -> StepTokens: ...
    def fail_step(self, batch: ScheduledBatch, error: str) -> FailedRequests: ...
    def publish_inflight(self, path: Path) -> None: ...
    def list_kv_managers(self) -> list[KVCacheManager]: ...
    def flush_cache(self) -> int: ...
    def end_session(self, tenant: str, session: str) -> bool: ...
    def preempt_all(self) -> int: ...
    def change_weights(self, *, keeps_running: bool) -> int: ...
    def admit_new_requests(self, allowed: bool) -> None: ...
    def count_started(self) -> int: ...
    def outline_cache(self, limit: int) -> dict[str, Any]: ...
    def outline_requests(self, limit: int) -> dict[str, Any]: ...
    def get_load(self) -> dict[str, Any]: ...
    def check_integrity(self) -> None: ...
    def audit_integrity(self) -> Iterator[None]: ...
    def repair_integrity(self) -> list[str]: ...


class GrammarQueue(Protocol):
    """Requests whose grammar is being compiled. `frame.structured_output.grammar_compiler`
    documents the methods."""

    on_loaded: Callable[[], None] | None

    def __len__(self) -> int: ...
    def hold_request(self, message: Generate) -> bool: ...
    def take_ready(self) -> list[tuple[Generate, Grammar | Finish, float]]: ...
    def abort_requests(self, rids: Sequence[str], reason: FinishReason) -> StepTokens | None: ...
    def abort_all(self, reason: FinishReason) -> StepTokens | None: ...
    def close(self) -> None: ...


class AdapterCommands(Protocol):
    """Loads and unloads of adapters. `frame.adapters.commands` documents the methods."""

    def __len__(self) -> int: ...
    def begin(self, control: Control) -> ControlReply | None: ...
    def take_replies(self) -> list[ControlReply]: ...


@dataclass(frozen=True, slots=True)
class StateContext:
    """What the states of an engine act on. `abort_all` ends all requests; `beat` is called while a
    command takes long."""

    scheduler: EngineScheduler
    runner: ModelRunner
    send: Callable[[Message], None]
    abort_all: Callable[[], object]
    beat: Callable[[], object]


class EngineStates(Protocol):
    """Whether steps are launched, and commands that wait until none is in flight.
    `frame.loading.engine_states` documents the methods."""

    @property
    def actions(self) -> tuple[str, ...]: ...
    @property
    def is_stopped(self) -> bool: ...
    @property
    def is_due(self) -> bool: ...
    def poll(self) -> bool: ...
    def begin(self, control: Control) -> ControlReply | None: ...
    def carry_out(self) -> None: ...
    def describe(self) -> dict[str, Any]: ...


class NoStates:
    """The states of an engine that never stops."""

    actions = ()
    is_stopped = is_due = False
    poll = bool

    def begin(self, control: Control) -> None: ...
    def carry_out(self) -> None: ...
    def describe(self) -> dict[str, Any]:
        return {}


class FailedStep:
    """A step whose launch raised. It fails when it is committed: steps are committed in order."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self) -> StepResult:
        raise self._error


class InFlight(NamedTuple):
    """A launched step. `started` in seconds of `time.perf_counter`."""

    batch: ScheduledBatch
    pending: PendingStep
    started: float


class Engine:
    """Owns the scheduler, the runner and the transport. One thread runs `run`."""

    def __init__(
        self,
        scheduler: EngineScheduler,
        runner: ModelRunner,
        transport: Transport,
        options: EngineOptions | None = None,
        observers: Observers | None = None,
        grammars: GrammarQueue | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.transport = transport
        self.options = options or EngineOptions()
        self.observers = observers or Observers()
        self.grammars = grammars
        self.adapters = self.options.adapters
        self._stopping = False
        self._is_checked = False  # no step has run since the last self-check
        self._num_stalls = 0  # attempts since the last step
        self._audit: Iterator[None] | None = None  # the self-check in progress
        self._failures = 0
        self._last_heartbeat = 0.0
        self._step = 0
        self.states: EngineStates = self._make_states()

    def _make_states(self) -> EngineStates:
        if self.options.make_states is None:
            return NoStates()
        beat = self._beat if self.options.heartbeat is not None else int
        return self.options.make_states(StateContext(self.scheduler, self.runner, self.transport.send, self._abort_all, beat))

    def run(self) -> None:
        """Serve until the command `shutdown`. An error that ends the engine is sent as `Fatal` and
        raised."""
        try:
            self._loop()
        except BaseException as error:
            self.transport.send(Fatal(process="engine", error=explain(error), trace=traceback.format_exc()))
            raise
        finally:
            if self.observers.on_stop is not None:
                self.observers.on_stop()
            if self.grammars is not None:
                self.grammars.close()
            self.scheduler.close()
            self.runner.close()

    def _loop(self) -> None:
        in_flight: InFlight | None = None
        progress = False
        while not self._stopping or in_flight is not None:
            is_waiting = self.states.poll()
            self._receive(0.0 if progress or in_flight else self._receive_timeout(is_waiting))
            is_changing = self.states.is_due or self.runner.can_switch_backend
            launched = None if is_changing else self._launch()
            progress = is_changing or launched is not None or in_flight is not None
            if in_flight is not None:
                self._commit(in_flight)
                self._num_stalls = 0
            if is_changing:
                if self.runner.can_switch_backend:
                    self.runner.switch_backend()
                self._audit, self._is_checked = None, False
                self.states.carry_out()
            if launched is not None and launched.batch.has_deferred_grammar_mask:
                launched = self._sample(launched)
            if launched is not None and not self.options.overlap:
                self._commit(launched)
                launched = None
            in_flight = launched
            self._send(self.scheduler.drain_outputs())

    def _receive_timeout(self, is_waiting: bool) -> float | None:
        """Seconds to wait for a message while no step is in flight and none could be launched."""
        if self.states.is_due:
            return 0.0
        if is_waiting or not self.scheduler.is_idle or self.grammars or self.adapters:
            self._num_stalls += 1
            return STALLED_WAIT if self._num_stalls > NUM_SHORT_WAITS else STALLED_WAIT / 5
        if not self._is_checked and self.options.check_integrity != "off":
            return SELF_CHECK_DELAY if self._audit is None else 0.0
        return self.options.heartbeat

    # messages -------------------------------------------------------------------------------------

    def _receive(self, timeout: float | None) -> None:
        messages = self.transport.receive(timeout)
        if self.options.heartbeat is not None:
            self._beat()
        for message in messages:
            try:
                self._handle(message)
            except Exception as error:
                log.exception("dropped a %s that could not be handled", type(message).__name__)
                if isinstance(message, Generate):
                    self._refuse(message, Finish("error", error=f"the request could not be started: {explain(error)}"))
        if self.grammars is not None:
            for request, grammar, arrival in self.grammars.take_ready():
                self._add(request, grammar, arrival)
        if self.adapters:
            for reply in self.adapters.take_replies():
                self.transport.send(reply)
        if not messages and (timeout != 0.0 or self._audit is not None) and not self._is_checked and self.scheduler.is_idle:
            self._run_self_check()

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, Generate):
            if (refusal := self._check_params(message)) is not None:
                self._refuse(message, refusal)
            elif self.grammars is None or not self.grammars.hold_request(message):
                self._add(message)
        elif isinstance(message, Abort):
            if self.grammars is not None:
                self._send(self.grammars.abort_requests(message.rids, message.reason))
            self.scheduler.abort(message.rids, message.reason)
        elif isinstance(message, AbortAll):
            self._abort_all(message.reason)
        elif isinstance(message, Control):
            if (reply := self._control(message)) is not None:
                self.transport.send(reply)
        else:
            log.warning("the engine does not take %s", type(message).__name__)

    def _abort_all(self, reason: FinishReason = "abort") -> None:
        if self.grammars is not None:
            self._send(self.grammars.abort_all(reason))
        self.scheduler.abort_all(reason)

    def _check_params(self, message: Generate) -> Finish | None:
        """How the request ends if a plugin refuses its parameters."""
        return None if self.options.check_params is None else self.options.check_params(message.params)

    def _add(self, message: Generate, grammar: Grammar | Finish | None = None, arrival: float | None = None) -> None:
        self._audit = None  # the scheduler's state changes: the self-check starts again later
        refusal = grammar if isinstance(grammar, Finish) else self.scheduler.add_request(message, grammar, arrival)
        if refusal is not None:
            self._refuse(message, refusal)

    def _refuse(self, message: Generate, refusal: Finish) -> None:
        self._send(StepTokens(rids=[message.rid], token_ids=[[]], finishes={0: refusal}))

    def _send(self, tokens: StepTokens | None) -> None:
        if tokens is not None and tokens.rids:
            self.transport.send(tokens)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat >= MIN_HEARTBEAT:
            self._last_heartbeat = now
            held, imbalance = self.options.device_memory(), self.options.expert_imbalance()
            load = self.scheduler.get_load()
            self.transport.send(Heartbeat(process="engine", step=self._step, device_memory=held, expert_imbalance=imbalance, **load))

    def _control(self, control: Control) -> ControlReply | None:
        """Carry out a command. -> the reply; None: it comes later."""
        data: dict[str, Any] = {}
        try:
            if control.action == "flush_cache":
                self._audit = None
                data = {"pages": self.scheduler.flush_cache()}
            elif control.action == "end_session":
                self._audit = None
                data = {"ended": int(self.scheduler.end_session(str(control.arguments["tenant"]), str(control.arguments["name"])))}
            elif control.action == "outline_cache":
                data = self.scheduler.outline_cache(int(control.arguments.get("limit", 200)))
            elif control.action == "outline_requests":
                data = self.scheduler.outline_requests(int(control.arguments.get("limit", 100)))
                data["phases"]["grammar"] += 0 if self.grammars is None else len(self.grammars)
            elif control.action == "server_info":
                data = {**self.options.info, **self.scheduler.get_load(), "step": self._step, **self.states.describe()}
            elif control.action in self.states.actions:
                return self.states.begin(control)
            elif control.action == "check_integrity":
                self.scheduler.check_integrity()
            elif control.action == "start_profile":
                data = {"path": self.runner.profile(msgspec.convert(control.arguments, ProfileRequest))}
            elif control.action == "stop_profile":
                data = {"path": self.runner.profile(None)}
            elif control.action == "shutdown":
                self._stopping = True
                self.scheduler.abort_all()
            elif control.action in ("load_adapter", "unload_adapter") and self.adapters is not None:
                return self.adapters.begin(control)
            elif control.action != "ping":  # a ping only gets a reply
                return ControlReply(id=control.id, ok=False, error=f"this engine has no command {control.action!r}")
        except ProfileError as error:
            return ControlReply(id=control.id, ok=False, error=str(error), code="conflict")
        except Exception as error:  # noqa: BLE001 - a failed command gets a reply and does not end the engine
            return ControlReply(id=control.id, ok=False, error=explain(error))
        return ControlReply(id=control.id, ok=True, data=data)

    def _run_self_check(self) -> None:
        """Run one part of the self-check, which runs once each time the engine becomes idle.
        Messages are handled between its parts."""
        if self.options.check_integrity == "off":
            self._is_checked = True
            return
        try:
            self._audit = self._audit or self.scheduler.audit_integrity()
            next(self._audit)
        except StopIteration:
            self._is_checked, self._audit = True, None
        except Exception as error:
            self._is_checked, self._audit = True, None
            if self.options.check_integrity == "fatal":
                raise
            for sentence in [explain(error), *self.scheduler.repair_integrity()]:
                log.error("self-check: %s", sentence)

    # steps ----------------------------------------------------------------------------------------

    def _launch(self) -> InFlight | None:
        if self.states.is_stopped or self._stopping:
            self.scheduler.poll_tiers(time.monotonic())
            return None
        batch = self.scheduler.schedule_batch(time.monotonic())
        if batch is None:
            return None
        self._is_checked = False
        self._step = batch.step
        started = time.perf_counter()
        try:
            return InFlight(batch, self.runner.launch(batch), started)
        except Exception as error:  # noqa: BLE001 - raised when the step is committed
            return InFlight(batch, FailedStep(error), started)

    def _sample(self, step: InFlight) -> InFlight:
        """Sample a step's tokens with its deferred grammar mask: the step before is committed, so
        its grammars have accepted their tokens. The device computes the logits meanwhile."""
        if isinstance(step.pending, UnsampledStep):
            try:
                step.pending.sample(self.scheduler.fill_deferred_mask(step.batch))
            except Exception as error:  # noqa: BLE001 - raised when the step is committed
                return step._replace(pending=FailedStep(error))
        return step

    def _commit(self, step: InFlight) -> None:
        try:
            result = step.pending.wait()
        except Exception as error:  # noqa: BLE001 - ends the request at fault only
            self._fail(step.batch, error)
            return
        self._failures = 0
        self._send(self.scheduler.commit(step.batch, result))
        if self.observers.on_step is not None:
            load = self.scheduler.get_load()
            self.observers.on_step(
                step=step.batch.step,
                num_running=load["running"],
                num_waiting=load["waiting"],
                num_tokens=int(step.batch.num_scheduled.sum()),
                seconds=time.perf_counter() - step.started,
            )

    def _fail(self, batch: ScheduledBatch, error: Exception) -> None:
        """End the request of a step that raised, or run each of its requests alone, and continue.
        Raises DeviceLost if the device is lost: its requests are not ended, so that they can be
        recovered in another engine."""
        if isinstance(error, DeviceLost):
            raise DeviceLost(f"the device is lost in step {batch.step}: {explain(error)}") from error
        failed = self.scheduler.fail_step(batch, f"the model failed on this request: {explain(error)}")
        ended, retried = (", ".join(rids) or "none" for rids in (failed.ended.rids, failed.retried))
        log.error("step %d failed: %s; it ends: %s; it runs again, alone: %s", batch.step, explain(error), ended, retried, exc_info=error)
        self._failures += failed.is_first
        self._send(failed.ended)
        if self._failures >= MAX_FAILURES:
            raise DeviceLost(f"the device is lost after {self._failures} failed step(s): {explain(error)}") from error

"""`EngineStates`: whether the engine launches steps, and what waits until no step is in flight:
pauses, updates of the weights, and releases of memory.

The engine's loop asks `is_stopped` before a launch, and calls `carry_out` where no step is in
flight. Must not know a device, a checkpoint or a client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from frame.core.interfaces.runner import MAX_SLEEP_LEVEL, MEMORY_TAGS, DeviceLost, MemoryOrder, PauseMode
from frame.core.messages import ControlReply, NewWeights

if TYPE_CHECKING:
    from frame.core.engine import StateContext
    from frame.core.messages import Control
    from frame.loading.weight_commands import WeightCommands

UPDATES = ("update_weights", "transfer_weights")
ACTIONS = ("pause", "resume", "sleep", "wake", *UPDATES)
MODES = get_args(PauseMode)
ASLEEP = "the memory of {} is released: wake the engine first (tags: {})"
NO_SLEEP = "this engine cannot release its memory"
OPEN_UPDATE = "a trainer updates the weights: end or cancel the update first"
DROPPED = "the weights were dropped while the engine slept: update them before it continues"


class EngineStates:
    """Paused or not, asleep or not, and the commands that wait for the quiescent point.

    weights: None: they do not change. sleep_obstacle: why this engine cannot release its memory;
    empty if it can.
    """

    actions = ACTIONS

    def __init__(self, context: StateContext, weights: WeightCommands | None = None, sleep_obstacle: str = NO_SLEEP) -> None:
        self._context = context
        self._weights = weights
        self._sleep_obstacle = sleep_obstacle
        self._waiting: list[Control] = []  # in order; a pause with "wait" is carried out when the running requests have ended
        self._paused: str | None = None  # the mode
        self._released: list[str] = []  # tags
        self._lacks_weights = False  # their memory was dropped, and no update has come
        self._is_held = False  # an update of several replicas is between its phases

    @property
    def is_stopped(self) -> bool:
        """Whether no step may be launched."""
        is_held = self._is_held or (self._weights is not None and self._weights.holds_steps)
        return bool(self._paused or self._released or self._lacks_weights or is_held)

    def poll(self) -> bool:
        """End an update whose trainer has gone, and reply to trainers that have been met. ->
        whether some are still awaited. Raises DeviceLost if the weights are a mixture."""
        if self._weights is None:
            return False
        self._weights.check_deadline()
        for reply in self._weights.take_replies(self._context.beat):
            self._context.send(reply)
        return self._weights.awaits_trainers

    @property
    def is_due(self) -> bool:
        """Whether a command can be carried out as soon as no step is in flight."""
        return bool(self._waiting) and not (self._waits_for_requests(self._waiting[0]) and self._context.scheduler.count_started())

    def describe(self) -> dict[str, Any]:
        """For `server_info`. `problem`: why requests cannot be served before a command comes."""
        problem = DROPPED if self._lacks_weights and "weights" not in self._released else ""
        return {"paused": self._paused is not None, "pause_mode": self._paused, "released": list(self._released), "problem": problem}

    def begin(self, control: Control) -> ControlReply | None:
        """Take a command of `ACTIONS`. -> the reply; None: it comes with `carry_out`."""
        if control.action == "resume":
            return self._resume(control)
        if control.action == "update_weights" and control.arguments.get("phase") in ("commit", "cancel"):
            self._is_held = False
            return ControlReply(id=control.id, ok=True)
        if (refusal := self._find_problem(control)) is not None:
            return refusal
        if control.action == "pause":
            self._stop_waiting("another pause was sent before the running requests had ended")
        self._waiting.append(control)
        if self._waits_for_requests(control):
            self._context.scheduler.admit_new_requests(False)
        return None

    def carry_out(self) -> None:
        """Carry out the commands that are due; no step is in flight. Raises DeviceLost where the
        ranks have become unequal."""
        while self.is_due:
            control = self._waiting.pop(0)
            reply = getattr(self, f"_carry_out_{control.action}")(control)
            if reply is not None:
                self._context.send(reply)

    # commands -------------------------------------------------------------------------------------

    def _resume(self, control: Control) -> ControlReply:
        # The pause of a restarted engine may wait for its first step's end.
        has_stopped = self._stop_waiting("generation was continued before the pause", all_pauses=True)
        if self._paused is None and not has_stopped:
            state = "the engine is asleep: wake it" if self._released else DROPPED if self._lacks_weights else ""
            return _refuse(control, state or "the engine is not paused: pause it first")
        self._paused = None
        return ControlReply(id=control.id, ok=True)

    def _find_problem(self, control: Control) -> ControlReply | None:
        """The reply to a command that has an invalid argument, or comes out of order."""
        mode, tags = control.arguments.get("mode", "keep"), control.arguments.get("tags") or list(MEMORY_TAGS)
        if control.action in ("pause", "sleep") and mode not in MODES:
            return _refuse(control, f"mode is {mode!r}; it may be {', '.join(MODES)}", "invalid")
        if unknown := [tag for tag in tags if tag not in MEMORY_TAGS]:
            return _refuse(control, f"tags has {unknown[0]!r}; it may have {', '.join(MEMORY_TAGS)}", "invalid")
        if control.action in UPDATES:
            return self._find_update_problem(control)
        if control.action == "sleep" and (refusal := self._find_sleep_problem(control, tags)) is not None:
            return refusal
        if control.action == "wake" and not (self._released and set(tags) & set(self._released)):
            state = f"only the memory of {' and '.join(self._released)} is released" if self._released else "the engine is not asleep"
            return _refuse(control, f"{state}: nothing to wake")
        if self._waits_for_requests(control) and self.is_stopped and self._context.scheduler.count_started():
            return _refuse(control, f"running requests cannot end while no step runs: use another mode, or {self._find_remedy()}")
        return None

    def _find_remedy(self) -> str:
        """The command after which steps run, or the first one of several."""
        if self._released:
            return f"wake the engine first (tags: {', '.join(self._released)})"
        return "update the weights first" if self._lacks_weights else "continue first"

    def _find_update_problem(self, control: Control) -> ControlReply | None:
        if self._weights is None:
            return _refuse(control, "this engine cannot update its weights")
        # Messages of trainers wait, and are refused when they are carried out: a second trainer
        # must not have those of the first refused.
        if control.action == "update_weights" and any(waiting.action in UPDATES for waiting in self._waiting):
            return _refuse(control, "another update of the weights waits; try again")
        if "weights" in self._released and control.arguments.get("step") != "cancel":
            return _refuse(control, ASLEEP.format("the weights", "weights"))
        if self._lacks_weights and control.arguments.get("partial"):
            return _refuse(control, f"{DROPPED}; partial is set, and all tensors are needed")
        return None

    def _find_sleep_problem(self, control: Control, tags: list[str]) -> ControlReply | None:
        level = control.arguments.get("level", 1)
        if level not in range(1, MAX_SLEEP_LEVEL + 1):
            return _refuse(control, f"level is {level!r}; it may be 1 to {MAX_SLEEP_LEVEL}", "invalid")
        if self._sleep_obstacle:
            return _refuse(control, self._sleep_obstacle)
        if asleep := [tag for tag in tags if tag in self._released]:
            return _refuse(control, f"the memory of {' and '.join(asleep)} is released already: wake the engine, or name other tags")
        return self._refuse_open_update(control, tags)

    def _refuse_open_update(self, control: Control, tags: list[str]) -> ControlReply | None:
        is_open = "weights" in tags and self._weights is not None and self._weights.is_open
        return _refuse(control, OPEN_UPDATE) if is_open else None

    @staticmethod
    def _waits_for_requests(control: Control) -> bool:
        return control.action in ("pause", "sleep") and control.arguments.get("mode") == "wait"

    def _stop_waiting(self, why: str, *, all_pauses: bool = False) -> bool:
        """Refuse what waits for running requests, and `all_pauses` that have not been carried out.
        -> whether there were any."""
        stopped = [each for each in self._waiting if self._waits_for_requests(each) or (all_pauses and each.action == "pause")]
        for control in stopped:
            self._waiting.remove(control)
            self._context.send(_refuse(control, why))
        self._context.scheduler.admit_new_requests(True)
        return bool(stopped)

    # at the quiescent point -----------------------------------------------------------------------

    def _stop_requests(self, control: Control, mode: str) -> int:
        """Do with the running requests what `mode` says. -> how many are computed anew."""
        scheduler, num_preempted = self._context.scheduler, 0
        scheduler.admit_new_requests(True)  # that no step is launched keeps them out
        if mode == "abort":
            self._context.abort_all()
        if mode == "retract":
            num_preempted = scheduler.preempt_all()
        elif control.arguments.get("clear_cache") and mode != "keep":
            scheduler.flush_cache()
        return num_preempted

    def _carry_out_pause(self, control: Control) -> ControlReply:
        mode = control.arguments.get("mode", "keep")
        num_preempted = self._stop_requests(control, mode)
        if error := self._context.runner.change_memory(MemoryOrder(), self._context.beat):
            raise DeviceLost(f"a rank did not stop: {error}")
        self._paused = mode
        return ControlReply(id=control.id, ok=True, data={"num_preempted": num_preempted})

    def _carry_out_sleep(self, control: Control) -> ControlReply:
        """Requests that are not aborted lose their KV, and are computed anew after the wake."""
        tags = control.arguments.get("tags") or list(MEMORY_TAGS)
        if (refusal := self._refuse_open_update(control, tags)) is not None:  # an update began meanwhile
            return refusal
        mode = control.arguments.get("mode", "keep")
        num_preempted = self._stop_requests(control, "retract" if mode == "keep" else mode)
        self._context.scheduler.flush_cache()
        drops = "weights" in tags and control.arguments.get("level", 1) > 1
        if error := self._context.runner.change_memory(MemoryOrder(released=tags, drops_weights=drops), self._context.beat):
            raise DeviceLost(f"the memory of {' and '.join(tags)} could not be released: {error}")
        self._released = [tag for tag in MEMORY_TAGS if tag in (*self._released, *tags)]
        self._lacks_weights = self._lacks_weights or drops
        return ControlReply(id=control.id, ok=True, data={"num_preempted": num_preempted, "released": self._released})

    def _carry_out_wake(self, control: Control) -> ControlReply:
        named = control.arguments.get("tags") or list(MEMORY_TAGS)
        tags = [tag for tag in self._released if tag in named]
        if error := self._context.runner.change_memory(MemoryOrder(mapped=tags), self._context.beat):
            raise DeviceLost(f"the memory of {' and '.join(tags)} could not be mapped: {error}")
        self._released = [tag for tag in self._released if tag not in tags]
        return ControlReply(id=control.id, ok=True, data={"released": self._released, "needs_weights": self._lacks_weights})

    def _carry_out_update_weights(self, control: Control) -> ControlReply | None:
        weights = self._weights
        if weights is None:
            raise RuntimeError("an update was taken by an engine without weight commands")
        phase = control.arguments.get("phase")
        reply = weights.update(control, lambda: self._clear(control), self._context.beat)
        if reply is None:  # it comes with `poll`
            return None
        if reply.ok and control.action == "update_weights":
            self._is_held = phase is not None
        if reply.ok and "weights_path" in reply.data:
            self._lacks_weights = False
            self._context.send(NewWeights(version=reply.data["weight_version"]))
        return reply

    _carry_out_transfer_weights = _carry_out_update_weights

    def _clear(self, control: Control) -> int:
        """Other weights come: let nothing that the old ones computed be read by later requests.
        Requests of a pause with "keep" go on with their old KV. -> how many are computed anew."""
        if control.arguments.get("abort"):
            self._context.abort_all()
        return self._context.scheduler.change_weights(keeps_running=self._paused == "keep")


def _refuse(control: Control, why: str, code: str = "conflict") -> ControlReply:
    return ControlReply(id=control.id, ok=False, error=why, code="invalid" if code == "invalid" else "conflict")

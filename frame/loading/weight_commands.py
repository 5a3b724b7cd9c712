"""Rank 0's side of updates of the weights: what the engine's loop does with the commands of
operators and trainers. Used by `Engine`.

Every order goes to all ranks, and the next one follows when all have replied. Between the first
tensor that is written and the commit, no step runs. An update that ends there ends the engine,
which starts again with the weights that it served, or holds its requests. Must not know tensors.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from frame.core.interfaces.runner import DeviceLost, ModelRunner, TransferOrder, WeightOrder
from frame.core.interfaces.weight_transfer import TRANSFER_DTYPES, TransferPart
from frame.core.messages import Control, ControlReply
from frame.interfaces.weight_transfer import WeightTransferCapabilities

log = logging.getLogger(__name__)

GRACE = 5.0  # seconds after `timeout` in which a rendezvous ends by itself
LOOK = 0.1  # seconds between two looks at a rendezvous
MAX_CHANNELS = 16  # a trainer of pipeline stages has one for each; nothing else closes those of killed trainers
MAX_TENSOR_BYTES = 1 << 40  # of a tensor of a part; torch reports a size that overflows without the name
JOINING = "the rendezvous with the trainer goes on"  # what a rank says of one that has not ended

Beat = Callable[[], object]
Clear = Callable[[], int]


class Refusal(Exception):  # noqa: N818 - it is no error of the engine
    """Why a command is not carried out. code: that of the reply."""

    def __init__(self, sentence: str, code: Literal["conflict", "invalid"] = "conflict") -> None:
        super().__init__(sentence)
        self.code = code


class TransferCommand(msgspec.Struct, frozen=True):
    """The arguments of the command `transfer_weights`."""

    step: str  # open, close, begin, part, commit, cancel
    kind: str = ""  # name of the plugin, of open, close and part
    name: str = ""  # the trainer's, of the channel
    info: dict[str, Any] = {}  # of open
    part: TransferPart | None = None
    update: str = ""  # the id that `begin` returned; "": the update in progress
    version: str | None = None  # of the weights; None: one is made up
    commit: bool | None = None  # of a part: the last one. False: commit once all tensors came. None: never
    partial: bool = False  # tensors may be missing
    abort: bool = False  # end all requests


@dataclass(slots=True)
class Update:
    """An update in progress."""

    id: str
    is_explicit: bool  # it was begun by a command, and ends by one
    deadline: float  # of `time.monotonic`
    names: set[str] = field(default_factory=set)
    is_written: bool = False
    num_preempted: int = 0
    began: float = field(default_factory=time.perf_counter)


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """obstacle: why this engine cannot update its weights; empty if it can. transfers: those of the
    configuration, by name. timeout: seconds between two commands of a trainer. find_copy: the
    folder of the last update's tensors. awaits: why the weights of the start must not be served."""

    obstacle: str = ""
    transfers: Mapping[str, WeightTransferCapabilities] = field(default_factory=dict)
    timeout: float = 120.0
    find_copy: Callable[[], Path | None] | None = None
    awaits: str = ""


class WeightCommands:
    """`info`: the engine's properties for clients, of which `weight_version` is kept up to date."""

    def __init__(self, runner: ModelRunner, info: dict[str, Any], settings: CommandSettings | None = None) -> None:
        self._runner = runner
        self._info = info
        self._settings = settings or CommandSettings()
        self._awaits = self._settings.awaits
        self._update: Update | None = None
        self._channels: dict[str, None] = {}  # the least recently used first
        self._joining: dict[str, tuple[str, float]] = {}  # channels whose trainer is awaited: the id of the command, and a deadline
        self._next_look = 0.0  # of `time.monotonic`
        self._replies: list[ControlReply] = []

    @property
    def awaits_trainers(self) -> bool:
        """Whether `take_replies` has replies to come."""
        return bool(self._joining or self._replies)

    @property
    def is_open(self) -> bool:
        """Whether a trainer has begun an update that has not ended."""
        return self._update is not None

    @property
    def holds_steps(self) -> bool:
        """Whether the weights are a mixture, or not those that are to be served."""
        return bool(self._awaits) or (self._update is not None and self._update.is_written)

    def check_deadline(self) -> None:
        """End an update whose trainer has gone. Raises DeviceLost if the weights are a mixture."""
        update = self._update
        if update is not None and time.monotonic() > update.deadline:
            self._end(f"no message of the trainer came for {self._settings.timeout:g} s", int)

    def take_replies(self, beat: Beat) -> list[ControlReply]:
        """The replies to commands whose trainer all ranks have met, or have not met in time. Steps
        may be in flight."""
        if self._joining and time.monotonic() >= self._next_look:
            for channel, (command, deadline) in list(self._joining.items()):
                error = self._order("await_join", beat, channel=channel)
                if JOINING in error and time.monotonic() > deadline:
                    what = f"the trainer did not form the group within {self._settings.timeout:g} s (execution.update_timeout)"
                    error = f"{what}; see whether it runs, and call init_weights_update_group again"
                if error and JOINING not in error:
                    self._close(channel, beat, error)  # some ranks may have joined
                elif not error:
                    del self._joining[channel]
                    self._channels[channel] = None
                    self._replies.append(ControlReply(id=command, ok=True))
            self._next_look = time.monotonic() + LOOK
        replies, self._replies = self._replies, []
        return replies

    def update(self, control: Control, clear: Clear, beat: Beat) -> ControlReply | None:
        """Carry out a command, when no step is in flight. clear: takes all requests off the device
        and empties the prefix cache -> the number of requests that are computed anew. -> the
        reply; None: it comes with `take_replies`. Raises DeviceLost if the weights are a
        mixture."""
        self.check_deadline()
        try:
            if self._settings.obstacle:
                raise Refusal(self._settings.obstacle)
            if control.action == "update_weights":
                data = self._load_folder(control, clear, beat)
            else:
                command = msgspec.convert(control.arguments, TransferCommand)
                data = self._transfer(command, clear, beat)
                if command.step == "open" and self._settings.transfers[command.kind].joins:
                    deadline = time.monotonic() + self._settings.timeout + GRACE
                    self._joining[f"{command.kind}/{command.name}"] = (control.id, deadline)
                    return None
        except Refusal as refusal:
            return ControlReply(id=control.id, ok=False, error=str(refusal), code=refusal.code)
        except msgspec.ValidationError as error:
            return ControlReply(id=control.id, ok=False, error=f"the command is malformed: {error}", code="invalid")
        return ControlReply(id=control.id, ok=True, data=data)

    # folders --------------------------------------------------------------------------------------

    def _load_folder(self, control: Control, clear: Clear, beat: Beat) -> dict[str, Any]:
        """Check and load the checkpoint `path` as `version`, or with the argument `phase` ("check",
        "load") do one of it."""
        folder, version = str(control.arguments["path"]), str(control.arguments["version"])
        phase = control.arguments.get("phase")
        if self._update is not None:
            raise Refusal("a trainer's update of the weights is in progress; commit or cancel it")
        began = time.perf_counter()
        if phase != "load" and (error := self._runner.update_weights(WeightOrder(folder, is_check=True), beat)):
            raise Refusal(error, "invalid")
        if phase == "check":
            return {}
        num_preempted = clear()
        if error := self._runner.update_weights(WeightOrder(folder), beat):
            raise DeviceLost(f"the update of the weights to {version!r} failed, and they are a mixture: {error}")
        return self._note_version(folder, version, num_preempted, began)

    def _note_version(self, folder: str | None, version: str, num_preempted: int, began: float) -> dict[str, Any]:
        self._info["weight_version"], self._awaits = version, ""
        log.info("weights updated to %r in %.1f s", version, time.perf_counter() - began)
        return {"weights_path": folder, "weight_version": version, "num_preempted": num_preempted}

    # tensors --------------------------------------------------------------------------------------

    def _transfer(self, command: TransferCommand, clear: Clear, beat: Beat) -> dict[str, Any]:
        if not self._settings.transfers:
            raise Refusal("this server takes no tensors; start it with --weight-transfer NAME")
        if command.partial and self._settings.find_copy is not None:
            raise Refusal("a partial update cannot be kept: send all tensors, or serve without --keep-updates")
        if command.step in ("open", "close", "part"):
            self._require_kind(command.kind)
        channel = f"{command.kind}/{command.name}"
        if command.step == "open":
            return self._open(channel, command, beat)
        if command.step == "close":
            if channel not in self._channels and channel not in self._joining:
                raise Refusal(f"there is no group {command.name[:200]!r}", "invalid")
            self._close(channel, beat)
            return {}
        if command.step == "begin":
            return {"update": self._begin(beat, is_explicit=True).id}
        if command.step == "part":
            return self._take_part(command, channel, clear, beat)
        update = self._find_update(command)
        if update is None:
            raise Refusal("no update of the weights is in progress; begin one")
        if command.step == "cancel":
            self._end("the trainer cancelled it", beat)
            return {}
        return self._commit(update, command, beat)

    def _require_kind(self, kind: str) -> None:
        if kind not in self._settings.transfers:
            served = ", ".join(self._settings.transfers)
            raise Refusal(f"this server takes tensors by {served}, not by {kind}; start it with --weight-transfer {kind}")

    def _open(self, channel: str, command: TransferCommand, beat: Beat) -> dict[str, Any]:
        """Open a channel; where trainers are met, begin to wait for this one."""
        if self._update is not None:
            raise Refusal("another trainer's update of the weights is in progress; wait for its end")
        joins = self._settings.transfers[command.kind].joins
        if channel in self._joining:
            self._close(channel, beat, "another request forms this group anew")
        self._make_room(channel, beat)
        if error := self._order("join" if joins else "open", beat, channel=channel, info=command.info):
            self._close(channel, beat)
            raise Refusal(error, "invalid")
        self._channels.pop(channel, None)  # until its trainer is met again
        if not joins:
            self._channels[channel] = None
        return {}

    def _make_room(self, channel: str, beat: Beat) -> None:
        """Close the least recently used channels, so that this one makes at most `MAX_CHANNELS`. No
        update is open."""
        others = [each for each in (*self._channels, *self._joining) if each != channel]
        for each in others[: max(0, len(others) - MAX_CHANNELS + 1)]:
            log.warning("the group %r is closed: %d newer ones were formed or used", each.partition("/")[2][:200], MAX_CHANNELS)
            self._close(each, beat, f"{MAX_CHANNELS} newer groups were formed meanwhile")

    def _close(self, channel: str, beat: Beat, why: str = "the group was closed before it was formed") -> None:
        """Leave a channel. why: for the command that waits for its trainer."""
        self._channels.pop(channel, None)
        if (awaited := self._joining.pop(channel, None)) is not None:
            self._replies.append(ControlReply(id=awaited[0], ok=False, error=why, code="invalid"))
        self._order("close", beat, channel=channel)

    def _begin(self, beat: Beat, *, is_explicit: bool) -> Update:
        if self._update is not None:
            raise Refusal("another update of the weights is in progress; commit or cancel it first")
        if error := self._order("begin", beat):
            raise Refusal(error, "invalid")
        self._update = Update(uuid.uuid4().hex, is_explicit, time.monotonic() + self._settings.timeout)
        return self._update

    def _find_update(self, command: TransferCommand) -> Update | None:
        update = self._update
        if command.update and (update is None or command.update != update.id):
            raise Refusal("this update of the weights has ended, or another one is in progress; begin a new one")
        return update

    def _take_part(self, command: TransferCommand, channel: str, clear: Clear, beat: Beat) -> dict[str, Any]:
        update = self._find_update(command)
        joins = self._settings.transfers[command.kind].joins
        try:
            part = require_part(command)
        except Refusal:
            if channel in self._channels:
                self._close(channel, beat)  # the trainer waits for receivers of tensors that cannot be received
            raise
        if joins and channel not in self._channels:
            raise Refusal(f"there is no group {command.name[:200]!r}; call init_weights_update_group first", "invalid")
        if not joins and channel not in self._channels:
            self._open_plain(channel, beat, update)
        self._channels[channel] = self._channels.pop(channel)
        if update is None:
            update = self._begin(beat, is_explicit=False)
        try:
            self._receive(update, command, channel, part, beat)
        except Refusal:
            if not update.is_explicit and not update.is_written:
                self._end("its first part was refused", beat)
            raise
        self._write(update, command, clear, beat)
        update.names.update(tensor.name for tensor in part.tensors)
        update.deadline = time.monotonic() + self._settings.timeout
        is_whole = command.commit is False and not update.is_explicit and not self._order("check_names", beat)
        return self._commit(update, command, beat) if command.commit or is_whole else {"update": update.id}

    def _open_plain(self, channel: str, beat: Beat, update: Update | None) -> None:
        """Open a channel that has no rendezvous."""
        if update is None:
            self._make_room(channel, beat)
        if error := self._order("open", beat, channel=channel):
            raise Refusal(error, "invalid")
        self._channels[channel] = None

    def _receive(self, update: Update, command: TransferCommand, channel: str, part: TransferPart, beat: Beat) -> None:
        """Check a part and receive its tensors. Raises Refusal; nothing is written then."""
        joins = self._settings.transfers[command.kind].joins
        again = next((tensor.name for tensor in part.tensors if tensor.name in update.names), None)
        problem = Refusal(f"{again} came already in this update; another trainer may be sending it") if again else None
        if problem is None:
            last = {"is_last": bool(command.commit), "is_partial": command.partial}
            if error := self._order("check", beat, part=part, **last):
                problem = Refusal(error, "invalid")
        if problem is not None and not joins:
            raise problem
        if error := self._order("receive", beat, channel=channel, part=part):  # also what is refused, so that the trainer does not wait
            if joins:
                self._close(channel, beat)  # some ranks may have left it
            problem = problem or Refusal(error, "invalid")
        if problem is not None:
            self._order("drop", beat)
            raise problem

    def _write(self, update: Update, command: TransferCommand, clear: Clear, beat: Beat) -> None:
        if not update.is_written or command.abort:
            update.num_preempted += clear()
            update.is_written = True
        if error := self._order("load", beat):
            raise DeviceLost(f"an update of the weights failed, and they are a mixture: {error}")

    def _commit(self, update: Update, command: TransferCommand, beat: Beat) -> dict[str, Any]:
        if command.partial and self._awaits:
            raise Refusal(f"a whole update is needed: {self._awaits}")
        if error := self._order("check_names", beat, is_partial=command.partial):
            raise Refusal(f"{error}; send them, or cancel the update", "invalid")
        self._update = None
        if error := self._order("commit", beat):
            raise DeviceLost(f"an update of the weights failed, and they are a mixture: {error}")
        copy = None if self._settings.find_copy is None else self._settings.find_copy()
        version = command.version or f"update-{update.id[:8]}"
        return self._note_version(None if copy is None else str(copy), version, update.num_preempted, update.began)

    def _end(self, why: str, beat: Beat) -> None:
        """End the update: the old weights stay. Raises DeviceLost where they are a mixture, unless
        the engine awaits weights anyway."""
        update, self._update = self._update, None
        self._order("cancel", beat)
        log.warning("an update of the weights ended without a commit: %s", why)
        if update is not None and update.is_written and not self._awaits:
            raise DeviceLost(f"an update of the weights ended before it was complete, and they are a mixture: {why}")

    def _order(self, action: Any, beat: Beat, **values: Any) -> str:
        """Have all ranks carry out an order. -> the error of one that has not."""
        return self._runner.update_weights(TransferOrder(action, **values), beat)


def require_part(command: TransferCommand) -> TransferPart:
    """The part, with types that are known and names that are different. Raises Refusal."""
    part, names = command.part, set[str]()
    if part is None or not part.tensors:
        raise Refusal("the part names no tensors", "invalid")
    for tensor in part.tensors:
        if tensor.dtype not in TRANSFER_DTYPES:
            raise Refusal(f"{tensor.name} has the dtype {tensor.dtype[:50]!r}; the dtypes are {', '.join(TRANSFER_DTYPES)}", "invalid")
        if any(size < 0 for size in tensor.shape):
            raise Refusal(f"{tensor.name} has the shape {list(tensor.shape)}, with a negative size", "invalid")
        if (size := math.prod(max(1, each) for each in tensor.shape) * TRANSFER_DTYPES[tensor.dtype]) > MAX_TENSOR_BYTES:
            sentence = f"{tensor.name} has the shape {list(tensor.shape)[:8]}, of {size} bytes; a tensor may have {MAX_TENSOR_BYTES}"
            raise Refusal(sentence, "invalid")
        if tensor.name in names:
            raise Refusal(f"the part names {tensor.name} twice", "invalid")
        names.add(tensor.name)
    return part


def list_transfers(capabilities: Sequence[tuple[str, Any]]) -> dict[str, WeightTransferCapabilities]:
    """Those of the chosen plugins, by name."""
    return {name: can for name, can in capabilities if isinstance(can, WeightTransferCapabilities)}

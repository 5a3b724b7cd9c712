"""`EngineCommands`: control commands to the engine that await a reply, and the state that a
restarted engine gets again. Used by `EngineClient`. Must not know a request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from frame.config.resolved import LOST_WEIGHTS
from frame.core.interfaces.runner import MEMORY_TAGS
from frame.core.messages import Control, ControlReply, Message
from frame.entrypoints.engine_client.limits import EngineDeadError

CONTROL_TIMEOUT = 30.0  # seconds
# Seconds, for commands that read large files, or may wait for running requests
TIMEOUTS = {"load_adapter": 300.0} | dict.fromkeys(("update_weights", "transfer_weights", "pause", "sleep", "wake"), 900.0)
STATES = ("pause", "resume", "sleep", "wake")
LACKS_WEIGHTS = "the engine dropped its weights while it slept: update them"


class EngineCommands:
    """Not thread-safe: every method runs in the event loop's thread."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[ControlReply]] = {}  # by id of the command
        self._changes: dict[str, Control] = {}  # by id: commands that change the state, until the reply, which may come late
        self.is_paused = False
        self.released: list[str] = []  # tags of the memory that is released while the engine sleeps
        self.lacks_weights = False  # they were dropped, and no update has come
        self.weight_version = "default"  # the name of the weights that the engine serves
        self.on_weights: Callable[[str | None, str], None] | None = None  # gets the folder, if any, and the version that is served now
        self.lost_weights: str | None = None  # why the engine holds its requests until the next update; None: it does not
        self._is_kept = True  # a restarted engine loads the weights that were served

    async def send_command(self, action: Any, arguments: dict[str, Any]) -> ControlReply:
        """Send one command and return its reply. Raises EngineDeadError, TimeoutError."""
        control = Control(id=uuid.uuid4().hex, action=action, arguments=arguments)
        future = self._waiting[control.id] = asyncio.get_running_loop().create_future()
        if action in STATES:
            self._changes[control.id] = control
        self._send(control)
        try:
            return await asyncio.wait_for(future, seconds := TIMEOUTS.get(action, CONTROL_TIMEOUT))
        except TimeoutError:
            raise TimeoutError(f"the engine did not answer {action} within {seconds:g} s; it may still do it") from None
        finally:
            self._waiting.pop(control.id, None)

    def _note_state(self, control: Control, reply: ControlReply) -> None:
        action, arguments = control.action, control.arguments
        if action in ("pause", "resume"):
            self.is_paused = action == "pause"
        else:
            self.released = reply.data.get("released", [])
            is_named = "weights" in (arguments.get("tags") or MEMORY_TAGS)
            is_dropped = action == "sleep" and arguments.get("level", 1) > 1 and is_named
            self.lacks_weights = self.lacks_weights or is_dropped

    @property
    def sleep_problem(self) -> str | None:
        """Why requests cannot run before an operator's command; None while they can."""
        if self.released:
            return f"the engine sleeps: the memory of {' and '.join(self.released)} is released; wake it"
        return LACKS_WEIGHTS if self.lacks_weights else None

    def receive_reply(self, reply: ControlReply) -> None:
        if reply.ok and "weights_path" in reply.data:  # also after the time of the wait
            self.lacks_weights, self.lost_weights = False, None
            self.set_weights(reply.data["weights_path"], reply.data["weight_version"])
        control = self._changes.pop(reply.id, None)
        if control is not None and reply.ok:
            self._note_state(control, reply)
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def set_weights(self, folder: str | None, version: str) -> None:
        """The engine, or the one that is started next, has these weights. folder: None: nothing
        keeps them."""
        self.weight_version, self._is_kept = version, folder is not None
        if self.on_weights is not None:
            self.on_weights(folder, version)

    def fail_pending(self, error: str) -> None:
        """End all commands that await a reply with EngineDeadError."""
        self._changes.clear()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDeadError(error))

    def restore_state(self) -> None:
        """Bring a restarted engine, which has read its weights, into the state of the one before
        it: paused, asleep. Note that it waits for weights that a trainer sent."""
        if not self._is_kept:
            self.lost_weights = LOST_WEIGHTS.format(self.weight_version)
        if self.is_paused:
            self._send(Control(id=uuid.uuid4().hex, action="pause"))
        if self.released:
            arguments = {"tags": self.released, "level": 2 if self.lacks_weights else 1}
            self._send(Control(id=uuid.uuid4().hex, action="sleep", arguments=arguments))
        self.lacks_weights = self.lacks_weights and "weights" in self.released

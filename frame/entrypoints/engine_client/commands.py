"""`EngineCommands`: control commands to the engine that await a reply, and the state that a
restarted engine gets again. Used by `EngineClient`. Must not know a request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from frame.core.messages import Control, ControlReply, Message
from frame.entrypoints.engine_client.limits import EngineDeadError

CONTROL_TIMEOUT = 30.0  # seconds
TIMEOUTS = {"load_adapter": 300.0}  # seconds, for commands that read large files


class EngineCommands:
    """Not thread-safe: every method runs in the event loop's thread."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[ControlReply]] = {}  # by id of the command
        self._is_paused = False

    async def send_command(self, action: Any, arguments: dict[str, Any]) -> ControlReply:
        """Send one command and return its reply. Raises EngineDeadError, TimeoutError."""
        control = Control(id=uuid.uuid4().hex, action=action, arguments=arguments)
        future = self._waiting[control.id] = asyncio.get_running_loop().create_future()
        self._send(control)
        try:
            reply = await asyncio.wait_for(future, seconds := TIMEOUTS.get(action, CONTROL_TIMEOUT))
        except TimeoutError:
            raise TimeoutError(f"the engine did not answer {action} within {seconds:g} s; it may still do it") from None
        finally:
            self._waiting.pop(control.id, None)
        if reply.ok and action in ("pause", "resume"):
            self._is_paused = action == "pause"
        return reply

    def receive_reply(self, reply: ControlReply) -> None:
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def fail_pending(self, error: str) -> None:
        """End all commands that await a reply with EngineDeadError."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDeadError(error))

    def restore_state(self) -> None:
        """Pause a restarted engine when the one before it was paused."""
        if self._is_paused:
            self._send(Control(id=uuid.uuid4().hex, action="pause"))

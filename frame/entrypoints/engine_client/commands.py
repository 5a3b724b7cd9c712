"""`Controls`: commands to the engine that wait for their answers, and what a new engine has to be told again. Knows no request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import Any

from frame.core.messages import Control, ControlReply, Message
from frame.entrypoints.engine_client.limits import EngineDeadError

CONTROL_TIMEOUT = 30.0  # seconds


class Controls:
    """Belongs to the event loop's thread."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._waiting: dict[str, asyncio.Future[ControlReply]] = {}
        self._is_paused = False

    async def ask(self, action: Any, arguments: dict[str, Any]) -> ControlReply:
        """One command and its answer. Raises EngineDeadError, TimeoutError."""
        control = Control(id=uuid.uuid4().hex, action=action, arguments=arguments)
        future = self._waiting[control.id] = asyncio.get_running_loop().create_future()
        self._send(control)
        try:
            reply = await asyncio.wait_for(future, CONTROL_TIMEOUT)
        finally:
            self._waiting.pop(control.id, None)
        if reply.ok and action in ("pause", "resume"):
            self._is_paused = action == "pause"
        return reply

    def take(self, reply: ControlReply) -> None:
        future = self._waiting.get(reply.id)
        if future is not None and not future.done():
            future.set_result(reply)

    def refuse(self, error: str) -> None:
        """Nobody will answer those that wait."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDeadError(error))

    def repeat(self) -> None:
        """Tell a new engine what the old one was told to stay."""
        if self._is_paused:
            self._send(Control(id=uuid.uuid4().hex, action="pause"))

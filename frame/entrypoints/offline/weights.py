"""`OfflineWeights`: updates of an offline engine's weights, pauses and sleeps. The base class of
`Engine`. Must not know a model."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from frame.checkpoint.model_config import find_model
from frame.core.interfaces.runner import MEMORY_TAGS, PauseMode
from frame.core.messages import Control
from frame.entrypoints.offline.prompts import EngineError

if TYPE_CHECKING:
    from frame.core.messages import ControlReply
    from frame.entrypoints.configuration.prepare import Prepared
    from frame.entrypoints.offline.session import Session


class StateMethods(ABC):
    """The methods of `Engine` that stop it and start it again. Other threads' calls wait meanwhile;
    an engine that is restarted after a crash is paused and asleep as the one before it."""

    _is_paused = False
    _released: Sequence[str] = ()
    _level = 1  # of the release of the weights

    @abstractmethod
    def control(self, action: Any, **arguments: Any) -> dict[str, Any]:
        """See `Engine.control`."""

    def pause(self, mode: PauseMode = "keep") -> None:
        """Run no more steps. Running requests end ("abort"), are waited for ("wait"), or go on
        later, with their KV ("keep") or computed anew ("retract"). Raises EngineError."""
        self.control("pause", mode=mode)

    def resume(self) -> None:
        """Continue after a pause. Raises EngineError."""
        self.control("resume")

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None) -> None:
        """Release memory: of "weights" and "kv_cache", or of one of these `tags`. Level 1 keeps
        weights in host memory, level 2 drops them: they have to be updated after the wake. Running
        requests are computed anew. Raises EngineError."""
        self.control("sleep", level=level, tags=None if tags is None else list(tags))

    def wake(self, tags: Sequence[str] | None = None) -> None:
        """Map released memory again. Raises EngineError."""
        self.control("wake", tags=None if tags is None else list(tags))

    def _note_state(self, action: str, arguments: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        if action in ("pause", "resume"):
            self._is_paused = action == "pause"
        elif action in ("sleep", "wake"):
            self._released = data["released"]
            if action == "sleep" and "weights" in (arguments.get("tags") or MEMORY_TAGS):
                self._level = arguments.get("level", 1)
        return data

    def _restore_state(self, session: Session) -> Session:
        """Bring a new session's engine into the state of the one before it."""
        if self._is_paused:
            session.send_all([Control(id=uuid.uuid4().hex, action="pause")])
        if self._released:
            arguments = {"tags": list(self._released), "level": self._level}
            session.send_all([Control(id=uuid.uuid4().hex, action="sleep", arguments=arguments)])
        return session


class OfflineWeights(StateMethods):
    """An engine's commands for weights."""

    _prepared: Prepared  # what a restarted engine is built from
    _lost_weights: str = ""  # why the engine, which was restarted, must not generate

    def _send(self, action: Any, **arguments: Any) -> ControlReply:
        raise NotImplementedError

    @property
    def world_size(self) -> int:
        """The number of the engine's ranks."""
        return self._prepared.resolved.plan.num_ranks

    def update_weights(self, path: str | Path, version: str | None = None) -> None:
        """Replace the weights by a checkpoint's. `version`: by default the folder's name. Raises
        EngineError."""
        folder = find_model(str(path))
        self._note_weights(self._send("update_weights", path=str(folder), version=folder.name if version is None else version))

    def transfer_weights(self, step: str, **arguments: Any) -> dict[str, Any]:
        """One step of an update by tensors, as the route `/transfer_weights`.
        `frame.rl.WeightClient` calls it. Raises EngineError."""
        return self._note_weights(self._send("transfer_weights", step=step, **msgspec.to_builtins(arguments)))

    def _note_weights(self, reply: ControlReply) -> dict[str, Any]:
        if not reply.ok:
            raise EngineError(reply.error or "the update of the weights failed")
        if "weights_path" in reply.data:
            resolved = self._prepared.resolved.with_weights(reply.data["weights_path"], reply.data["weight_version"])
            self._prepared, self._lost_weights = replace(self._prepared, resolved=resolved), ""
        return reply.data

    def _note_restart(self) -> None:
        """The engine is started again: it may have lost its weights."""
        self._lost_weights = self._prepared.resolved.awaits_weights

    def _require_weights(self) -> None:
        if self._lost_weights:
            raise EngineError(self._lost_weights)

"""All hooks. pluggy calls them at start-up or once per step, never inside a forward pass.

`register_<plural>(registry)` adds records; there is one for each row of
`frame.interfaces.kinds`. `on_<event>(…)` observes; its result is ignored. A hook may take a
subset of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from frame.interfaces.kinds import KINDS, Kind
from frame.registration import KindRegistry, hookspec


def _make_register_hook(kind: Kind) -> Callable[[KindRegistry], None]:
    def register(registry: KindRegistry) -> None: ...

    register.__name__ = register.__qualname__ = kind.hook
    register.__doc__ = f"Add {kind.summary} (`{kind.api}`, {kind.interface_path.replace(':', '.')})."
    return hookspec(register)


REGISTER_HOOKS = {kind.hook: _make_register_hook(kind) for kind in KINDS.values()}
globals().update(REGISTER_HOOKS)  # pluggy reads the specifications from this module's names


@hookspec
def on_start(resolved: Any) -> None:
    """The engine's process has loaded its plugins and is about to serve. An error stops the
    start."""


@hookspec
def on_step(step: int, num_running: int, num_waiting: int, num_tokens: int, seconds: float) -> None:
    """The engine finished a step."""


@hookspec
def on_request_finished(rid: str, reason: str, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
    """A request left the engine."""


@hookspec
def on_stop() -> None:
    """The process stops."""

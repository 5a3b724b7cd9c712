"""A launcher as a package would bring one: ranks meet by TCP, with the devices in reverse order.

The mutants of the suite derive from it, and tests serve with it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from frame import hookimpl
from frame.host.child_process import start_process
from frame.interfaces.launcher import Launcher, LauncherCapabilities, LauncherContext, Placement, RankPlace, RankProcess

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.registration import KindRegistry

HOST = "127.0.0.1"


class ReversedLauncher(Launcher):
    """Starts the ranks on this host."""

    def __init__(self, context: LauncherContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.started: list[RankProcess] = []

    def place(self) -> Placement:
        size = self.context.size
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        return Placement(tuple(RankPlace(rank, HOST, size - 1 - rank) for rank in range(size)), f"tcp://{HOST}:{port}")

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        process = start_process(command, environment, pipes_errors=pipes_errors)
        self.started.append(process)
        return process

    def close(self) -> None:
        self.started.clear()


@hookimpl
def register_launchers(registry: KindRegistry) -> None:
    """Add the launcher."""
    registry.add("reversed", ReversedLauncher, capabilities=LauncherCapabilities(), summary="Devices in reverse order, for tests.")

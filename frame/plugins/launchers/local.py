"""The launcher `local`: ranks are processes of this host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frame.host.child_process import start_process
from frame.interfaces.launcher import Launcher, Placement, RankPlace, RankProcess

LOOPBACK = "127.0.0.1"


class LocalLauncher(Launcher):
    """Rank r has device r. The ranks meet in a file of the engine's folder."""

    def place(self) -> Placement:
        meeting = self.context.folder / "ranks"
        for left_over in self.context.folder.glob(f"{meeting.name}*"):  # one file a group
            left_over.unlink(missing_ok=True)
        places = tuple(RankPlace(rank, LOOPBACK, rank) for rank in range(self.context.size))
        return Placement(places, f"file://{meeting}")

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        take = self.context.take_early
        early = None if take is None else take(command, environment, pipes_errors)
        return early or start_process(command, environment, pipes_errors=pipes_errors)

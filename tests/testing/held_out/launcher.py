"""Launchers: processes of this host, and launchers with a bug each."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel

from frame.host.child_process import start_process
from frame.interfaces.launcher import Launcher, LauncherCapabilities, LauncherContext, Placement, RankPlace, RankProcess
from tests.testing.held_out import Wrong


class ThisHost(Launcher):
    """Rank r has device r. The meeting file has a new name at each start."""

    capabilities: ClassVar[LauncherCapabilities] = LauncherCapabilities()

    def place(self) -> Placement:
        ranks = tuple(RankPlace(rank, "127.0.0.1", self.find_device(rank)) for rank in range(self.context.size))
        return Placement(ranks, f"file://{self.context.folder / self.name_meeting()}")

    def find_device(self, rank: int) -> int:
        return rank

    def name_meeting(self) -> str:
        return f"meeting-{uuid.uuid4().hex[:12]}"

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return start_process(command, environment, pipes_errors=pipes_errors)


TWIN = ThisHost
WRONG = Wrong()


@WRONG.add("After a crash the new ranks meet left-overs of the old ones, and hang: the meeting file is the same at each start.")
class SameMeeting(ThisHost):
    def name_meeting(self) -> str:
        return "meeting"


@WRONG.add("Two engines of one process meet each other: the number of a meeting is counted by the object, from 0 in a folder of all.")
class CountsMeetings(ThisHost):
    def __init__(self, context: LauncherContext, options: BaseModel | None = None) -> None:
        super().__init__(replace(context, folder=context.folder.parent), options)
        self.numbers = itertools.count()

    def name_meeting(self) -> str:
        return f"meeting-{next(self.numbers)}"


@WRONG.add("Variables that the operator set, such as proxies and caches, are missing in ranks: the environment is replaced.")
class ReplacesEnvironment(ThisHost):
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        return subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE if pipes_errors else None, env={**kept, **environment},
        )  # fmt: skip


@WRONG.add("Settings of a rank do not arrive: its variables do not take the place of inherited ones.")
class InheritsFirst(ThisHost):
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        missing = {name: text for name, text in environment.items() if name not in os.environ}
        return start_process(command, missing, pipes_errors=pipes_errors)


@WRONG.add("The reason of a failed start is not in the error: errors are never piped.")
class NeverPipes(ThisHost):
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return start_process(command, environment, pipes_errors=False)


@WRONG.add("Ranks hang after they have written some errors: these are always piped, and are not read.")
class AlwaysPipes(ThisHost):
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return start_process(command, environment, pipes_errors=True)


@WRONG.add("On hosts with more than eight devices two ranks share one, and memory runs out: devices are counted modulo eight.")
class EightDevices(ThisHost):
    def find_device(self, rank: int) -> int:
        return rank % 8


@WRONG.add("Arguments with spaces or quotes reach a rank in pieces: the command is run by a shell.")
class JoinsCommand(ThisHost):
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        line = " ".join(command)
        return start_process(["sh", "-c", f'exec {line} "$@"', "sh"], environment, pipes_errors=pipes_errors)


class Unsigned:
    """A process whose exit codes are those of a shell."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.pid, self.stdin, self.stderr = process.pid, process.stdin, process.stderr

    def poll(self) -> int | None:
        code = self.process.poll()
        return code if code is None else code & 0xFF

    def wait(self, timeout: float | None = None) -> int:
        return int(self.process.wait(timeout)) & 0xFF

    def send_signal(self, sig: int) -> None:
        self.process.send_signal(sig)

    def kill(self) -> None:
        self.process.kill()


@WRONG.add("A rank that was killed for its memory is reported as one with an unknown exit code: codes of signals are made positive.")
class HidesSignals(ThisHost):
    def start(self, *arguments: Any, **options: Any) -> RankProcess:
        return Unsigned(super().start(*arguments, **options))


class Slow(Unsigned):
    def poll(self) -> int | None:
        try:
            return int(self.process.wait(0.3))
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        return int(self.process.wait(timeout))


@WRONG.add("The server's event loop stands still at each check of its ranks: `poll` waits a while for the end.")
class PollsSlowly(ThisHost):
    def start(self, *arguments: Any, **options: Any) -> RankProcess:
        return Slow(super().start(*arguments, **options))


class Patient(Slow):
    def poll(self) -> int | None:
        code = self.process.poll()
        return None if code is None else int(code)

    def wait(self, timeout: float | None = None) -> int:
        return int(self.process.wait())


@WRONG.add("A stop hangs on a rank that does not end: `wait` ignores its timeout.")
class WaitsForever(ThisHost):
    def start(self, *arguments: Any, **options: Any) -> RankProcess:
        return Patient(super().start(*arguments, **options))


@WRONG.add("A missing program is a rank that ended, and is started again for ever: the error of the start is hidden.")
class HidesFailure(ThisHost):
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        try:
            return super().start(place, command, environment, pipes_errors=pipes_errors)
        except OSError:
            return super().start(place, [sys.executable, "-c", "raise SystemExit(1)"], environment, pipes_errors=pipes_errors)


@WRONG.add("Ctrl-C in the terminal ends ranks before they have finished their requests: signals are not blocked in them.")
class LeavesSignals(ThisHost):
    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return subprocess.Popen(
            [*command, "--parent", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE if pipes_errors else None,
            env={**os.environ, **environment},
        )  # fmt: skip


class Deaf(Patient):
    def wait(self, timeout: float | None = None) -> int:
        return int(self.process.wait(timeout))

    def send_signal(self, sig: int) -> None:
        self.process.terminate()


@WRONG.add("Asking for the stacks of a rank ends it: every signal is sent as SIGTERM.")
class SendsTerm(ThisHost):
    def start(self, *arguments: Any, **options: Any) -> RankProcess:
        return Deaf(super().start(*arguments, **options))


@WRONG.add("After some hundred starts the server has no descriptors left: each opens a log and keeps it.")
class KeepsLogs(ThisHost):
    def __init__(self, context: LauncherContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.logs: list[int] = []

    def start(self, *arguments: Any, **options: Any) -> RankProcess:
        self.logs.append(os.open(self.context.folder / "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        return super().start(*arguments, **options)

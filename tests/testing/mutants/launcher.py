"""Mutants of `launcher/1`. The reference starts processes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from frame.host.child_process import PARENTS_SIGNALS, start_process
from frame.interfaces.launcher import LauncherCapabilities, Placement, RankPlace, RankProcess
from tests.plugins.fake_launcher import ReversedLauncher
from tests.testing.mutants import MutantList

mutant = MUTANTS = MutantList("launcher", reference=ReversedLauncher, capabilities=LauncherCapabilities())


@mutant
class IgnoresSignals(ReversedLauncher):
    """Ranks ignore SIGTERM, as the caller did at their start."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            return super().start(place, command, environment, pipes_errors=pipes_errors)
        finally:
            signal.signal(signal.SIGTERM, before)


@mutant
class OpensFilesToAll(ReversedLauncher):
    """Ranks write files that every user may change."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        before = os.umask(0)
        try:
            return super().start(place, command, environment, pipes_errors=pipes_errors)
        finally:
            os.umask(before)


@mutant
class AddsToTheVariables(ReversedLauncher):
    """Adds the rank to the variables that it was called with."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        if isinstance(environment, dict):
            environment["FRAME_RANK"] = str(place.local_index)
        return super().start(place, command, environment, pipes_errors=pipes_errors)


@mutant
class ForgetsARank(ReversedLauncher):
    """place leaves out the last rank."""

    def place(self) -> Placement:
        found = super().place()
        return replace(found, ranks=found.ranks[:-1])


@mutant
class ListsRanksByDevice(ReversedLauncher):
    """place returns the ranks in the order of their devices."""

    def place(self) -> Placement:
        found = super().place()
        return replace(found, ranks=found.ranks[::-1])


@mutant
class SharesADevice(ReversedLauncher):
    """All ranks of a host have device 0."""

    def place(self) -> Placement:
        found = super().place()
        return replace(found, ranks=tuple(replace(place, local_index=0) for place in found.ranks))


@mutant
class MeetsNowhere(ReversedLauncher):
    """The rendezvous has no port."""

    def place(self) -> Placement:
        return replace(super().place(), rendezvous="tcp://127.0.0.1")


@mutant
class MeetsElsewhere(ReversedLauncher):
    """The rendezvous is on another host than rank 0."""

    def place(self) -> Placement:
        return replace(super().place(), rendezvous="tcp://127.0.0.2:29500")


@mutant
class KeepsTheRendezvous(ReversedLauncher):
    """The rendezvous file of the previous start stays."""

    def place(self) -> Placement:
        return replace(super().place(), rendezvous=f"file://{self.context.folder / 'ranks'}")


@mutant
class DropsTheEnvironment(ReversedLauncher):
    """start ignores the environment of the rank."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return super().start(place, command, {}, pipes_errors=pipes_errors)


@mutant
class SetsItsOwnEnvironment(ReversedLauncher):
    """start sets the rank's variables in this process."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        os.environ.update(environment)
        return super().start(place, command, environment, pipes_errors=pipes_errors)


@mutant
class DropsErrors(ReversedLauncher):
    """start gives no pipe of standard error, so the log of a rank is lost."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return super().start(place, command, environment, pipes_errors=False)


@mutant
class LetsSignalsThrough(ReversedLauncher):
    """start blocks no signals, so that Ctrl-C ends the ranks before the server has answered."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment})


@mutant
class ClosesInput(ReversedLauncher):
    """start gives the rank no input, so it has no configuration."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **environment})


@mutant
class HidesExitCodes(ReversedLauncher):
    """A wrapper around the command ends with 0, whatever the rank's exit code is."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        wrapped = [sys.executable, "-c", "import subprocess, sys; subprocess.call(sys.argv[1:])", *command]
        return start_process(wrapped, environment, pipes_errors=pipes_errors)


@mutant
class StartsOnce(ReversedLauncher):
    """Returns the first rank's process for every rank."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        if self.started and self.started[0].poll() is None:
            return self.started[0]
        return super().start(place, command, environment, pipes_errors=pipes_errors)


@mutant
class KeepsSignals(ReversedLauncher):
    """send_signal does not reach the rank, so that a hanging one writes no stacks."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        process = super().start(place, command, environment, pipes_errors=pipes_errors)
        send = process.send_signal
        process.send_signal = lambda sig: None if sig == signal.SIGUSR1 else send(sig)  # type: ignore[method-assign]
        return process


@mutant
class BlocksFurtherSignals(ReversedLauncher):
    """start blocks SIGCHLD in the rank too, which never unblocks it."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        process = super().start(place, command, environment, pipes_errors=pipes_errors)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process


@mutant
class LeavesPipesOpen(ReversedLauncher):
    """Later ranks inherit the pipe of an earlier one, which does not see the end of its input."""

    def start(self, place: RankPlace, command: Sequence[str], environment: Mapping[str, str], *, pipes_errors: bool) -> RankProcess:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
        errors = subprocess.PIPE if pipes_errors else None
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, env={**os.environ, **environment}, close_fds=False)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.set_inheritable(process.stdin.fileno(), True)  # type: ignore[union-attr]
        return process

"""`EarlyProcess`: a process of the engine that is started before its arguments are known.
`Standby`: those of an engine's next start.

The command line starts the first one. It imports torch while the main process reads the
configuration, and a launcher then gives it the arguments of a rank. While an engine runs, its
deployment keeps one for each rank, so that a restart does not wait for imports. Must not know the
configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Self

from frame.host.child_process import start_process
from frame.host.kept_memory import VARIABLE as KEPT_MEMORY

# Variables that take effect after the imports: the platform sets torch's threads.
SETTABLE = frozenset({"OMP_NUM_THREADS", KEPT_MEMORY})


class EarlyProcess:
    """`command`: the start of the commands that it can run. It is started with `--early` in place
    of the other arguments, and reads these as a line of JSON from standard input. A context
    manager: leaving it ends a process that was not taken. Raises nothing: a process that cannot be
    started is not taken. pipes_errors: None: unless standard error is a terminal."""

    def __init__(self, command: Sequence[str], pipes_errors: bool | None = None) -> None:
        self._command = list(command)
        self._environment = dict(os.environ)
        self._pipes_errors = not os.isatty(2) if pipes_errors is None else pipes_errors
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):  # no memory or process is free: the ordinary start reports it
            self._process = start_process([*command, "--early"], {}, pipes_errors=self._pipes_errors)

    def starts(self, command: Sequence[str]) -> bool:
        """Whether `command` begins as the commands that it can run."""
        return list(command[: len(self._command)]) == self._command

    def take(self, command: Sequence[str], environment: Mapping[str, str], pipes_errors: bool) -> subprocess.Popen[bytes] | None:
        """The process, which now runs `command`; None if it cannot, and then it is ended."""
        fits = (
            self.starts(command)
            and environment.keys() <= SETTABLE
            and pipes_errors == self._pipes_errors
            and dict(os.environ) == self._environment
        )
        process = self._process
        if process is None or process.stdin is None or process.poll() is not None or not fits:
            self.close()
            return None
        line = json.dumps({"arguments": command[len(self._command) :], "environment": dict(environment)})
        try:
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
        except OSError:  # it has ended
            self.close()
            return None
        self._process = None
        return process

    def close(self) -> None:
        """End the process, unless it was taken."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it was sent and did not read
                    pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Standby:
    """The early processes of one engine. first: the one that the command line started."""

    def __init__(self, first: EarlyProcess | None = None) -> None:
        self._first = first
        self._processes: list[EarlyProcess] = []

    def prepare(self, commands: Sequence[Sequence[str]], pipes_errors: bool) -> None:
        """Start a process for the start of each rank's command, in place of those that are left."""
        self.close()
        self._processes = [EarlyProcess(command, pipes_errors) for command in commands]

    def take(self, command: Sequence[str], environment: Mapping[str, str], pipes_errors: bool) -> subprocess.Popen[bytes] | None:
        """See `EarlyProcess.take`."""
        for process in self._processes:
            if process.starts(command):
                self._processes.remove(process)
                return process.take(command, environment, pipes_errors)
        return None if self._first is None else self._first.take(command, environment, pipes_errors)

    def close(self) -> None:
        """End the processes that were not taken, except the first."""
        while self._processes:
            self._processes.pop().close()

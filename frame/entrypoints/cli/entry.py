"""The console script `frame`, and `python -m frame`. `frame serve` starts the engine's process
here, before the imports of the command line and the configuration, which take 0.3 s."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.host.interpreter import leave_working_folder, python_command

if TYPE_CHECKING:
    from frame.entrypoints.processes.early_process import EarlyProcess

WORKER = "frame.entrypoints.processes.worker"
WITHOUT_ENGINE = frozenset({"-h", "--help", "--watch"})  # flags of `frame serve`


def open_closed_streams() -> None:
    """Open /dev/null as each closed standard stream, so that no socket gets its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of another encoding shows what it can
        sys.stdout.reconfigure(errors="backslashreplace")


def start_early(arguments: Sequence[str], module: str = WORKER) -> contextlib.AbstractContextManager[EarlyProcess | None]:
    """The engine's process, which runs `module`, for `frame ARGUMENTS`; none for a command that
    starts no engine of its own in a process."""
    if arguments[:1] != ["serve"] or WITHOUT_ENGINE & {each.partition("=")[0] for each in arguments}:
        return contextlib.nullcontext()
    # numpy's threads spin for 0.1 s after its import, on the cores that import torch meanwhile.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from frame.entrypoints.processes.early_process import EarlyProcess

    return EarlyProcess(python_command("-m", module, "scheduler"))


def main() -> None:
    """Run the command line."""
    leave_working_folder()
    open_closed_streams()
    with start_early(sys.argv[1:]) as early:
        from frame.entrypoints.cli.main import main as run_command

        run_command(early)

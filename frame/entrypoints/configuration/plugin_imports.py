"""Imports the chosen plugins in a forked process, so that one that kills its process is named. Used
by `frame config check`."""

from __future__ import annotations

import os
import signal
import sys

from frame.config.resolved import Resolved
from frame.core.errors import PluginError
from frame.plugins.registry import Registry


def load_apart(registry: Registry, resolved: Resolved) -> None:
    """Import each chosen plugin in a forked process. Raises PluginError with its name."""
    choices = [choice for chosen in resolved.plugins.values() for choice in chosen]
    reading, writing = os.pipe()
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        os.close(reading)
        code = 0
        try:
            os.dup2(2, 1)  # what plugins print is no output of the command
            for number, choice in enumerate(choices):
                os.write(writing, f"{number}\n".encode())
                registry.load(registry.get(choice.kind, choice.name))
        except BaseException as error:  # noqa: BLE001 - the parent raises it
            os.write(writing, str(error).encode())
            code = 1
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0 or not choices:
        return
    numbers = [line for line in said.splitlines() if line.isdigit()]
    choice = choices[int(numbers[-1])]
    if code == 1:
        raise PluginError(said.partition(f"{numbers[-1]}\n")[2])
    end = f"kills its process with {signal.Signals(-code).name}" if code < 0 else f"ends its process (exit code {code})"
    raise PluginError(f"{choice.kind} {choice.name!r} ({choice.distribution} {choice.version}) {end} when it is loaded.")

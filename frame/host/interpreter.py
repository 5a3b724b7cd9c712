"""Starts Python programs without the working folder on their import path.

`python -m` and `python -c` import modules of the working folder before installed ones, and that
folder may be a downloaded checkpoint. Every process that frame starts gets its command and its
environment here. Imports nothing of frame and little else: it is the command line's first import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

PATH_VARIABLE, SAFE_VARIABLE = "PYTHONPATH", "PYTHONSAFEPATH"


def python_command(*arguments: str) -> list[str]:
    """The command that runs this Python with `arguments`, such as "-m" and a module."""
    return [sys.executable, "-P", *arguments]


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment and `extra`, for a child process. Python programs that the child
    starts inherit the safe path."""
    environment = {**os.environ, **(extra or {}), SAFE_VARIABLE: "1"}
    if PATH_VARIABLE in environment:  # an empty element, as in PYTHONPATH=$PYTHONPATH:/x, is the working folder
        environment[PATH_VARIABLE] = os.pathsep.join(filter(None, environment[PATH_VARIABLE].split(os.pathsep)))
    return environment


def leave_working_folder() -> None:
    """Remove what the start of this program put on its import path: the script's folder, and the
    working folder for an empty element of PYTHONPATH. Folders that PYTHONPATH names stay. Child
    processes of any library inherit a safe path."""
    if not sys.flags.safe_path and sys.path[:1] == [os.path.dirname(os.path.realpath(sys.argv[0]))]:  # noqa: PTH120 - no import of pathlib yet
        del sys.path[0]
    before = os.environ.get(PATH_VARIABLE, "")
    os.environ.update(child_environment())
    named = os.environ.get(PATH_VARIABLE, "")
    if named == before:
        return
    folder = os.getcwd()  # noqa: PTH109
    if folder in sys.path and folder not in map(os.path.abspath, filter(None, named.split(os.pathsep))):
        sys.path.remove(folder)

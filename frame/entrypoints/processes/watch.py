"""`frame serve --watch`: runs the server as a child process and restarts it when a plugin file or
the configuration file changes. For plugin development; used by the command `serve`."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

import click

POLL_SECONDS = 0.5
STOP_SECONDS = 60.0  # for a server that drains; then it is killed


def watch(arguments: Sequence[str], paths: Iterable[str]) -> int:
    """Run `frame ARGUMENTS` until a signal, and again after each change below `paths`. -> the exit
    code of the last run. A server that has ended by itself is started again with the next change.
    """
    watched, is_stopped = [Path(path).expanduser() for path in paths], False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    click.echo(f"frame: watching {', '.join(map(str, watched))}", err=True)
    code = 0
    while not is_stopped:
        state = read_state(watched)
        server = subprocess.Popen([sys.executable, "-m", "frame", *arguments], start_new_session=True)
        while not is_stopped and read_state(watched) == state:
            time.sleep(POLL_SECONDS)
        code = _stop(server)
        if not is_stopped:
            click.echo("frame: a watched file changed; restarting", err=True)
    return code


def read_state(paths: Iterable[Path]) -> dict[str, int]:
    """The modification time in nanoseconds of each file, folders with their Python files."""
    files = [file for path in paths for file in (path.rglob("*.py") if path.is_dir() else (path,))]
    found = {}
    for file in files:
        try:
            found[str(file)] = file.stat().st_mtime_ns
        except FileNotFoundError:  # an editor replaces it
            continue
    return found


def _stop(server: subprocess.Popen[bytes]) -> int:
    if server.poll() is None:
        server.terminate()
    try:
        return server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()

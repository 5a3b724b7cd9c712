"""`watch` runs a server again when a watched file changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from frame.entrypoints.cli.serve import read_state


def test_the_state_of_a_folder_is_that_of_its_python_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    before = read_state([tmp_path])
    (tmp_path / "notes.txt").write_text("1")
    assert read_state([tmp_path]) == before
    (tmp_path / "b.py").write_text("1")
    assert read_state([tmp_path]) != before
    assert read_state([tmp_path / "gone.py"]) == {}


def test_watch_restarts_for_each_change(tmp_path: Path) -> None:
    path = str(tmp_path / "mine.py")
    Path(path).write_text("1")
    code = f"from frame.entrypoints.cli.serve import restart_at_changes as run; raise SystemExit(run(['--version'], [{path!r}]))"
    watching = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert watching.stdout is not None
    try:
        assert watching.stdout.readline().startswith("frame")
        os.utime(path, (1, 1))
        assert watching.stdout.readline().startswith("frame")
    finally:
        watching.send_signal(signal.SIGTERM)
        _, errors = watching.communicate(timeout=300)
    assert "a watched file changed; restarting" in errors
    assert watching.returncode in (0, -signal.SIGTERM & 0xFF)  # by when the signal reached the last one

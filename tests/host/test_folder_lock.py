"""One process at a time has a folder's lock, and a link is not followed."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from frame.host.folder_lock import lock_folder
from frame.host.interpreter import child_environment, python_command

LOCK = "import sys; from pathlib import Path; from frame.host.folder_lock import lock_folder; lock_folder(Path(sys.argv[1]))"


def lock_elsewhere(folder: Path) -> int:
    """The exit code of another process that locks the folder."""
    command = python_command("-c", LOCK, str(folder))
    return subprocess.run(command, env=child_environment(), capture_output=True, check=False).returncode


def test_another_process_is_refused_until_the_descriptor_is_closed(tmp_path: Path) -> None:
    lock = lock_folder(tmp_path)
    assert lock_elsewhere(tmp_path) == 1
    os.close(lock)
    assert lock_elsewhere(tmp_path) == 0


def test_a_shared_lock_is_shared_and_excludes_others(tmp_path: Path) -> None:
    descriptors = [lock_folder(tmp_path, fcntl.LOCK_SH) for _ in range(2)]
    with pytest.raises(BlockingIOError):
        lock_folder(tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BlockingIOError):
        lock_folder(tmp_path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before  # a refusal leaves no descriptor
    for each in descriptors:
        os.close(each)


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "file").touch()
    for name in ("link", "file", "missing"):
        with pytest.raises(OSError, match=name):
            lock_folder(tmp_path / name)

"""The directory of a deployment's sockets: private, restored, removed when stale."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from frame.core.ipc.inflight_file import INFLIGHT
from frame.core.ipc.transport import ZmqTransport
from frame.core.messages import Abort
from frame.host.socket_directory import SocketDirectory


def test_directory_is_private(tmp_path: Path) -> None:
    sockets = SocketDirectory()
    assert stat.S_IMODE(sockets.path.stat().st_mode) == 0o700
    sockets.remove()
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        SocketDirectory(str(tmp_path))


def test_a_removed_socket_directory_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sockets = SocketDirectory()
    handle = os.open(sockets.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as systemd-tmpfiles does before it removes anything
    os.close(handle)
    sockets.restore()  # it exists: no change
    near = ZmqTransport(None, None, sources=[sockets.address("out")])  # as the main process receives from its children
    old = ZmqTransport(sockets.address("in"), sockets.address("out"), is_outbox=True)
    old.send(Abort(rids=["old"]))
    assert near.receive(10.0) == [Abort(rids=["old"])]
    shutil.rmtree(sockets.path)
    sockets.restore()
    old.send(Abort(rids=["old"]))  # connections survive the removal of their files
    assert near.receive(10.0) == [Abort(rids=["old"])]
    old.close()
    new = ZmqTransport(sockets.address("in"), sockets.address("out"), is_outbox=True)
    try:
        new.send(Abort(rids=["new"]))
        assert near.receive(10.0) == [Abort(rids=["new"])]
        shutil.rmtree(sockets.path)
        sockets.path.mkdir(mode=0o755)
        with pytest.raises(PermissionError):  # another user may have created it
            sockets.restore()
    finally:
        for end in (new, near):
            end.close()
        sockets.remove()


def test_a_long_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket address has at most 107 characters."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    sockets = SocketDirectory()
    try:
        ZmqTransport(sockets.address("tokenizer-63"), None).close()
        assert not sockets.path.is_relative_to(long)
    finally:
        sockets.remove()


def test_directories_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that are old, unlocked, and hold nothing of anyone else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def make(name: str, age: float = 3600.0, mode: int = 0o700, extra: str = INFLIGHT) -> Path:
        path = tmp_path / name
        path.mkdir(mode=mode)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(path / "engine"))  # an absolute path may be too long
        (path / extra).touch()
        os.utime(path, (path.stat().st_mtime - age,) * 2)
        return path

    stale = [make("frame-aaaaaaaa"), make("frame-ffffffff", extra="ranks-1")]
    kept = [make("frame-bbbbbbbb", age=1.0), make("frame-cccccccc", mode=0o755), make("frame-dddddddd", extra="notes.txt")]
    kept.append(make("frame-work"))
    (tmp_path / "frame-eeeeeeee").symlink_to(kept[-1])
    running = SocketDirectory()
    os.utime(running.path, (0, 0))
    other = SocketDirectory()
    try:
        assert not any(path.exists() for path in stale)
        assert all((path / "engine").exists() for path in kept) and running.path.exists()
    finally:
        running.remove()
        other.remove()


def test_a_folder_that_may_not_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old directories in it stay, and a new one is made."""

    def refuse(path: object) -> None:
        raise PermissionError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refuse)
        sockets = SocketDirectory()
    sockets.remove()
    assert not sockets.path.exists()

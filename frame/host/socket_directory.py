"""`SocketDirectory`: where the processes of one deployment have their ipc:// sockets. Used by
the process that starts the others, and by them. It must not know a message."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import zmq

from frame.core.ipc.inflight_file import INFLIGHT
from frame.host.folder_lock import lock_folder

MAX_SOCKET_LENGTH = "frame-12345678/tokenizer-63-out"  # the longest socket path below the folder of temporary files
NAME = re.compile(r"frame-[a-z0-9_]{8}")  # as mkdtemp makes it
FILES = (INFLIGHT, "ranks")  # starts of names beside the sockets; ranks: where those of one host meet
FEATURES = ".features"  # end of names of files that media were decoded to
STALE_AFTER = 60.0  # seconds without a change; a directory that is just being created has no lock yet


class SocketDirectory:
    """A directory with mode 0700 for one deployment's ipc:// sockets, removed at the end. The
    process that creates it holds a lock on it, because of which systemd-tmpfiles does not clean it,
    and removes those of this user whose processes were killed. Raises OSError."""

    def __init__(self, path: str | None = None) -> None:
        self.path = _make_directory() if path is None else Path(path)
        self._owned = path is None
        self._lock: int | None = None
        self._check()

    def restore(self) -> None:
        """Create the directory again under the same name if a cleaner removed it. Raises OSError,
        also if another user owns it now."""
        with contextlib.suppress(FileExistsError):
            self.path.mkdir(mode=0o700, parents=True)
            self._release()
        self._check()

    def address(self, name: str) -> str:
        return f"ipc://{self.path}/{name}"

    def remove(self) -> None:
        """Delete the sockets and the directory, if this object made it."""
        self._release()
        if self._owned:
            shutil.rmtree(self.path, ignore_errors=True)

    def _check(self) -> None:
        status = self.path.stat()
        if not _is_private(status):
            raise PermissionError(f"{self.path} must belong to this user alone (mode 0700); sockets in it would be open to others")
        if self._owned and self._lock is None:
            with contextlib.suppress(OSError):  # a file system without locks
                self._lock = lock_folder(self.path, fcntl.LOCK_SH)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _make_directory() -> Path:
    """Create a directory in the folder of temporary files or, if that path is too long for sockets,
    in $XDG_RUNTIME_DIR or /tmp."""
    bases = [tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp"]  # noqa: S108 - made with mkdtemp
    for base in filter(None, bases):
        if len(os.fsencode(f"{base}/{MAX_SOCKET_LENGTH}")) <= zmq.IPC_PATH_MAX_LEN and Path(base).is_dir():
            path = Path(tempfile.mkdtemp(prefix="frame-", dir=base))
            with contextlib.suppress(OSError):  # a folder that may not be listed
                _remove_stale(base, path.stat().st_mtime - STALE_AFTER)
            return path
    raise OSError(f"{bases[0]} is too long a path for sockets, and there is no /tmp: set TMPDIR to a shorter one")


def _remove_stale(base: str, before: float) -> None:
    """Delete directories of this user in `base` that no process has locked, that were last changed
    `before` this time, and that hold nothing but sockets and `FILES`."""
    for entry in [entry for entry in os.scandir(base) if NAME.fullmatch(entry.name)]:
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode) or not _is_private(status) or status.st_mtime > before:
                continue
            lock = lock_folder(Path(entry.path))
            try:
                files = list(os.scandir(entry.path))
                if all(_is_ours(file) for file in files):
                    for file in files:
                        Path(file.path).unlink()
                    Path(entry.path).rmdir()
            finally:
                os.close(lock)


def _is_ours(file: os.DirEntry[str]) -> bool:
    is_named = file.name.startswith(FILES) or file.name.endswith(FEATURES)
    return is_named or stat.S_ISSOCK(file.stat(follow_symlinks=False).st_mode)


def _is_private(status: os.stat_result) -> bool:
    return not stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.getuid()

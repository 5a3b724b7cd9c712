"""The shared folder of batches: which server owns what, and what the others have changed.

A lock (`flock`) on a file says that a live server owns it: the kernel releases the locks of a
process that ends, and those of one that is stopped stay, so that it cannot write beside another
owner. Used by the stores of files and of batches. Must not know what is in the files. Names, sizes
and contents in the folder are not trusted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar

import msgspec

from frame.core.errors import ConfigurationError

_log = logging.getLogger(__name__)

LOCK = ".frame-lock"  # servers share its lock; those of older versions lock it for themselves
MAX_STATE_BYTES = 4 << 20  # of the state of a file or a batch
MAX_STATES = 50_000  # of a kind that are read
SETTLED = 2.0  # seconds after which the folder's time of change tells the next change from the last one
_NAME = re.compile(r"(file|batch)-[0-9a-f]{32}")

_TOKEN = secrets.token_hex(8)  # of this process, in the names of files that it has not written yet
_UNFINISHED = re.compile(r"(file|batch)-[0-9a-f]{32}\.json(l|\.[0-9a-f]{16})\.new")
STALE = 3600.0  # seconds after which such a file is of a server that has ended


class FailureLog:
    """Logs each failure once until it is over. `key`: what failed."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._failed: set[str] = set()

    def warn(self, key: str, sentence: str, *arguments: object) -> None:
        if key not in self._failed:
            self._log.warning(sentence, *arguments)
        self._failed.add(key)

    def clear(self, key: str) -> None:
        """What failed has succeeded."""
        self._failed.discard(key)


Stamp = tuple[int, int]  # of a version of a file: when it was written, and its inode


def is_name(name: str) -> bool:
    """Whether this is the name of a file or a batch, which is part of paths."""
    return _NAME.fullmatch(name) is not None


def make_folder(folder: Path) -> None:
    """Make the folder. Raises ConfigurationError if it cannot be used."""
    share_folder(folder).close()


def share_folder(folder: Path) -> IO[bytes]:
    """Make the folder and share it until the returned file is closed or the process ends. Raises
    ConfigurationError if that is impossible, or a server that cannot share it has locked it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a+b", opener=private)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        why = f"cannot be made or written ({error.strerror})"
        raise ConfigurationError(f"the batch folder {folder} {why}; choose another for batches.folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        why = "is in use by a server of an older version" if isinstance(error, BlockingIOError) else f"cannot be locked ({error.strerror})"
        raise ConfigurationError(f"the batch folder {folder} {why}; choose another for batches.folder") from error
    return lock


def private(path: str, flags: int) -> int:
    """An opener of files that only this user may read, and of no link or pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def save(path: Path, body: bytes) -> None:
    """Write a file as a whole. Raises OSError."""
    new = path.with_name(f"{path.name}.{_TOKEN}.new")
    try:
        with open(new, "wb", opener=private) as file:
            file.write(body)
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def delete_unfinished(folder: Path) -> None:
    """Delete what servers that were killed had begun to write."""
    for path in folder.glob("*.new"):
        with suppress(OSError):
            if _UNFINISHED.fullmatch(path.name) and time.time() - path.lstat().st_mtime > STALE:
                path.unlink()


def try_lock(handle: IO[bytes]) -> bool:
    """Lock an open file unless another process has; it is unlocked when it is closed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether a live server has locked the file; not if there is none. Raises OSError."""
    try:
        with open(path, "r+b", opener=private) as file:
            return not try_lock(file)
    except FileNotFoundError:
        return False


class Claim:
    """The right to change one batch, of one server at a time."""

    def __init__(self, path: Path, handle: IO[bytes]) -> None:
        self._path = path
        self._handle = handle

    @classmethod
    def take(cls, path: Path) -> Claim | None:
        """None: a live server has it. Raises OSError."""
        while True:
            handle = open(path, "ab", opener=private)  # noqa: SIM115 - `release` closes it
            try:
                if not try_lock(handle):
                    handle.close()
                    return None
                mine = os.fstat(handle.fileno())
                with suppress(FileNotFoundError):
                    if (theirs := path.lstat()).st_ino == mine.st_ino and theirs.st_dev == mine.st_dev:
                        return cls(path, handle)
            except BaseException:
                handle.close()
                raise
            handle.close()  # the owner before has deleted this file meanwhile

    def release(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._handle.close()


class _Named(Protocol):
    id: str


T = TypeVar("T", bound=_Named)


class FolderReader(Generic[T]):
    """Reads the states of one kind, `{kind}-*.json`, that have changed since the last call. One
    thread at a time calls it."""

    def __init__(self, folder: Path, kind: str, decoder: msgspec.json.Decoder[T]) -> None:
        self._folder = folder
        self._kind = kind
        self._decoder = decoder
        self._stamps: dict[str, Stamp] = {}
        self._folder_stamp = (0, 0.0)  # its time of change, and when that was read

    def read_changes(self) -> dict[str, T | None]:
        """The states that are new or changed by name; None: it is gone. Raises OSError."""
        now, changed = time.time(), self._folder.stat().st_mtime_ns
        before, read = self._folder_stamp
        if changed == before and read - changed / 1e9 > SETTLED:
            return {}
        self._folder_stamp = changed, now
        stamps = dict(self._list_stamps())
        changes: dict[str, T | None] = dict.fromkeys(self._stamps.keys() - stamps.keys())
        for name, stamp in stamps.items():
            if self._stamps.get(name) != stamp:
                changes[name] = self._read(name)
        self._stamps = stamps
        return changes

    def read_change(self, name: str) -> dict[str, T | None]:
        """The same for one name, which may be any string. Raises OSError."""
        if not is_name(name) or not name.startswith(f"{self._kind}-"):
            return {}
        try:
            stamp = _stamp((self._folder / f"{name}.json").lstat())
        except FileNotFoundError:
            return {} if self._stamps.pop(name, None) is None else {name: None}
        if self._stamps.get(name) == stamp:
            return {}
        self._stamps[name] = stamp
        return {name: self._read(name)}

    def _list_stamps(self) -> Iterator[tuple[str, Stamp]]:
        count = 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                name, dot, suffix = entry.name.partition(".")
                if (dot, suffix) != (".", "json") or not name.startswith(f"{self._kind}-"):
                    continue
                with suppress(FileNotFoundError):  # another server deletes it
                    yield name, _stamp(entry.stat(follow_symlinks=False))
                count += 1
                if count >= MAX_STATES:
                    _log.warning("the batch folder has more than %d states of a kind; the others are left out", MAX_STATES)
                    return

    def _read(self, name: str) -> T | None:
        """A state; None if it is gone, or cannot be read or has a name that no store gives: such
        files stay, with a warning."""
        try:
            with open(self._folder / f"{name}.json", "rb", opener=private) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_STATE_BYTES:
                    raise ValueError("it is no file, or too large")
                one = self._decoder.decode(file.read(MAX_STATE_BYTES + 1))
            if one.id != name or not is_name(name):
                raise ValueError("its name is not that of its id")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # of msgspec too
            _log.warning("%s.json of the batch folder is left out: %s", name, error)
            return None
        return one


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_ino

"""`ResponseFiles`: stored responses and conversations in a folder (`server.state_dir`), which
several servers may share.

Used by `ResponseStore`, which bounds them. A thread writes, each file as a whole; an entry that is
not written yet is lost if the process is killed. Names and tenants are in the files, not in file
names. Must not depend on HTTP or the engine.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from frame.core.errors import ConfigurationError

log = logging.getLogger(__name__)

VERSION = 1  # of the files; a server reads those of its own version and of the one before
MAX_BYTES = 256 << 20  # of a file
MAX_PENDING = 1 << 16  # files that are not written yet
DELETE_TIMEOUT = 30.0  # seconds in which the disk must have deleted a file
STALE = 3600.0  # seconds after which an unfinished file is deleted
_FILE, _OWNER = re.compile(r"[0-9a-f]{64}\.json"), re.compile(r"[0-9a-f]{32}")
RUNNING = ("queued", "in_progress")
_ENDED = {"code": "server_error", "message": "the server that ran this response has ended; send the request again"}


class ResponseFile(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. `created`: Unix time. `owner`: the server that wrote it."""

    format: Literal["frame-response"] = "frame-response"
    version: int = VERSION
    name: str
    tenant: str
    owner: str
    created: float
    num_input: int
    body: msgspec.Raw
    items: msgspec.Raw


Stamp = tuple[int, int]  # of a version of a file: when it was written, and its inode
StoredFile = tuple[ResponseFile, Stamp]
_decoder = msgspec.json.Decoder(ResponseFile)


def make_state_folder(folder: Path) -> None:
    """Make the folder. Raises ConfigurationError if others may read it, or it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        for name in ("responses", "servers"):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        probe = folder / f"servers/{secrets.token_hex(16)}.new"
        probe.touch(0o600)
        probe.unlink()
    except OSError as error:
        raise ConfigurationError(f"server.state_dir {folder} cannot be made or written ({error.strerror}); choose another") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigurationError(f"server.state_dir {folder} is open to other users; run chmod 700 {folder}")


class ResponseFiles:
    """The files of one server. `check` and `load_all` read on the calling thread; any thread may
    call `check`."""

    def __init__(self, folder: Path) -> None:
        make_state_folder(folder)
        self._folder, self._servers = folder / "responses", folder / "servers"
        self.owner = secrets.token_hex(16)
        self._lease = self._lock_lease()
        self._pending: OrderedDict[str, bytes | None] = OrderedDict()  # by file name, to be written; None: to be deleted
        self._stamps: dict[str, Stamp] = {}  # by file name: the version that the store has, or had before its last change
        self._writing = ""
        self._changed = threading.Condition()
        self._is_closed = False
        self._has_failed = False  # the last write or deletion
        self._thread = threading.Thread(target=self._write_all, name="response-files", daemon=True)
        self._thread.start()

    def _lock_lease(self) -> IO[bytes]:
        """A file that is locked as long as this server lives."""
        lease = open(self._servers / f"{self.owner}.lock", "xb", opener=_private)  # noqa: SIM115 - open as long as the server
        fcntl.flock(lease, fcntl.LOCK_EX)
        return lease

    def save(self, name: str, tenant: str, body: bytes, items: bytes, num_input: int) -> None:
        """Have the thread write an entry."""
        raw = (msgspec.Raw(body), msgspec.Raw(items))
        file = ResponseFile(name=name, tenant=tenant, owner=self.owner, created=time.time(), num_input=num_input, body=raw[0], items=raw[1])
        self._put(_name_file(name, tenant), msgspec.json.encode(file))

    def remove(self, name: str, tenant: str) -> None:
        """Have the thread delete an entry, unless another server has written it since."""
        self._put(_name_file(name, tenant), None)

    def delete(self, name: str, tenant: str) -> bool:
        """`remove`, and wait for the thread. Whether the version that the store has is gone from
        the disk."""
        file_name = _name_file(name, tenant)
        if not self._put(file_name, None):
            return False
        with self._changed:
            is_done = self._changed.wait_for(lambda: file_name not in self._pending and self._writing != file_name, DELETE_TIMEOUT)
            return is_done and file_name not in self._stamps

    def check(self, name: str, tenant: str) -> StoredFile | bool:
        """The entry if another server has written it since; else whether the store's own holds."""
        file_name = _name_file(name, tenant)
        if self.is_pending(name, tenant):
            return True
        try:
            stamp = _stamp((self._folder / file_name).stat())
        except FileNotFoundError:
            return file_name not in self._stamps or not self._folder.is_dir()  # it was not written, or another server deleted it
        except OSError:
            return True
        if self._stamps.get(file_name) == stamp:
            return True
        return self._read(self._folder / file_name) or False

    def is_pending(self, name: str, tenant: str) -> bool:
        """Whether the thread has yet to write or delete the entry."""
        file_name = _name_file(name, tenant)
        with self._changed:
            return file_name in self._pending or file_name == self._writing

    def load_all(self) -> Iterator[StoredFile]:
        """All entries, in the order of their writing. Removes what a killed server did not
        finish."""
        for path in self._servers.glob("*.lock"):
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > STALE:  # its server has the lock by now, or has ended
                    self._is_alive(path.stem)
        entries = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # another server deletes it
                written = path.lstat().st_mtime
                if _FILE.fullmatch(path.name):
                    entries.append((written, path))
                elif path.suffix == ".new" and time.time() - written > STALE:
                    path.unlink()
        for _, path in sorted(entries):
            if (stored := self._read(path)) is not None:
                yield stored

    def note(self, stored: StoredFile) -> None:
        """The store has this version of an entry now."""
        file, stamp = stored
        self._stamps[_name_file(file.name, file.tenant)] = stamp

    def forget(self, name: str, tenant: str) -> None:
        """The store does not have the entry any more; its file stays."""
        self._stamps.pop(_name_file(name, tenant), None)

    def close(self) -> None:
        """Write what is left, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout=30)
        (self._servers / f"{self.owner}.lock").unlink(missing_ok=True)
        self._lease.close()

    def _put(self, file_name: str, data: bytes | None) -> bool:
        """Queue a write or a deletion. Returns whether there is room for it."""
        with self._changed:
            if len(self._pending) >= MAX_PENDING and file_name not in self._pending:
                self._warn("its disk does not answer")
                return False
            self._pending[file_name] = data
            self._changed.notify_all()
            return True

    def _warn(self, why: str | None) -> None:
        """Log the first failure after a success."""
        if not self._has_failed:
            log.warning("stored responses cannot be written to server.state_dir or deleted from it: %s", why)
        self._has_failed = True

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._writing = ""
                self._changed.notify_all()
                while not self._pending:
                    if self._is_closed:
                        return
                    self._changed.wait()
                self._writing, data = self._pending.popitem(last=False)
            try:
                self._write(self._folder / self._writing, data)
                self._has_failed = False
            except OSError as error:
                self._warn(error.strerror)

    def _write(self, path: Path, data: bytes | None) -> None:
        if data is None:
            with suppress(FileNotFoundError):
                if self._stamps.get(path.name) == _stamp(path.lstat()):
                    path.unlink()  # where that fails, the stamp stays, so the store does not read the file again
            self._stamps.pop(path.name, None)
            return
        new = path.with_suffix(f".{self.owner}.new")
        try:
            with open(new, "wb", opener=_private) as file:
                file.write(data)
                file.flush()
                stamp = _stamp(os.fstat(file.fileno()))
            new.replace(path)
        except OSError:  # the stamp of the version before stays, so the store does not take that for a newer one
            new.unlink(missing_ok=True)
            raise
        self._stamps[path.name] = stamp

    def _read(self, path: Path) -> StoredFile | None:
        """An entry; None for a file that is gone, damaged or foreign, or of a response that another
        server runs now."""
        try:
            with open(path, "rb", opener=_no_link) as data:
                status = os.fstat(data.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                    raise ValueError("it is no file, or too large")
                file = _decoder.decode(data.read())
            if file.version not in (VERSION, VERSION - 1):
                raise ValueError(f"its version is {file.version}, and this server reads {VERSION}")
            if _name_file(file.name, file.tenant) != path.name:
                raise ValueError("its name is not that of its entry")
            body: Any = msgspec.json.decode(file.body)
            if not isinstance(body, dict) or not isinstance(msgspec.json.decode(file.items), list):
                raise ValueError("it holds no response")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:  # of msgspec too
            log.warning("%s of server.state_dir is left out: %s", path.name, error)
            return None
        if body.get("status") in RUNNING:
            if self._is_alive(file.owner):
                return None
            body |= {"status": "failed", "error": _ENDED}
            file = msgspec.structs.replace(file, body=msgspec.Raw(msgspec.json.encode(body)))
        return file, _stamp(status)

    def _is_alive(self, owner: str) -> bool:
        """Whether a server of this name has its lease."""
        if owner == self.owner:
            return True
        path = self._servers / f"{owner}.lock"
        if not _OWNER.fullmatch(owner):
            return False
        try:
            with open(path, "rb", opener=_no_link) as lease:
                fcntl.flock(lease, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        path.unlink(missing_ok=True)
        return False


def _name_file(name: str, tenant: str) -> str:
    return blake2b(f"{len(tenant)} {tenant}{name}".encode(errors="surrogatepass"), digest_size=32).hexdigest() + ".json"


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_ino


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

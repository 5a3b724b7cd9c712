"""Files of the Batch API on disk: uploads and batch outputs, bounded in bytes and number.

Each file has a metadata file beside it. Used by the routes of files and by the batch runner. Must
not depend on HTTP or the engine. Disk work runs in threads; sizes are counted on the event loop.
The store deletes only files that its own metadata names, because the folder may hold other files.
Several servers may use the folder: each locks the data that it writes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import stat
import time
import uuid
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec

from frame.config.server_sections import BatchesSection
from frame.entrypoints.http.batch.folder import FolderReader, delete_unfinished, is_locked, is_name, private, save, share_folder, try_lock

_log = logging.getLogger(__name__)

MAX_FILES = 10_000
OUTPUT = "batch_output"  # the purpose of a batch's files
OPENING_TIME = 60.0  # seconds within which a server writes the data of a file whose metadata it has saved


class FileObject(msgspec.Struct, kw_only=True):
    """Metadata of a file, saved beside it as JSON."""

    id: str
    filename: str  # as uploaded
    purpose: str  # "batch" or "batch_output"
    bytes: int
    created_at: int  # seconds since the epoch
    tenant: str  # owner; not shown to clients
    is_complete: bool = True  # False while the file is written

    def to_object(self) -> dict[str, Any]:
        """OpenAI's file object."""
        fields = {name: getattr(self, name) for name in ("id", "filename", "purpose", "bytes", "created_at")}
        return {**fields, "object": "file", "status": "processed"}


_file_decoder = msgspec.json.Decoder(FileObject)


class StorageFullError(Exception):
    """A bound on files or batches is reached. The message is for the client."""


class FileStore:
    """The files of the folder. Other servers may share it: `refresh` reads what they have changed.
    `_own`: names of the files that this server writes.

    Tenants with an API key have quotas. Raises ConfigurationError where the folder cannot be used.
    """

    def __init__(self, folder: Path, config: BatchesSection) -> None:
        self.folder = folder
        self._config = config
        self._lock = share_folder(folder)
        self._files: dict[str, FileObject] = {}  # those that are being written too, also by other servers
        self._own: set[str] = set()
        self._bytes: Counter[str] = Counter()  # by tenant
        self._num_files: Counter[str] = Counter()  # likewise
        self._reader = FolderReader(folder, "file", _file_decoder)
        self._refreshing = asyncio.Lock()
        delete_unfinished(folder)
        self._apply(*self._read(None))

    async def refresh(self, name: str | None = None) -> None:
        """Read what other servers have changed, of one file or of all. Raises OSError."""
        async with self._refreshing:
            self._apply(*await asyncio.to_thread(self._read, name))

    def _read(self, name: str | None) -> tuple[dict[str, FileObject | None], dict[str, int]]:
        """The files that have changed, and the sizes of those that other servers write."""
        changes = self._reader.read_changes() if name is None else self._reader.read_change(name)
        for key, file in changes.items():
            if file is not None and not self._measure(file):
                changes[key] = None
        growing = [file.id for file in list(self._files.values()) if name is None and not file.is_complete and file.id not in self._own]
        sizes = {}
        for key in growing:
            with suppress(FileNotFoundError):
                sizes[key] = self.path(key).lstat().st_size
        return changes, sizes

    def _measure(self, file: FileObject) -> bool:
        """Set the size by the data, which may be less than its metadata has; whether it exists."""
        try:
            status = self.path(file.id).lstat()
        except FileNotFoundError:  # another server deletes it, or is about to write it
            file.bytes = 0
            return not file.is_complete
        file.bytes = min(max(0, file.bytes), status.st_size) if file.is_complete else status.st_size
        return stat.S_ISREG(status.st_mode)

    def _apply(self, changes: dict[str, FileObject | None], sizes: dict[str, int]) -> None:
        for name, file in changes.items():
            if name not in self._own:
                self._drop(name)
                if file is not None:
                    self._put(file)
        for name, size in sizes.items():
            known = self._files.get(name)
            if known is not None and name not in self._own and not known.is_complete:
                self._bytes[known.tenant] += size - known.bytes
                known.bytes = size

    def _put(self, file: FileObject) -> None:
        self._files[file.id] = file
        self._bytes[file.tenant] += file.bytes
        self._num_files[file.tenant] += 1

    def _drop(self, name: str) -> None:
        if (file := self._files.pop(name, None)) is not None:
            self._bytes[file.tenant] -= file.bytes
            self._num_files[file.tenant] -= 1

    def recover(self, active: Collection[str]) -> None:
        """Clear up the files that a server ended while it wrote: whole lines of a batch's output
        stay, others are deleted. `active`: batches that have not ended, whose next owner goes on
        with them."""
        for file in [file for file in self._files.values() if not file.is_complete]:
            is_output = file.purpose == OUTPUT
            if is_output and file.filename.rpartition("_")[0] in active:
                continue
            try:
                if self._is_written(file):
                    continue
                if is_output and self.path(file.id).exists():
                    file.bytes, before = _cut_to_lines(self.path(file.id)), file.bytes
                    self._bytes[file.tenant] += file.bytes - before
                if not is_output or not file.bytes:
                    self._unlink(file.id)
                    self._drop(file.id)
                    continue
                file.is_complete = True
                self.save(file.id, msgspec.json.encode(file))
            except OSError as error:  # a full or read-only disk; the next start tries again
                _log.warning("%s was not saved again or deleted: %s", file.filename, error.strerror)

    def _is_written(self, file: FileObject) -> bool:
        """Whether a live server writes the file, or is about to. Raises OSError."""
        path = self.path(file.id)
        return is_locked(path) or (not path.exists() and time.time() - file.created_at < OPENING_TIME)

    def close(self) -> None:
        """Give the folder back."""
        self._lock.close()

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def path(self, name: str) -> Path:
        assert is_name(name)
        return self.folder / f"{name}.jsonl"

    def get(self, name: str, tenant: str) -> FileObject | None:
        """The metadata of a file of this tenant; None if there is none."""
        file = self._files.get(name)
        return file if file is not None and file.tenant == tenant and file.is_complete else None

    def list_files(self, tenant: str) -> list[FileObject]:
        """The files of this tenant, oldest first."""
        files = [file for file in self._files.values() if file.tenant == tenant and file.is_complete]
        return sorted(files, key=lambda file: file.created_at)

    async def create(self, content: bytes, filename: str, purpose: str, tenant: str) -> FileObject:
        """Store a whole file. Raises StorageFullError, OSError."""
        output = await self.open_writer(filename, purpose, tenant)
        try:
            await output.write(content)
            return await output.finish()
        except BaseException:
            output.abandon()
            raise

    async def open_writer(self, filename: str, purpose: str, tenant: str) -> FileWriter:
        """A file to write in pieces, listed when finished. Raises StorageFullError, OSError."""
        await self.refresh()
        maximum = self._config.max_files_per_key
        if tenant and self._num_files[tenant] >= maximum:
            raise StorageFullError(f"this key has {maximum} files, the limit of batches.max_files_per_key; delete some")
        if self._num_files.total() >= MAX_FILES:
            raise StorageFullError(f"the server has {MAX_FILES} files, its limit; delete some")
        name = f"file-{uuid.uuid4().hex}"
        file = FileObject(
            id=name, filename=filename[:255], purpose=purpose, bytes=0, created_at=int(time.time()), tenant=tenant, is_complete=False
        )
        self._own.add(name)
        self._put(file)
        try:
            return await asyncio.to_thread(self._open, file)
        except BaseException:
            self.give_up(file)
            self._drop(name)
            raise

    def _open(self, file: FileObject) -> FileWriter:
        """Save the metadata first, so that the next start finds a file that a crash left. The data
        is locked before it has its name, so that no start takes it for such a file."""
        self.save(file.id, msgspec.json.encode(file))
        new = self.folder / f"{file.id}.jsonl.new"
        handle = open(new, "xb", buffering=0, opener=private)  # noqa: SIM115 - the writer closes it
        try:
            try_lock(handle)
            new.rename(self.path(file.id))
        except BaseException:
            handle.close()
            raise
        return FileWriter(self, file, handle)

    async def reopen_writer(self, filename: str, tenant: str) -> FileWriter | None:
        """An output file that a server before has begun, after its last whole line; None if there
        is none. Raises OSError, also where a live server writes it."""
        outputs = (file for file in self._files.values() if (file.filename, file.purpose, file.tenant) == (filename, OUTPUT, tenant))
        if (file := next(outputs, None)) is None:
            return None
        self._own.add(file.id)
        try:
            handle, size = await asyncio.to_thread(self._reopen, file.id)
        except FileNotFoundError:  # its server had not opened it, or it has been deleted
            await self.delete(file)
            return None
        except BaseException:
            self.give_up(file)
            raise
        self._bytes[tenant] += size - file.bytes
        file.bytes, file.is_complete = size, False
        return FileWriter(self, file, handle)

    def _reopen(self, name: str) -> tuple[FileIO, int]:
        path = self.path(name)
        handle = open(path, "r+b", buffering=0, opener=private)  # noqa: SIM115 - the writer closes it
        try:
            if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode) or not try_lock(handle):
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
            return handle, handle.seek(_cut_to_lines(path))
        except BaseException:
            handle.close()
            raise

    def give_up(self, file: FileObject) -> None:
        """This server no longer writes the file."""
        self._own.discard(file.id)

    async def delete(self, file: FileObject) -> None:
        """Raises OSError, and keeps the file then."""
        await asyncio.to_thread(self._unlink, file.id)
        self.give_up(file)
        self._drop(file.id)

    def release_bytes(self, size: int, tenant: str) -> None:
        """Return bytes that were reserved and not written."""
        self._bytes[tenant] -= size

    def reserve_bytes(self, size: int, file: FileObject) -> None:
        """Add `size` bytes to a file that is written. Raises StorageFullError."""
        maximum, per_key, tenant = self._config.max_bytes, self._config.max_bytes_per_key, file.tenant
        if tenant and self._bytes[tenant] + size > per_key:
            others = self._bytes[tenant] - file.bytes
            remedy = "delete some" if others else "send a smaller file"
            raise StorageFullError(
                f"other files of this key have {others} of {per_key} bytes (batches.max_bytes_per_key), and the first"
                f" {file.bytes + size} of this one do not fit; {remedy}"
            )
        if self.num_bytes + size > maximum:
            raise StorageFullError(
                f"other files have {self.num_bytes - file.bytes} of {maximum} bytes (batches.max_bytes), and the first"
                f" {file.bytes + size} of this one do not fit; delete some, or start the server with a larger --batch-max-bytes"
            )
        self._bytes[tenant] += size

    async def add(self, file: FileObject, is_saved: bool = True) -> None:
        """Save the metadata of a finished file, and list the file. `is_saved`: it must be saved to
        be listed. Raises OSError."""
        file.is_complete = True
        try:
            await asyncio.to_thread(self.save, file.id, msgspec.json.encode(file))
        except OSError as error:
            if is_saved:
                raise
            _log.warning("the metadata of %s was not saved (%s); the next start recovers the file", file.filename, error.strerror)
        self.give_up(file)

    def save(self, name: str, body: bytes) -> None:
        """Write `{name}.json`, the metadata of a file or a batch, atomically."""
        assert is_name(name)
        save(self.folder / f"{name}.json", body)

    def discard(self, file: FileObject) -> None:
        """Delete a file that this server writes. Its bytes return to the quota, even where the disk
        reports an error; the next start deletes it then."""
        with suppress(OSError):
            self._unlink(file.id)
        self.give_up(file)
        self._drop(file.id)

    def _unlink(self, name: str) -> None:
        """Delete the data first: the next start removes metadata without data, not the reverse."""
        for path in (self.path(name), self.folder / f"{name}.jsonl.new", self.folder / f"{name}.json"):
            path.unlink(missing_ok=True)


class FileWriter:
    """A file that is being written. Each piece is written as a whole or not at all."""

    def __init__(self, store: FileStore, file: FileObject, handle: FileIO) -> None:
        self._store = store
        self._file = file
        self._handle = handle  # without a buffer, whose content a full disk would keep from closing

    def append(self, piece: bytes) -> None:
        """Write a piece on the calling thread. Raises StorageFullError, OSError."""
        self._count(len(piece))
        try:
            self._write(piece)
        except OSError:
            self._store.release_bytes(len(piece), self._file.tenant)
            self._file.bytes -= len(piece)
            raise

    async def write(self, piece: bytes) -> None:
        """Write a piece in a thread, one at a time. The file is abandoned after an error. Raises
        StorageFullError, OSError."""
        self._count(len(piece))
        await asyncio.to_thread(self._write, piece)

    def _count(self, size: int) -> None:
        self._store.reserve_bytes(size, self._file)
        self._file.bytes += size

    def _write(self, piece: bytes) -> None:
        end, rest = self._handle.tell(), memoryview(piece)
        try:
            while rest:
                rest = rest[self._handle.write(rest) :]
        except OSError:
            with suppress(OSError):  # a read-only disk; the next piece is written there anyway
                self._handle.truncate(end)
            self._handle.seek(end)
            raise

    @property
    def path(self) -> Path:
        return self._store.path(self._file.id)

    @property
    def is_empty(self) -> bool:
        return self._file.bytes == 0

    async def finish(self) -> FileObject:
        """Close the file and list it. Raises OSError."""
        self._handle.close()
        await self._store.add(self._file)
        return self._file

    async def publish(self) -> FileObject:
        """`finish` for a file whose content must stay readable although the disk is full."""
        try:
            self._handle.close()
        except OSError as error:  # a network disk may report here what it could not write
            _log.warning("%s could not be closed: %s", self._file.filename, error.strerror)
        await self._store.add(self._file, is_saved=False)
        return self._file

    def release(self) -> None:
        """Close the file unfinished: another server may go on with it."""
        with suppress(OSError):
            self._handle.close()
        self._store.give_up(self._file)

    def abandon(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            self._handle.close()
        self._store.discard(self._file)


def _cut_to_lines(path: Path) -> int:
    """Cut off what follows the last end of a line. Returns the size. Raises OSError."""
    with open(path, "r+b", opener=private) as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                size = content.rfind(b"\n") + 1
            file.truncate(size)
        return size

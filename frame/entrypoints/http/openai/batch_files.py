"""Files of the Batch API on disk: uploads and batch outputs, bounded in bytes and number.

Each file has a metadata file beside it. Used by the routes of files and by the batch runner. Must
not depend on HTTP or the engine. Disk work runs in threads; sizes are counted on the event loop.
The store deletes only files that its own metadata names, because the folder may hold other files.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import mmap
import os
import re
import time
import uuid
from collections import Counter
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO, Protocol, Self, TypeVar

import msgspec

from frame.config.server_sections import BatchesSection
from frame.core.errors import ConfigurationError

_log = logging.getLogger(__name__)

MAX_FILES = 10_000
BLOCK_BYTES = 64 * 1024  # of an input file, read at a time: a thread holds the interpreter's lock for about 3 ms
MAX_LINE_BYTES = 32 * 1024 * 1024
LOCK = ".frame-lock"  # file in the folder that the server locks while it uses the folder
_NAME = re.compile(r"(file|batch)-[0-9a-f]{32}")


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


class InvalidInputError(Exception):
    """The input file of a batch cannot be run. The message is for the client."""


def make_folder(folder: Path) -> None:
    """Make the folder of `batches.folder`. Raises ConfigurationError if it is in use."""
    lock_folder(folder).close()


def lock_folder(folder: Path) -> IO[bytes]:
    """Make the folder and lock it until the returned file is closed or the process ends. Raises
    ConfigurationError if the folder cannot be made, or if another server has locked it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / LOCK, "ab", opener=_private)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise ConfigurationError(f"batches.folder {folder} cannot be made or written ({error.strerror}); choose another") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        why = "is in use by another server" if isinstance(error, BlockingIOError) else f"cannot be locked ({error.strerror})"
        raise ConfigurationError(f"batches.folder {folder} {why}; choose another") from error
    return lock


class FileStore:
    """The files of one folder, which it makes and locks. Files of an earlier run are loaded again.

    Tenants with an API key have quotas. Raises ConfigurationError where the folder cannot be used.
    """

    def __init__(self, config: BatchesSection) -> None:
        self.folder = Path(config.folder or "")
        self._config = config
        self._lock = lock_folder(self.folder)
        self._files: dict[str, FileObject] = {}
        self._bytes: Counter[str] = Counter()  # by tenant, with files that are being written
        self._num_files: Counter[str] = Counter()  # by tenant, likewise
        for file in sorted(load_all(self.folder, "file-*.json", _file_decoder), key=lambda file: file.created_at):
            if not file.is_complete and not self._recover(file):
                continue
            self._files[file.id] = file
            self._bytes[file.tenant] += file.bytes
            self._num_files[file.tenant] += 1

    def _recover(self, file: FileObject) -> bool:
        """Whether the whole lines of a file stay, of which the server ended while it was written:
        those of a batch's output do. Else the file is deleted."""
        try:
            if file.purpose == "batch_output":
                file.bytes = _cut_to_lines(self.path(file.id))
            if not file.bytes:
                self._unlink(file.id)
                return False
            file.is_complete = True
            self.save(file.id, msgspec.json.encode(file))
        except OSError as error:  # a full or read-only disk; the next start tries again
            _log.warning("%s was not saved again or deleted: %s", file.filename, error.strerror)
        return file.is_complete

    def close(self) -> None:
        """Unlock the folder."""
        self._lock.close()

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def get(self, name: str, tenant: str) -> FileObject | None:
        """The metadata of a file of this tenant; None if there is none."""
        file = self._files.get(name)
        return file if file is not None and file.tenant == tenant else None

    def list_files(self, tenant: str) -> list[FileObject]:
        """The files of this tenant, oldest first."""
        return [file for file in self._files.values() if file.tenant == tenant]

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
        maximum = self._config.max_files_per_key
        if tenant and self._num_files[tenant] >= maximum:
            raise StorageFullError(f"this key has {maximum} files, the limit of batches.max_files_per_key; delete some")
        if self._num_files.total() >= MAX_FILES:
            raise StorageFullError(f"the server has {MAX_FILES} files, its limit; delete some")
        name = f"file-{uuid.uuid4().hex}"
        file = FileObject(
            id=name, filename=filename[:255], purpose=purpose, bytes=0, created_at=int(time.time()), tenant=tenant, is_complete=False
        )
        self._num_files[tenant] += 1
        try:
            return await asyncio.to_thread(self._open, file)
        except BaseException:
            self._num_files[tenant] -= 1
            raise

    def _open(self, file: FileObject) -> FileWriter:
        """Save the metadata first, so that the next start finds a file that a crash left."""
        self.save(file.id, msgspec.json.encode(file))
        return FileWriter(self, file, open(self.path(file.id), "xb", buffering=0, opener=_private))

    async def delete(self, file: FileObject) -> None:
        """Raises OSError, and keeps the file then."""
        await asyncio.to_thread(self._unlink, file.id)
        if self._files.pop(file.id, None) is not None:
            self.release_quota(file)

    def release_quota(self, file: FileObject) -> None:
        """Return the file and its bytes to the tenant's quota."""
        self._num_files[file.tenant] -= 1
        self._bytes[file.tenant] -= file.bytes

    def release_bytes(self, size: int, tenant: str) -> None:
        """Return bytes that were reserved and not written."""
        self._bytes[tenant] -= size

    def reserve_bytes(self, size: int, tenant: str) -> None:
        """Add `size` bytes to the tenant's files. Raises StorageFullError."""
        maximum, per_key = self._config.max_bytes, self._config.max_bytes_per_key
        if tenant and self._bytes[tenant] + size > per_key:
            raise StorageFullError(
                f"files of this key have {self._bytes[tenant]} of {per_key} bytes (batches.max_bytes_per_key), and {size} more do not fit;"
                " delete some"
            )
        if self.num_bytes + size > maximum:
            raise StorageFullError(
                f"files have {self.num_bytes} of {maximum} bytes (batches.max_bytes), and {size} more do not fit; delete some,"
                " or start the server with a larger --batch-max-bytes"
            )
        self._bytes[tenant] += size

    async def add(self, file: FileObject, is_saved: bool = True) -> None:
        """Save the metadata of a finished file, and list the file. `is_saved`: it must be saved to
        be listed. Raises OSError."""
        try:
            await asyncio.to_thread(self.save, file.id, msgspec.json.encode(file))
        except OSError as error:
            if is_saved:
                raise
            _log.warning("the metadata of %s was not saved (%s); the next start recovers the file", file.filename, error.strerror)
        self._files[file.id] = file

    def save(self, name: str, body: bytes) -> None:
        """Write `{name}.json`, the metadata of a file or a batch, atomically."""
        assert _NAME.fullmatch(name)
        new = self.folder / f"{name}.json.new"
        try:
            with open(new, "wb", opener=_private) as file:
                file.write(body)
            new.replace(self.folder / f"{name}.json")
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise

    def _unlink(self, name: str) -> None:
        """Delete the data first: the next start removes metadata without data, not the reverse."""
        for path in (self.path(name), self.folder / f"{name}.json"):
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
        self._store.reserve_bytes(size, self._file.tenant)
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
    def is_empty(self) -> bool:
        return self._file.bytes == 0

    async def finish(self) -> FileObject:
        """Close the file and list it. Raises OSError."""
        self._handle.close()
        self._file.is_complete = True
        await self._store.add(self._file)
        return self._file

    async def publish(self) -> FileObject:
        """`finish` for a file whose content must stay readable although the disk is full."""
        try:
            self._handle.close()
        except OSError as error:  # a network disk may report here what it could not write
            _log.warning("%s could not be closed: %s", self._file.filename, error.strerror)
        self._file.is_complete = True
        await self._store.add(self._file, is_saved=False)
        return self._file

    def abandon(self) -> None:
        """Delete the file. Its bytes return to the quota, even where the disk reports an error; the
        next start deletes it then."""
        with suppress(OSError):
            self._handle.close()
        self._store.release_quota(self._file)
        with suppress(OSError):
            self._store._unlink(self._file.id)  # noqa: SLF001 - same module


def _cut_to_lines(path: Path) -> int:
    """Cut off what follows the last end of a line. Returns the size. Raises OSError."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                size = content.rfind(b"\n") + 1
            file.truncate(size)
        return size


class LineReader:
    """The lines of a file with at most `max_requests` lines and as many empty ones. A context
    manager; the file is opened by the first read."""

    def __init__(self, path: Path, max_requests: int) -> None:
        self._path = path
        self._max_requests = max_requests
        self._file: BinaryIO | None = None
        self._rest = bytearray()  # the beginning of a line
        self._num_lines = self._num_requests = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def read_block(self) -> list[bytes] | None:
        """The lines that end in the next block, without empty ones. None: the file has ended.
        Raises InvalidInputError, OSError."""
        if self._file is None:
            self._file = self._path.open("rb")
        block = self._file.read(BLOCK_BYTES)
        if not block and not self._rest:
            return None
        self._num_lines += block.count(b"\n")  # before the block is split, because lines cost more than bytes
        if self._num_lines > 2 * self._max_requests:
            raise InvalidInputError(f"the file has more than {self._max_requests} requests and as many empty lines; leave empty lines out")
        *lines, rest = block.split(b"\n") if block else (b"", b"")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest.clear()
        self._rest += rest
        if max(len(self._rest), len(lines[0]) if lines else 0) > MAX_LINE_BYTES:
            raise InvalidInputError(f"a line is longer than {MAX_LINE_BYTES} bytes; send less in one request")
        lines = [line for line in lines if line and not line.isspace()]
        self._num_requests += len(lines)
        if self._num_requests > self._max_requests:
            remedy = "split it, or start the server with a larger --batch-max-requests"
            raise InvalidInputError(f"the file has more than {self._max_requests} requests; {remedy}")
        return lines


class _Named(Protocol):
    id: str


T = TypeVar("T", bound=_Named)


def load_all(folder: Path, pattern: str, decoder: msgspec.json.Decoder[T]) -> list[T]:
    """The structs that an earlier run saved in `folder`. Files that cannot be read, or have a name
    that this store does not give, are left with a warning."""
    structs = []
    for path in folder.glob(pattern):
        try:
            one = decoder.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s is left out: %s", path.name, error)
            continue
        if one.id == path.stem and _NAME.fullmatch(one.id):
            structs.append(one)
        else:
            _log.warning("%s is left out: its name is not that of its id", path.name)
    return structs


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

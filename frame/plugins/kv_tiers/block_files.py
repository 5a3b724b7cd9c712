"""A folder with one file for each block of the KV cache, for the tier `disk`. Several processes may
use a folder: a file is complete from its rename on, and never changed. Must not know a quota."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from frame.core.errors import ConfigurationError
from frame.plugins.kv_tiers.buffers import compute_digest
from frame.plugins.kv_tiers.threaded_tier import BlockError

# Magic with version, identity, key, bytes of the block, and its XXH3 in 128 bits.
_HEADER = struct.Struct("<8s32s32sQ16s")
HEADER_BYTES = _HEADER.size
_MAGIC = b"frameKV1"
_NAME = re.compile(r"([0-9a-f]{64})\.kv")
_TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
_TEMPORARY_SECONDS = 600  # after which a file that was not renamed is left over from a killed process
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a FIFO would wait for a writer
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class BlockFiles:
    """The blocks of one identity. Threads call its methods at the same time."""

    def __init__(self, folder: Path, identity: str, block_bytes: int) -> None:
        """Raises ConfigurationError for a folder that cannot be used."""
        self._identity = blake2b(identity.encode(), digest_size=32).digest()
        self.file_bytes = _HEADER.size + block_bytes
        self.path = folder / self._identity[:16].hex()  # blocks of another model are in another one
        self._folder = folder
        self._make_folders()

    def _make_folders(self) -> None:
        """Other threads and processes may make them at the same time. Raises ConfigurationError."""
        _make_private(self._folder)
        _make_private(self.path, follow_symlinks=False)

    def write_block(self, key: bytes, block: memoryview) -> None:
        """Write the file of a block, or leave none. Raises BlockError."""
        header = _HEADER.pack(_MAGIC, self._identity, key, len(block), compute_digest(block))
        target = self._locate(key)
        temporary = target.with_name(f".{target.stem}.{secrets.token_hex(8)}.tmp")
        try:
            try:
                _write_file(temporary, (memoryview(header), block))
            except FileNotFoundError:  # the folder was removed meanwhile
                self._make_folders()
                _write_file(temporary, (memoryview(header), block))
            temporary.replace(target)
        except (OSError, ConfigurationError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            why = error.strerror if isinstance(error, OSError) else error
            raise BlockError(f"the disk tier cannot write a block to {self.path}: {why}") from error

    def read_block(self, key: bytes, block: memoryview) -> None:
        """Read the file of a block. Raises BlockError for one that is missing or has changed."""
        header = bytearray(_HEADER.size)
        try:
            is_whole = _read_file(self._locate(key), (memoryview(header), block))
        except FileNotFoundError as error:
            raise BlockError(f"a block is missing in {self.path}") from error
        except OSError as error:
            raise BlockError(f"the disk tier cannot read a block from {self.path}: {error.strerror}") from error
        if not is_whole:
            raise BlockError(f"the file of a block in {self.path} has another size")
        if header != _HEADER.pack(_MAGIC, self._identity, key, len(block), compute_digest(block)):
            raise BlockError(f"the file of a block in {self.path} has changed")

    def remove_block(self, key: bytes) -> None:
        """Remove the file of a block, if there is one that can be removed."""
        with contextlib.suppress(OSError):
            self._locate(key).unlink()

    def find_blocks(self, known: set[str], is_stopped: Callable[[], bool]) -> tuple[set[str], list[bytes]]:
        """-> the names of all blocks, and the keys of those that are not in `known`, the most
        recently used first. Removes what killed processes have left. Other files are ignored."""
        names: set[str] = set()
        added: list[tuple[float, bytes]] = []
        oldest = time.time() - _TEMPORARY_SECONDS
        for file in self._list_files(is_stopped):
            if match := _NAME.fullmatch(file.name):
                names.add(file.name)
                if file.name not in known and (status := _read_status(file)) and status.st_size == self.file_bytes:
                    added.append((status.st_mtime, bytes.fromhex(match[1])))
            elif _TEMPORARY_NAME.fullmatch(file.name) and (status := _read_status(file)) and status.st_mtime < oldest:
                with contextlib.suppress(OSError):
                    Path(file.path).unlink()
        return names, [key for _, key in sorted(added, reverse=True)]

    def _list_files(self, is_stopped: Callable[[], bool]) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(OSError), os.scandir(self.path) as files:
            for file in files:
                if is_stopped():
                    return
                yield file

    def _locate(self, key: bytes) -> Path:
        return self.path / f"{key.hex()}.kv"


def _make_private(folder: Path, *, follow_symlinks: bool = True) -> None:
    """Create a folder for this user alone, or check that no other user can write it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat(follow_symlinks=follow_symlinks)
    except OSError as error:
        raise ConfigurationError(f"kv_tier/disk cannot use the folder {folder}: {error.strerror}; name another folder.") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigurationError(f"kv_tier/disk does not follow the symbolic link {folder}; remove it or name another folder.")
    if status.st_uid != os.geteuid():
        raise ConfigurationError(f"The folder {folder} of kv_tier/disk belongs to another user; name another folder.")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise ConfigurationError(f"Other users can write the folder {folder} of kv_tier/disk; run chmod 700 on it or name another folder.")


def _read_status(file: os.DirEntry[str]) -> os.stat_result | None:
    """None: it is no regular file."""
    try:
        status = file.stat(follow_symlinks=False)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _write_file(path: Path, pieces: Sequence[memoryview]) -> None:
    descriptor = os.open(path, _WRITE, 0o600)
    try:
        for piece in pieces:
            start = 0
            while start < len(piece):
                start += os.write(descriptor, piece[start:])
    finally:
        os.close(descriptor)


def _read_file(path: Path, pieces: Sequence[memoryview]) -> bool:
    """Whether the file has the length of the pieces, and is a regular one. Marks it as used."""
    descriptor = os.open(path, _READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != sum(map(len, pieces)):
            return False
        for piece in pieces:
            start = 0
            while start < len(piece):
                count = os.readv(descriptor, [piece[start:]])
                if not count:
                    return False
                start += count
        with contextlib.suppress(OSError):  # of a disk that is read only
            os.utime(descriptor)
        return True
    finally:
        os.close(descriptor)

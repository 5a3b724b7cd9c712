"""Files that clients upload and that batches write: in one folder, each beside a card of it, within bounds on their bytes and number.

Used by the routes of files and by the batch runner. Knows no HTTP and no engine. Disk work is done in threads, counting on the
loop. The folder may hold other things: only files that a card of this store names are ever deleted.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import time
import uuid
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol, TypeVar

import msgspec

from frame.core.config.schema import BatchesSection
from frame.core.errors import ConfigurationError

_log = logging.getLogger(__name__)

MOST_FILES = 10_000
LOCK = ".frame-lock"  # the file in the folder that the server which uses it keeps locked
_NAME = re.compile(r"(file|batch)-[0-9a-f]{32}")


class Card(msgspec.Struct, kw_only=True):
    """What is known of a file; `tenant` is whose it is, and is not shown. `is_complete`: the file is whole."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    tenant: str
    is_complete: bool = True

    def shown(self) -> dict[str, Any]:
        """As OpenAI's clients know it."""
        shown = {name: getattr(self, name) for name in ("id", "filename", "purpose", "bytes", "created_at")}
        return {**shown, "object": "file", "status": "processed"}


_card_decoder = msgspec.json.Decoder(Card)


class NoRoomError(Exception):
    """No more may be kept; a sentence for the client."""


def make_folder(folder: Path) -> None:
    """The folder of `batches.folder`, for nobody else to read, and in use by no other server. Raises ConfigurationError."""
    lock_folder(folder).close()


def lock_folder(folder: Path) -> IO[bytes]:
    """Make the folder and lock it until what is returned is closed, or this process ends. Raises ConfigurationError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(folder / LOCK, "ab", opener=_private)  # noqa: SIM115 - closed by who locks
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
    """The files of a folder, which it makes and locks; those of an earlier run are there again. Tenants with a key have quotas."""

    def __init__(self, config: BatchesSection) -> None:
        self.folder = Path(config.folder or "")
        self._config = config
        self._lock = lock_folder(self.folder)
        self._cards: dict[str, Card] = {}
        self._bytes: Counter[str] = Counter()  # by tenant, as are the slots; of files in the making too
        self._slots: Counter[str] = Counter()
        for card in sorted(read_all(self.folder, "file-*.json", _card_decoder), key=lambda card: card.created_at):
            if not card.is_complete:  # cut off while it was written
                self._unlink(card.id)
                continue
            self._cards[card.id] = card
            self._bytes[card.tenant] += card.bytes
            self._slots[card.tenant] += 1

    def close(self) -> None:
        """Let another server use the folder."""
        self._lock.close()

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def get(self, name: str, tenant: str) -> Card | None:
        """The file's card, unless it is another's."""
        card = self._cards.get(name)
        return card if card is not None and card.tenant == tenant else None

    def owned(self, tenant: str) -> list[Card]:
        """The newest first."""
        return [card for card in reversed(self._cards.values()) if card.tenant == tenant]

    async def create(self, content: bytes, filename: str, purpose: str, tenant: str) -> Card:
        """Keep a whole file. Raises NoRoomError, OSError."""
        output = await self.begin(filename, purpose, tenant)
        try:
            await output.write(content)
            return await output.finish()
        except BaseException:
            output.abandon()
            raise

    async def begin(self, filename: str, purpose: str, tenant: str) -> Output:
        """A file that is written piece by piece, and is there once it is finished. Raises NoRoomError, OSError."""
        most = self._config.max_files_per_key
        if tenant and self._slots[tenant] >= most:
            raise NoRoomError(f"this key has {most} files, which is all that batches.max_files_per_key allows; delete some")
        if self._slots.total() >= MOST_FILES:
            raise NoRoomError(f"there are {MOST_FILES} files, which is all that are kept; delete some")
        name = f"file-{uuid.uuid4().hex}"
        card = Card(
            id=name, filename=filename[:255], purpose=purpose, bytes=0, created_at=int(time.time()), tenant=tenant, is_complete=False
        )
        self._slots[tenant] += 1
        try:
            return await asyncio.to_thread(self._open, card)
        except BaseException:
            self._slots[tenant] -= 1
            raise

    def _open(self, card: Card) -> Output:
        """The card goes first: what it names is known to be this store's, whenever the server ends."""
        self.save(card.id, msgspec.json.encode(card))
        return Output(self, card, open(self.path(card.id), "xb", opener=_private))

    async def delete(self, card: Card) -> None:
        """Forget a file."""
        if self._cards.pop(card.id, None) is not None:
            self.give_back(card)
            await asyncio.to_thread(self._unlink, card.id)

    def give_back(self, card: Card) -> None:
        """The slot and the bytes of a file."""
        self._slots[card.tenant] -= 1
        self._bytes[card.tenant] -= card.bytes

    def take_bytes(self, size: int, tenant: str) -> None:
        """Count `size` bytes more. Raises NoRoomError."""
        most, own = self._config.max_bytes, self._config.max_bytes_per_key
        if tenant and self._bytes[tenant] + size > own:
            raise NoRoomError(
                f"files of this key take {self._bytes[tenant]} of {own} bytes (batches.max_bytes_per_key), and {size} more are too many;"
                " delete some"
            )
        if self.num_bytes + size > most:
            raise NoRoomError(
                f"files take {self.num_bytes} bytes of the {most} that they may, and {size} more are too many; delete some,"
                " or serve with a larger --batch-max-bytes"
            )
        self._bytes[tenant] += size

    async def add(self, card: Card) -> None:
        """A finished file's card, on disk and in the list."""
        await asyncio.to_thread(self.save, card.id, msgspec.json.encode(card))
        self._cards[card.id] = card

    def save(self, name: str, body: bytes) -> None:
        """A card or a batch, whole or not at all."""
        assert _NAME.fullmatch(name)
        new = self.folder / f"{name}.json.new"
        with open(new, "wb", opener=_private) as card:
            card.write(body)
        new.replace(self.folder / f"{name}.json")

    def _unlink(self, name: str) -> None:
        """The data first: a card without data is cleared away at the next start, data without a card is not."""
        for path in (self.path(name), self.folder / f"{name}.json"):
            path.unlink(missing_ok=True)


class Output:
    """A file in the making."""

    def __init__(self, store: FileStore, card: Card, handle: BinaryIO) -> None:
        self._store = store
        self._card = card
        self._handle = handle

    def append(self, piece: bytes) -> None:
        """Write a piece now. Raises NoRoomError, OSError."""
        self._take(len(piece))
        self._write(piece)

    async def write(self, piece: bytes) -> None:
        """Write a piece in a thread; one at a time. Raises NoRoomError, OSError."""
        self._take(len(piece))
        await asyncio.to_thread(self._write, piece)

    def _take(self, size: int) -> None:
        self._store.take_bytes(size, self._card.tenant)
        self._card.bytes += size

    def _write(self, piece: bytes) -> None:
        self._handle.write(piece)
        self._handle.flush()

    @property
    def is_empty(self) -> bool:
        return self._card.bytes == 0

    async def finish(self) -> Card:
        """The file is whole. Raises OSError."""
        self._handle.close()
        self._card.is_complete = True
        await self._store.add(self._card)
        return self._card

    def abandon(self) -> None:
        """The file will not be. Its room is given back, whatever the disk says."""
        with suppress(OSError):  # a full disk still has no room for what was not written
            self._handle.close()
        self._store.give_back(self._card)
        self._store._unlink(self._card.id)  # noqa: SLF001 - of the same module


class _Named(Protocol):
    id: str


T = TypeVar("T", bound=_Named)


def read_all(folder: Path, pattern: str, decoder: msgspec.json.Decoder[T]) -> list[T]:
    """What an earlier run has saved, by their names; what cannot be read or is not ours is left where it is, with a warning."""
    found = []
    for path in folder.glob(pattern):
        try:
            one = decoder.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s is left out: %s", path.name, error)
            continue
        if one.id == path.stem and _NAME.fullmatch(one.id):
            found.append(one)
        else:
            _log.warning("%s is left out: it was not saved by this server under this name", path.name)
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

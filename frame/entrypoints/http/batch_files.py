"""Files that clients upload and that batches write: in one folder, each beside a card of it, within a bound on their bytes and number.

Knows no HTTP and no engine. Disk work is done in threads; what is counted, on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from frame.core.errors import ConfigurationError

_log = logging.getLogger(__name__)
T = TypeVar("T")

MOST_FILES = 10_000
_NAME = re.compile(r"(file|batch)-[0-9a-f]{32}")


class Card(msgspec.Struct, kw_only=True):
    """What is known of a file; `tenant` is whose it is, and is not shown."""

    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    tenant: str

    def shown(self) -> dict[str, Any]:
        """As OpenAI's clients know it."""
        shown = {name: getattr(self, name) for name in ("id", "filename", "purpose", "bytes", "created_at")}
        return {**shown, "object": "file", "status": "processed"}


_card_decoder = msgspec.json.Decoder(Card)


class NoRoomError(Exception):
    """The files may take no more; a sentence for the client."""


def make_folder(folder: Path) -> None:
    """The folder of `batches.folder`, for nobody else to read. Raises ConfigurationError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"batches.folder {folder} cannot be made ({error.strerror}); choose another") from error


class FileStore:
    """The files of a folder, which it makes; those of an earlier run are there again."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        make_folder(folder)
        cards = read_all(folder, "file-*.json", _card_decoder)
        self._cards = {card.id: card for card in sorted(cards, key=lambda card: card.created_at)}
        for path in folder.glob("file-*.jsonl"):
            if path.stem not in self._cards:  # cut off while it was written
                path.unlink()
        self.num_bytes = sum(card.bytes for card in cards)

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
        output = self.begin(filename, purpose, tenant)
        try:
            self.take(len(content))
            await asyncio.to_thread(output.append, content)
            return await output.finish()
        except BaseException:
            output.abandon()
            raise

    def begin(self, filename: str, purpose: str, tenant: str) -> Output:
        """A file that is written piece by piece, and is there once it is finished. Raises NoRoomError."""
        if len(self._cards) >= MOST_FILES:
            raise NoRoomError(f"there are {MOST_FILES} files, which is all that are kept; delete some")
        name = f"file-{uuid.uuid4().hex}"
        card = Card(id=name, filename=filename[:255], purpose=purpose, bytes=0, created_at=int(time.time()), tenant=tenant)
        return Output(self, card)

    async def delete(self, card: Card) -> None:
        """Forget a file."""
        if self._cards.pop(card.id, None) is not None:
            self.num_bytes -= card.bytes
            await asyncio.to_thread(self._unlink, card.id)

    def take(self, size: int) -> None:
        """Count `size` bytes more. Raises NoRoomError."""
        if self.num_bytes + size > self._max_bytes:
            raise NoRoomError(
                f"files take {self.num_bytes} bytes of the {self._max_bytes} that they may, and {size} more are too many; delete some,"
                " or serve with a larger --batch-max-bytes"
            )
        self.num_bytes += size

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
        for path in (self.folder / f"{name}.json", self.path(name)):
            path.unlink(missing_ok=True)


class Output:
    """A file in the making."""

    def __init__(self, store: FileStore, card: Card) -> None:
        self._store = store
        self._card = card
        self._handle: BinaryIO | None = None

    def append(self, piece: bytes) -> None:
        """A piece for which `take` has found room. Raises OSError."""
        self._card.bytes += len(piece)
        if self._handle is None:
            self._handle = open(self._store.path(self._card.id), "xb", opener=_private)  # noqa: SIM115 - Path.open takes no opener
        self._handle.write(piece)
        self._handle.flush()

    @property
    def is_empty(self) -> bool:
        return self._card.bytes == 0

    async def finish(self) -> Card:
        """The file is whole. Raises OSError."""
        if self._handle is not None:
            self._handle.close()
        await self._store.add(self._card)
        return self._card

    def abandon(self) -> None:
        """The file will not be. Its room is given back, whatever the disk says."""
        if self._handle is not None:
            with suppress(OSError):  # a full disk still has no room for what was not written
                self._handle.close()
            self._store.path(self._card.id).unlink(missing_ok=True)
        self._store.num_bytes -= self._card.bytes
        self._card.bytes = 0


def read_all(folder: Path, pattern: str, decoder: msgspec.json.Decoder[T]) -> list[T]:
    """What an earlier run has saved; what cannot be read is left where it is, with a warning."""
    found = []
    for path in folder.glob(pattern):
        try:
            found.append(decoder.decode(path.read_bytes()))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.warning("%s is left out: %s", path.name, error)
    return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

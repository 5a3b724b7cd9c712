"""`FileKeyStore`: the key of `server.api_key` and those of the file `server.api_keys`. It holds
keyed digests of them."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from frame.core.errors import ConfigurationError
from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreContext, name_tenant

if TYPE_CHECKING:
    from pydantic import BaseModel

HASHED = "sha256:"  # prefix of a line that holds a digest in hexadecimal
DIGEST_LENGTH = hashlib.sha256().digest_size
MAX_FILE_BYTES = 16 * 1024 * 1024


class FileKeyStore(KeyStore):
    """Tenants are looked up by an HMAC of the key's digest, with a secret of this object. A client
    can neither choose nor learn such a tag, so the duration of a lookup reveals nothing about the
    keys, and one dict lookup is enough for any number of keys.
    """

    def __init__(self, context: KeyStoreContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        digests = [] if context.api_key is None else [_digest(context.api_key)]
        if context.api_keys is not None:
            digests += _read(Path(context.api_keys))
        self._secret = secrets.token_bytes()
        self._holders = {self._tag(digest): KeyHolder(name_tenant(digest)) for digest in digests}

    @staticmethod
    def make_conformance_store(folder: Path, keys: dict[str, bool]) -> tuple[KeyStoreContext, None]:
        """A file of the suite's keys, half of them as digests, as editors of Windows write it."""
        file = folder / "keys"
        lines = [key if place % 2 else HASHED + hashlib.sha256(key.encode()).hexdigest() for place, key in enumerate(keys)]
        file.write_bytes("\r\n".join([*lines, "", "# a comment"]).encode("utf-8-sig"))
        return KeyStoreContext(api_keys=str(file)), None

    @staticmethod
    def list_broken_conformance_stores(folder: Path) -> Iterator[tuple[KeyStoreContext, None, str]]:
        """Files that cannot be used, and words of the errors."""
        for number, (content, words) in enumerate(
            (
                (b"\n# none\n", "contains no key"),
                (b"\xff\xfe\x00k", "is not a text file"),
                (f"key\n\n{HASHED}12\n".encode(), "line 3"),
                (f"{HASHED}{'x' * 64}\n".encode(), "line 1"),
            )
        ):
            file = folder / f"{number}"
            file.write_bytes(content)
            yield KeyStoreContext(api_keys=str(file)), None, words
        with (folder / "large").open("wb") as large:
            large.truncate(MAX_FILE_BYTES + 1)
        yield KeyStoreContext(api_keys=str(folder / "large")), None, "is larger than"
        yield KeyStoreContext(api_keys=str(folder / "none")), None, "cannot be read"
        yield KeyStoreContext(api_key=" "), None, "server.api_key is empty"

    async def find_holder(self, key: bytes) -> KeyHolder | None:
        return self._holders.get(self._tag(hashlib.sha256(key).digest()))

    def count_tenants(self) -> int:
        return len(self._holders)

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _digest(key: str) -> bytes:
    if not key.strip():
        raise ConfigurationError("server.api_key is empty; give a key, or leave it out to serve without one")
    return hashlib.sha256(key.strip().encode()).digest()


def _read(path: Path) -> list[bytes]:
    """The digests of a file's keys: one per line, plain or `sha256:HEX`. Empty lines and lines that
    begin with # are skipped."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigurationError(f"server.api_keys: {path} is larger than {MAX_FILE_BYTES} bytes; give a file with one key per line")
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigurationError(f"server.api_keys: {path} cannot be read ({error.strerror}); give a file with one key per line") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"server.api_keys: {path} is not a text file; give a file with one key per line") from error
    digests = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        digests.append(_hashed(key, path, number) if key.startswith(HASHED) else _digest(key))
    if not digests:
        raise ConfigurationError(f"server.api_keys: {path} contains no key; write one key per line")
    return digests


def _hashed(line: str, path: Path, number: int) -> bytes:
    try:
        digest = bytes.fromhex(line.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != DIGEST_LENGTH:
        raise ConfigurationError(f"server.api_keys: line {number} of {path} is not a SHA-256 digest; write {HASHED} and 64 hex digits")
    return digest

"""`KeyRing`: the API keys that a server accepts, and the tenant of each. Keys are stored as digests
and looked up by keyed digests.

`check_exposure` refuses a configuration that other machines could reach without a key. Must not
know a route.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError

HASHED = "sha256:"  # prefix of a line in the key file that holds a digest in hexadecimal
DIGEST_LENGTH = hashlib.sha256().digest_size
MAX_FILE_BYTES = 16 * 1024 * 1024
TENANT_LENGTH = 16  # hexadecimal digits


class KeyRing:
    """Accepts `Authorization: Bearer KEY` and `x-api-key: KEY`. The name of a tenant does not
    reveal its key.

    Tenants are looked up by an HMAC of the key's digest, with a secret of this object. A client can
    neither choose nor learn such a tag, so the duration of a lookup reveals nothing about the keys,
    and one dict lookup is enough for any number of keys.
    """

    def __init__(self, digests: Iterable[bytes]) -> None:
        self._secret = secrets.token_bytes()
        self._tenants = {self._tag(digest): _tenant(digest) for digest in digests}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The tenant of a request; None if it has no accepted key."""
        tenant = None
        for key in _sent_keys(headers):
            tenant = self._tenants.get(self._tag(hashlib.sha256(key).digest()), tenant)
        return tenant

    def replace_keys(self, other: KeyRing) -> None:
        self._secret, self._tenants = other._secret, other._tenants

    def _tag(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _sent_keys(headers: Sequence[tuple[bytes, bytes]]) -> list[bytes]:
    """The first key in each of the two places."""
    bearer = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = bearer.partition(b" ")
    plain = next((value for name, value in headers if name == b"x-api-key"), b"")
    return [sent for sent in (key.strip() if scheme.lower() == b"bearer" else b"", plain.strip()) if sent]


def _tenant(digest: bytes) -> str:
    return hashlib.sha256(b"tenant" + digest).hexdigest()[:TENANT_LENGTH]


def tenant_of(text: str) -> str:
    """The tenant of a key, from `sha256:` and its digest. Raises ValueError."""
    digest = bytes.fromhex(text.removeprefix(HASHED))
    if len(digest) != DIGEST_LENGTH or not text.startswith(HASHED):
        raise ValueError(f"write {HASHED} and 64 hex digits")
    return _tenant(digest)


def load_keys(server: ServerSection) -> KeyRing | None:
    """The keys of a configuration; None without any. Raises ConfigurationError."""
    if server.api_key is None and server.api_keys is None:
        return None
    digests = [] if server.api_key is None else [_digest(server.api_key)]
    if server.api_keys is not None:
        digests += _read(Path(server.api_keys))
    return KeyRing(digests)


def ring_of(key: str, name: str) -> KeyRing:
    """A ring of one key, from the setting `name`."""
    return KeyRing([_digest(key, name)])


def _digest(key: str, name: str = "server.api_key") -> bytes:
    if not key.strip():
        raise ConfigurationError(f"{name} is empty; give a key, or leave it out to serve without one")
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


def check_exposure(server: ServerSection) -> None:
    """Raise ConfigurationError for an address that others reach without a key."""
    if load_keys(server) is None and not server.insecure and not is_local(server.host):
        raise ConfigurationError(
            f"server.host is {server.host}, which other machines can reach, and there is no API key; set --api-key or --api-keys,"
            " listen on 127.0.0.1, or set --insecure to serve every client that can reach it"
        )
    if server.admin_port is not None and server.admin_key is None and not server.insecure and not is_local(server.admin_host):
        raise ConfigurationError(
            f"server.admin_host is {server.admin_host}, which others can reach, and there is no admin key; set --admin-key, listen on"
            " 127.0.0.1, or set --insecure"
        )
    if server.admin_key is not None:
        ring_of(server.admin_key, "server.admin_key")  # raises for an empty key


def is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, which is not resolved here
        return False

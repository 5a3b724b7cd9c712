"""`KeyAccess`: the key store of a server, as all of its protocols ask it. `AdminKey`: the key of
operators.

`check_exposure` refuses a configuration that other machines could reach without a key. Must not
know a route or a key store by name.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.interfaces.keys import KeyHolder, KeyStore, KeyStoreContext, name_tenant

if TYPE_CHECKING:
    from frame.config.resolved import Resolved
    from frame.plugins.registry import Registry

HASHED = "sha256:"  # prefix of a digest in hexadecimal, by which operators name the owner of an adapter
DIGEST_LENGTH = hashlib.sha256().digest_size
MAX_KEY_BYTES = 8192

Headers = Sequence[tuple[bytes, bytes]]


class KeyAccess:
    """Accepts `Authorization: Bearer KEY` and `x-api-key: KEY`. `make` builds the key store from
    the configuration, at the start and again for each reload; raises ConfigurationError."""

    def __init__(self, make: Callable[[], KeyStore]) -> None:
        self.make_store = make
        self._store = make()

    @property
    def num_tenants(self) -> int:
        """Tenants that share the server's places, as the store knows or estimates them."""
        return self._store.count_tenants()

    async def find_holder(self, headers: Headers) -> KeyHolder | None:
        """The holder of a request's key; None if it has no accepted one. Raises KeyStoreError, and
        whatever a plugin raises."""
        holder = None
        for key in list_sent_keys(headers):
            holder = await self._store.find_holder(key) or holder
        return holder

    async def use_store(self, store: KeyStore) -> None:
        """Ask this store from now on, and close the one before."""
        before, self._store = self._store, store
        await before.close()

    async def close(self) -> None:
        await self._store.close()


def open_keys(resolved: Resolved, registry: Registry) -> KeyAccess | None:
    """The keys of a configuration; None without any. Raises ConfigurationError."""
    if not resolved.plugins.get("key_store"):
        return None
    server, choice = resolved.user.server, resolved.choice("key_store")
    context = KeyStoreContext(server.api_key, server.api_keys)
    return KeyAccess(lambda: registry.create(choice, context))


class AdminKey:
    """The key of operators, from the setting `server.admin_key`."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.strip().encode()).digest()

    def opens(self, headers: Headers) -> bool:
        """Whether the request brings the key."""
        return any(hmac.compare_digest(hashlib.sha256(key).digest(), self._digest) for key in list_sent_keys(headers))


def list_sent_keys(headers: Headers) -> list[bytes]:
    """The first key in each of the two places."""
    bearer = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, key = bearer.partition(b" ")
    plain = next((value for name, value in headers if name == b"x-api-key"), b"")
    keys = (key.strip() if scheme.lower() == b"bearer" else b"", plain.strip())
    return [sent for sent in keys if 0 < len(sent) <= MAX_KEY_BYTES]


def tenant_of(text: str) -> str:
    """The tenant of a key of the settings, from `sha256:` and its digest. Raises ValueError."""
    digest = bytes.fromhex(text.removeprefix(HASHED))
    if len(digest) != DIGEST_LENGTH or not text.startswith(HASHED):
        raise ValueError(f"write {HASHED} and 64 hex digits")
    return name_tenant(digest)


def has_keys(server: ServerSection) -> bool:
    """Whether requests need a key."""
    return server.api_key is not None or server.api_keys is not None or server.key_store is not None


def check_exposure(server: ServerSection) -> None:
    """Raise ConfigurationError for an address that others reach without a key, and for empty
    settings of keys."""
    for name in ("api_key", "api_keys", "key_store", "admin_key"):
        value = getattr(server, name)
        if value is not None and not value.strip():
            raise ConfigurationError(f"server.{name} is empty; give a value, or leave it out")
    if not has_keys(server) and not server.insecure and not is_local(server.host):
        raise ConfigurationError(
            f"server.host is {server.host}, which other machines can reach, and there is no API key; set --api-key or --api-keys,"
            " listen on 127.0.0.1, or set --insecure to serve every client that can reach it"
        )
    if server.admin_port is not None and server.admin_key is None and not server.insecure and not is_local(server.admin_host):
        raise ConfigurationError(
            f"server.admin_host is {server.admin_host}, which others can reach, and there is no admin key; set --admin-key, listen on"
            " 127.0.0.1, or set --insecure"
        )


def is_local(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a host name, which is not resolved here
        return False

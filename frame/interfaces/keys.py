"""The interface of key stores: whose API key a request has (kind `key_store`).

The HTTP and gRPC servers call it for each request of a route that is not open to all. Imports no
torch. Must not know HTTP, a route or a quota.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frame.core.interfaces.plugin import Reason

if TYPE_CHECKING:
    from pydantic import BaseModel

TENANT_LENGTH = 16  # hexadecimal digits of a name that `name_tenant` makes
_TENANT = re.compile(r"[!-~]{1,64}")


class KeyStoreError(Exception):
    """A key cannot be checked now: one sentence for the log. The request is refused with 503."""


def name_tenant(digest: bytes) -> str:
    """The name of a tenant, from a digest of its key or account, which it does not reveal."""
    return hashlib.sha256(b"tenant" + digest).hexdigest()[:TENANT_LENGTH]


@dataclass(frozen=True, slots=True)
class KeyStoreRequirements:
    """What a configuration has. has_keys: `server.api_key` or `server.api_keys`."""

    has_keys: bool


@dataclass(frozen=True, slots=True)
class KeyStoreCapabilities:
    """What a key store reads, and which access it knows."""

    reads_settings: bool = False  # it has the keys of `server.api_key` and `server.api_keys`, and no others
    has_operators: bool = False  # a key may open operators' routes too

    def unsupported(self, requirements: Any) -> list[Reason]:
        if requirements.has_keys and not self.reads_settings:
            return [Reason("has keys of its own, and reads neither server.api_key nor server.api_keys")]
        if self.reads_settings and not requirements.has_keys:
            return [Reason("has the keys of server.api_key and server.api_keys, of which none is set")]
        return []


@dataclass(frozen=True, slots=True)
class KeyStoreContext:
    """What a key store is built for. A store keeps no key that it can do without."""

    api_key: str | None = None  # `server.api_key`
    api_keys: str | None = None  # `server.api_keys`, a path


@dataclass(frozen=True, slots=True)
class KeyHolder:
    """Who sent a request. Quotas, cached prefixes and stored responses belong to the tenant."""

    tenant: str  # 1 to 64 visible ASCII characters, which reveal no key; the same in each process and after a restart
    is_operator: bool = False  # may use operators' routes as well

    def __post_init__(self) -> None:
        if not _TENANT.fullmatch(self.tenant):
            raise ValueError(f"the tenant is {self.tenant[:80]!r}; its name has 1 to 64 visible ASCII characters")


class KeyStore(ABC):
    """Knows the holders of keys.

    Contract: an event loop calls it, so no method waits for anything but by `await`, and several
    calls run at once. What it remembers is bounded, and for a time that its documentation states.
    SIGHUP builds another store, which takes the place of the first when it has been built.
    """

    def __init__(self, context: KeyStoreContext, options: BaseModel | None = None) -> None:
        """Raises ConfigurationError for settings that cannot be used."""

    @abstractmethod
    async def find_holder(self, key: bytes) -> KeyHolder | None:
        """The holder of a key of up to 8,192 bytes, as it was sent; None: the key is not accepted.
        Raises KeyStoreError where this cannot be known now: then the request is refused. Never
        returns a holder that was not confirmed."""

    def count_tenants(self) -> int:
        """How many tenants share the server's places; an estimate where they are not known."""
        return 1

    async def close(self) -> None:
        """Close connections. May be called twice; calls of `find_holder` may still run: they return
        the holder or raise, since None would refuse a key that is valid."""

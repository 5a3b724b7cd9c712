"""Web pages: which origins may use the API (`Cors`), and what protects a server without keys from
all others (`why_foreign`).

A browser names the page that a request comes from (`Origin`), and lets any page send simple
requests to any address; it hands the answer to the page only where the answer's headers allow the
origin. A page may also give its own name the address of this machine (DNS rebinding); then only
`Host` shows it, and what it reads (GET) comes without `Origin`, as from clients that are no
browsers.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError

LOCAL_NAMES = ("localhost", "localhost.localdomain")
MAX_LENGTH = 200  # characters of a name that are shown
MAX_AGE = b"600"  # seconds that a browser may keep the answer to a preflight
EXPOSED = b"x-request-id, request-id, retry-after"  # headers that a page with credentials may read; others may read all
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,1000}")  # of headers

Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Cors:
    """What pages of other origins may do. The routes of operators are never for them."""

    origins: frozenset[bytes]
    allows_all: bool
    with_credentials: bool

    def allows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether the request comes from a page that may use the API."""
        origin = dict(headers).get(b"origin")
        return origin is not None and (self.allows_all or origin.lower() in self.origins)

    def response_headers(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        """Headers of every response to such a request, errors too."""
        vary = () if self.allows_all else ((b"vary", b"origin"),)
        if not self.allows(headers):
            return vary
        exposed = (b"access-control-expose-headers", EXPOSED if self.with_credentials else b"*")
        return (*vary, *self._allowed(headers), exposed)

    def preflight_headers(self, headers: Sequence[tuple[bytes, bytes]], methods: Sequence[str]) -> Headers:
        """The answer to a preflight: the path's methods and the headers asked for."""
        requested = dict(headers).get(b"access-control-request-headers", b"")
        echoed = ((b"access-control-allow-headers", requested),) if _NAMES.fullmatch(requested) else ()
        allowed = (b"access-control-allow-methods", ", ".join(methods).encode())
        vary = (b"vary", b"origin, access-control-request-headers")
        return (vary, *self._allowed(headers), allowed, *echoed, (b"access-control-max-age", MAX_AGE))

    def _allowed(self, headers: Sequence[tuple[bytes, bytes]]) -> Headers:
        allowed = (b"access-control-allow-origin", b"*" if self.allows_all else dict(headers)[b"origin"])
        return (allowed, (b"access-control-allow-credentials", b"true")) if self.with_credentials else (allowed,)


def is_preflight(method: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a browser asks if a page may send a request."""
    return method == "OPTIONS" and any(name == b"access-control-request-method" for name, _ in headers)


def read_cors(server: ServerSection) -> Cors | None:
    """What is configured; None: nothing is shared with other origins. Raises ConfigurationError."""
    for origin in server.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigurationError(
                f"server.cors_origins: {origin!r} is no origin; write scheme, host and port as a browser does, such as https://app.example,"
                " or * for all"
            )
    allows_all = "*" in server.cors_origins
    if server.cors_credentials and (allows_all or not server.cors_origins):
        raise ConfigurationError("server.cors_credentials needs server.cors_origins that name each origin; * cannot be used with it")
    if not server.cors_origins:
        return None
    return Cors(frozenset(origin.lower().encode() for origin in server.cors_origins), allows_all, server.cors_credentials)


def why_foreign(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a request may be one of somebody else's page: it comes from another origin than the
    server's, or asks for a name that need not be the server's. A sentence with the remedy, else
    None."""
    by_name = dict(headers)
    origin, host = by_name.get(b"origin"), by_name.get(b"host", b"").decode("latin-1").lower()
    if origin is None:
        if _is_certain(host):
            return None
        remedy = "start it, or the replicas if this name is a router's, with --api-key or --insecure"
        return f"this server has no key and answers to addresses and localhost, not to {host[:MAX_LENGTH]}; {remedy}"
    page = origin.decode("latin-1").lower()
    if host and page.partition("://")[2] == host and _is_certain(host):
        return None
    return f"a page of {page[:MAX_LENGTH]} may not use this server, which has no key; allow it with --cors-origins, or set --api-key"


@lru_cache(maxsize=64)
def _is_certain(host: str) -> bool:
    """Whether a `Host` is an address or a name of every machine, or left out."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in LOCAL_NAMES or name.endswith(".localhost") or not host
    return True

"""`open_client`: the HTTP client of a router, for connections to replicas.

A connection is closed instead of kept where bytes follow an answer: the next request would get them
as its answer. httpcore closes a kept connection whose socket is readable, but does not look at what
its parser holds. Must not know requests or replicas.
"""

from __future__ import annotations

import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpcore
import httpx

CONNECT = 3.0  # seconds to reach a replica
IDLE = 30.0  # seconds that a connection to a replica is kept: less than a server keeps it
MOST_KEPT = 256  # idle connections


def open_client() -> httpx.AsyncClient:
    """A client that adds no headers of its own, and sends no cookie of one answer with another
    request. It waits for answers without a time limit."""
    no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=()))
    client = httpx.AsyncClient(transport=_Transport(), timeout=httpx.Timeout(None, connect=CONNECT), trust_env=False, cookies=no_cookies)
    for name in ("accept", "accept-encoding", "user-agent"):
        del client.headers[name]  # the client's own are passed on
    return client


class _Transport(httpx.AsyncHTTPTransport):
    def __init__(self) -> None:
        context = httpx.create_ssl_context(trust_env=False)
        super().__init__(verify=context)
        self._pool = _Pool(context)


class _Pool(httpcore.AsyncConnectionPool):
    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(context, max_connections=None, max_keepalive_connections=MOST_KEPT, keepalive_expiry=IDLE)
        self._context = context

    def create_connection(self, origin: httpcore.Origin) -> httpcore.AsyncConnectionInterface:
        return _Connection(origin, self._context, IDLE)


class _Connection(httpcore.AsyncHTTPConnection):
    """Expires where bytes follow the last answer. The pool asks before each request."""

    def has_expired(self) -> bool:
        opened: Any = self._connection
        return super().has_expired() or (self.is_idle() and bool(opened._h11_state.trailing_data[0]))  # noqa: SLF001 - no public name

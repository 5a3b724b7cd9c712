"""Whether a request was sent by somebody else's web page: what protects a server without keys from the browser on its own machine.

A browser names the page that a request comes from (`Origin`), and lets any page send simple requests to any address. A page may also give
its own name the address of this machine (DNS rebinding); then only `Host` shows it. Clients that are no browsers send no `Origin`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

LOCAL_NAMES = ("localhost", "localhost.localdomain")


def foreign_page(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The page that sent a request from another origin than the server's, or under a name that need not be the server's; else None."""
    found = dict(headers)
    origin, host = found.get(b"origin"), found.get(b"host", b"").decode("latin-1").lower()
    if origin is None:
        return None
    page = origin.decode("latin-1").lower()
    return None if urlsplit(page).netloc == host and _is_certain(host) else page


def _is_certain(host: str) -> bool:
    """Whether a `Host` is an address, or a name that every machine gives to itself."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in LOCAL_NAMES
    return True

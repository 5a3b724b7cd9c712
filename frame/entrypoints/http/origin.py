"""Whether a request was sent by somebody else's web page: what protects a server without keys from the browser on its own machine.

A browser names the page that a request comes from (`Origin`), and lets any page send simple requests to any address. A page may also give
its own name the address of this machine (DNS rebinding); then only `Host` shows it, and what it reads (GET) comes without `Origin`, as from
clients that are no browsers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

LOCAL_NAMES = ("localhost", "localhost.localdomain")
LONGEST = 200  # characters of a name that are shown


def why_foreign(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Why a request may be one of somebody else's page: it comes from another origin than the server's, or asks for a name that need
    not be the server's. A sentence with the remedy, else None."""
    found = dict(headers)
    origin, host = found.get(b"origin"), found.get(b"host", b"").decode("latin-1").lower()
    if origin is None:
        if _is_certain(host):
            return None
        return f"this server has no key and answers to addresses and localhost, not to {host[:LONGEST]}; set --api-key, or --insecure"
    page = origin.decode("latin-1").lower()
    if host and page.partition("://")[2] == host and _is_certain(host):
        return None
    return f"a page of {page[:LONGEST]} may not use this server, which has no key; set --api-key, and let the page send it"


def _is_certain(host: str) -> bool:
    """Whether a `Host` is an address, a name that every machine gives to itself, or left out, as no browser does."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name in LOCAL_NAMES or name.endswith(".localhost") or not host
    return True

"""Where the router finds replicas that come and go: a file of addresses, or a DNS name with an
address for each (a headless service).

A source that cannot be read changes nothing: the replicas that it named last stay. Used by
`frame router --discover`. Must not know the state of a replica.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from ipaddress import IPv6Address
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from frame.core.errors import ConfigError
from frame.entrypoints.http.errors import quoted

log = logging.getLogger(__name__)

MAX_REPLICAS = 1024
MAX_FILE = 1 << 20  # bytes
LOOKUP_TIME = 10.0  # seconds
MAX_HOST, MAX_LABEL = 253, 63  # characters of a name, and between two of its dots
_PORTS = {"http": 80, "https": 443}  # that an address without one means
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")


def check_url(url: str, flag: str = "--replica") -> str:
    """The address of a server, the same for each way to write it: no name is looked up. Raises
    ConfigError unless it is http(s)://host[:port]."""
    host, port = "", None
    try:
        address = urlsplit(url)
        is_valid = address.scheme in _PORTS and address.path in ("", "/") and not set(url) & set("?#")
        host, port = address.hostname or "", address.port
        is_valid = is_valid and bool(_HOST.fullmatch(host)) and not url[:1].isspace() and ("[" in address.netloc) == (":" in host)
        _ = httpx.URL(url).host  # which refuses more
        host = f"[{IPv6Address(host)}]" if ":" in host else host
    except (ValueError, httpx.InvalidURL):
        address, is_valid = None, False
    if address is not None and address.username is not None:
        raise ConfigError(f"{flag} has a user name, which the router does not send; write http://HOST:PORT or https://HOST:PORT")
    if address is None or not is_valid:
        raise ConfigError(f"{flag} is {quoted(url)}; write http://HOST:PORT or https://HOST:PORT")
    if port == 0:
        raise ConfigError(f"{flag} is {quoted(url)}, without a port to connect to; write http://HOST:PORT, with a port from 1 to 65535")
    labels = host.removesuffix(".").split(".")
    if ":" not in host and (len(host) > MAX_HOST or any(not 1 <= len(label) <= MAX_LABEL or not label.strip("-") for label in labels)):
        limits = f"a HOST of at most {MAX_HOST} characters, whose labels have 1 to {MAX_LABEL}, not dashes alone"
        raise ConfigError(f"{flag} is {quoted(url)}; write http://HOST:PORT, with {limits}")
    return f"{address.scheme}://{host}" + ("" if port in (None, _PORTS[address.scheme]) else f":{port}")


class Source:
    """One value of --discover: a path, or http://NAME:PORT. Raises ConfigError for another."""

    def __init__(self, value: str) -> None:
        self.value = value
        self._name = urlsplit(check_url(value, "--discover")) if "://" in value else None
        if self._name is not None and self._name.scheme != "http":
            raise ConfigError(f"--discover is {value!r}; certificates are for names, and it looks for addresses: write http://NAME:PORT")
        self._problem = ""

    async def read(self) -> list[str] | None:
        """The addresses of the replicas; None: they cannot be read now, which is logged once."""
        try:
            urls = await (asyncio.to_thread(self._read_file) if self._name is None else self._look_up())
        except (OSError, ValueError, ConfigError) as error:
            problem = str(error) or type(error).__name__
            if problem != self._problem:
                log.warning("--discover %s: %s; the replicas that it named before stay", self.value, problem)
            self._problem = problem
            return None
        self._problem = ""
        return urls

    def _read_file(self) -> list[str]:
        path = Path(self.value)
        if path.stat().st_size > MAX_FILE:
            raise ValueError(f"the file has more than {MAX_FILE} bytes; write one address a line")
        if not path.stat().st_size:  # it may be half written
            raise ValueError("the file is empty; for no replicas, write a line that begins with #")
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        return _bounded([check_url(line, f"line {number}") for number, line in enumerate(lines, 1) if line])

    async def _look_up(self) -> list[str]:
        assert self._name is not None
        port = f":{self._name.port}" if self._name.port else ""
        async with asyncio.timeout(LOOKUP_TIME):
            addresses = await asyncio.get_running_loop().getaddrinfo(self._name.hostname, self._name.port or 80, type=socket.SOCK_STREAM)
        hosts = sorted({str(address[0]) for *_, address in addresses})
        return _bounded([f"http://[{host}]{port}" if ":" in host else f"http://{host}{port}" for host in hosts])


def _bounded(urls: list[str]) -> list[str]:
    unique = list(dict.fromkeys(urls))
    if len(unique) > MAX_REPLICAS:
        raise ValueError(f"it names {len(unique)} replicas; a router has {MAX_REPLICAS}")
    return unique


async def watch_sources(
    sources: list[Source], interval: float, update: Callable[[str, list[str]], None], before: dict[str, list[str]]
) -> None:
    """Give `update` the addresses of each source, again and again, until cancelled. An address
    that two readings in a row lack is no longer named: a file may be half written, an answer of DNS
    incomplete. `before`: what was read last of each source."""
    while True:
        for source in sources:
            try:
                if (urls := await source.read()) is not None:
                    update(source.value, list(dict.fromkeys((*urls, *before.get(source.value, ())))))
                    before[source.value] = urls
            except Exception:
                log.exception("--discover %s failed; it is read again", source.value)
        await asyncio.sleep(interval)

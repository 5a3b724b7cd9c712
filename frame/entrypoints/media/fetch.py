"""Fetches the files that requests name: `data:` URLs, http(s) from allowed domains, and files below
an allowed folder.

Used by `MediaService`. Addresses are checked where they are dialled, so a name that resolves to
another address afterwards changes nothing. Must not know a format.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import httpcore
import msgspec

MAX_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_USER_AGENT = b"frame"
_ANY = "*"
_PIECE = 1 << 18  # characters of base64 that are decoded at a time, a multiple of 4
_MAX_URL = 8192  # characters, of a URL that is not data:

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Awaitable[list[str]]]  # host, port -> addresses


class FetchError(Exception):
    """A file cannot be fetched. One sentence for the client, with the remedy."""


@dataclass(frozen=True)
class AllowedDomains:
    """What `media.allowed_domains` allows: hosts (`example.com`, `*.example.com`, `host:8080`),
    addresses and networks, which need not be public, and `*`, every public host."""

    hosts: frozenset[str]
    networks: tuple[Network, ...]  # that may be dialled
    host_networks: tuple[Network, ...]  # that URLs may name

    @classmethod
    def parse(cls, entries: Iterable[str]) -> AllowedDomains:
        """Raises ValueError, which names the entry."""
        hosts, networks, named = set[str](), list[Network](), list[Network]()
        for entry in entries:
            host, port = _split_port(entry)
            try:
                networks.append(ipaddress.ip_network(host if port else entry.strip("[]"), strict=False))
                named += [] if port else networks[-1:]
            except ValueError:
                if "/" in entry or (not host.replace("*.", "", 1).strip(".") and entry != _ANY):
                    raise ValueError(f"{entry!r} is no domain, address or network; write it as example.com or 10.0.0.0/8") from None
            hosts.add(entry.lower().rstrip("."))
        return cls(frozenset(hosts), tuple(networks), tuple(named))

    def allows_host(self, host: str, port: int, scheme: str) -> bool:
        """Whether a URL may name this host. host: in lower case, without a final dot."""
        if (f"[{host}]:{port}" if ":" in host else f"{host}:{port}") in self.hosts:
            return True
        if port != _PORTS[scheme]:
            return False
        names = [host, _ANY, *(f"*.{host.split('.', count)[-1]}" for count in range(1, host.count(".") + 1))]
        return any(name in self.hosts for name in names) or any(_contains(self.host_networks, address) for address in _literal(host))

    def allows_address(self, address: Address) -> bool:
        """Whether it may be dialled: it is public, or named."""
        return _contains(self.networks, address) or _is_public(address)


def _contains(networks: Iterable[Network], address: Address) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _split_port(entry: str) -> tuple[str, str]:
    host, colon, port = entry.rpartition(":")
    if colon and port.isdigit() and ("]" in host or ":" not in host):
        return host.strip("[]"), port
    return entry, ""


def _literal(host: str) -> list[Address]:
    with contextlib.suppress(ValueError):
        return [ipaddress.ip_address(host)]
    return []


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
        # Addresses of tunnels hold one of version 4, which another host dials.
        if address.sixtofour is not None or address.teredo is not None or address in _NAT64:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


_NAT64 = ipaddress.ip_network("64:ff9b::/32")  # both prefixes, of RFC 6052 and RFC 8215


async def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host, by the system."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in entries))


class Fetcher:
    """Fetches files. allowed_path: the folder of local files; None: there are none. max_bytes: of a
    file. timeout: seconds of one fetch, in all."""

    def __init__(
        self, domains: AllowedDomains, allowed_path: str | None, max_bytes: int, timeout: float, resolver: Resolver = resolve_host
    ) -> None:
        self._domains = domains
        self._folder = allowed_path
        self._max_bytes = max_bytes
        self._timeout = timeout
        self._resolve = resolver

    async def fetch(self, source: str) -> bytes:
        """The file of a URL. Raises FetchError."""
        scheme = source[:8].partition(":")[0].lower()
        if scheme == "data":
            return await self._in_thread(self._read_data, source)
        if len(source) > _MAX_URL:
            raise FetchError(f"the URL has {len(source)} characters, and may have {_MAX_URL}; send the file as a data: URL")
        if scheme in _PORTS:
            return await self._download(source)
        if scheme == "file" or source.startswith("/"):
            return await asyncio.to_thread(self._read_local, source)
        raise FetchError("the URL must begin with data:, http:, https: or file:")

    def too_long(self, size: int | None = None) -> FetchError:
        """The error of a file of so many bytes."""
        known = "too many" if size is None else size
        return FetchError(f"the file has {known} bytes, and may have {self._max_bytes}; send a smaller one")

    # data: --------------------------------------------------------------------------------------

    async def _in_thread(self, call: Callable[[str], bytes], source: str) -> bytes:
        return call(source) if len(source) < 1 << 18 else await asyncio.to_thread(call, source)

    def _read_data(self, source: str) -> bytes:
        head, comma, body = source.partition(",") if "," in source[:256] else (source[:256], "", "")
        if not comma or not head.lower().endswith(";base64"):
            raise FetchError("the data: URL must have the form data:TYPE;base64,DATA")
        if len(body) // 4 * 3 > self._max_bytes + 2:
            raise self.too_long(len(body) // 4 * 3)
        try:
            data = decode_base64(body)
        except ValueError:
            raise FetchError("the data: URL is no valid base64; encode the file's bytes without spaces and line breaks") from None
        if len(data) > self._max_bytes:
            raise self.too_long(len(data))
        return data

    # files --------------------------------------------------------------------------------------

    def _read_local(self, source: str) -> bytes:
        if self._folder is None:
            raise FetchError("files of the server are not read; send a data: URL, or start it with --allowed-local-media-path")
        path = source
        if not source.startswith("/"):
            url = urlsplit(source)
            if url.netloc not in ("", "localhost") or url.query or url.fragment:
                raise FetchError("the URL of a file must have the form file:///FOLDER/NAME")
            path = unquote(url.path)
        outside = FetchError("the file is not below the folder of --allowed-local-media-path, or cannot be read")
        root, names = os.path.realpath(self._folder), path.split("/")
        prefix = root.rstrip("/") + "/"
        if not path.startswith(prefix) or ".." in names or "\0" in path:
            raise outside
        try:
            return self._read_below(root, [name for name in path[len(prefix) :].split("/") if name not in ("", ".")])
        except OSError:
            raise outside from None

    def _read_below(self, root: str, names: Sequence[str]) -> bytes:
        """Each folder is opened in the one before, and no link is followed."""
        handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for place, name in enumerate(names):
                kind = os.O_DIRECTORY if place + 1 < len(names) else os.O_NONBLOCK
                below = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=handle)
                os.close(handle)
                handle = below
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise OSError("not a regular file")
            if about.st_size > self._max_bytes:
                raise self.too_long(about.st_size)
            with open(handle, "rb", closefd=False) as file:
                data = file.read(self._max_bytes + 1)
        finally:
            os.close(handle)
        if len(data) > self._max_bytes:
            raise self.too_long()
        return data

    # http ---------------------------------------------------------------------------------------

    async def _download(self, url: str) -> bytes:
        try:
            async with asyncio.timeout(self._timeout):
                for _ in range(MAX_REDIRECTS + 1):
                    data, location = await self._get(url)
                    if location is None:
                        return data
                    url = _join(url, location)
        except TimeoutError:
            raise FetchError(f"the URL's server does not send the file within {self._timeout:g} s; send a data: URL") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError):
            raise FetchError("the URL's server cannot be reached, or its response is damaged; send a data: URL") from None
        raise FetchError(f"the URL is redirected more than {MAX_REDIRECTS} times; send the file's own URL")

    async def _get(self, url: str) -> tuple[bytes, str | None]:
        """-> the body and None, or nothing and where the server redirects to."""
        target = self._check(url)
        backend = _CheckedBackend(self._domains, self._resolve)
        headers = [(b"host", target.netloc.encode()), (b"user-agent", _USER_AGENT), (b"accept-encoding", b"identity")]
        times: dict[str, Any] = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._timeout)}
        async with (
            httpcore.AsyncConnectionPool(network_backend=backend, max_keepalive_connections=0) as pool,
            pool.stream("GET", target.url, headers=headers, extensions=times) as response,
        ):
            fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in fields:
                return b"", fields[b"location"]
            if response.status != 200:
                raise FetchError(f"the URL's server responds with the status {response.status}; check the URL")
            if fields.get(b"content-encoding", "identity") != "identity":
                raise FetchError("the URL's server compresses the file; send a data: URL")
            if (length := fields.get(b"content-length", "")).isdigit() and int(length) > self._max_bytes:
                raise self.too_long(int(length))
            received = bytearray()
            async for piece in response.aiter_stream():
                received += piece
                if len(received) > self._max_bytes:
                    raise self.too_long()
            return bytes(received), None

    def _check(self, url: str) -> _Target:
        """The parts of a URL whose host is allowed. Raises FetchError."""
        wrong = FetchError("the URL is malformed; it must have the form https://HOST/PATH, without a user or spaces")
        if any(character <= " " or character in '\\\x7f"<>^`{|}' for character in url):
            raise wrong
        try:
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port
            host = (host if host.isascii() else host.encode("idna").decode()).lower().rstrip(".")
        except ValueError:  # UnicodeError too
            raise wrong from None
        if parts.scheme not in _PORTS:
            raise FetchError("the URL is redirected to something that is neither http: nor https:; send the file's own URL")
        if not host or "%" in host or parts.username is not None or parts.password is not None:
            raise wrong
        port = _PORTS[parts.scheme] if port is None else port
        if not self._domains.allows_host(host, port, parts.scheme):
            raise FetchError(f"the URL's host {host[:80]!r} is not allowed; send a data: URL, or add it to --allowed-media-domains")
        netloc = f"[{host}]" if ":" in host else host
        netloc += "" if port == _PORTS[parts.scheme] else f":{port}"
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return _Target(f"{parts.scheme}://{netloc}{_quote(path)}", netloc)


def decode_base64(text: str) -> bytes:
    """The bytes of a text. Raises ValueError. msgspec takes a quarter of the time of binascii, and
    between two pieces other threads run: the event loop does not wait for a large file."""
    pieces = [msgspec.convert(text[at : at + _PIECE], bytes) for at in range(0, len(text), _PIECE)]
    if any(len(piece) != _PIECE // 4 * 3 for piece in pieces[:-1]):
        raise ValueError("the text goes on after its padding")
    return b"".join(pieces)


def _join(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise FetchError("the URL is redirected to a malformed one; send the file's own URL") from None


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    netloc: str


def _quote(path: str) -> str:
    return "".join(each if each.isascii() else "".join(f"%{byte:02X}" for byte in each.encode()) for each in path)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Dials the addresses that were checked, so there is no second look-up."""

    def __init__(self, domains: AllowedDomains, resolve: Resolver) -> None:
        self._domains = domains
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - of httpcore
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = [ipaddress.ip_address(each.partition("%")[0]) for each in await self._resolve(host.strip("[]"), port)]
        except (OSError, ValueError, UnicodeError):
            raise FetchError("the URL's host has no address; check the URL") from None
        if not addresses or not all(self._domains.allows_address(each) for each in addresses):
            raise FetchError("the URL's host has an address that is not public; send a data: URL, or allow the address")
        error: Exception = httpcore.ConnectError()
        for address in addresses:
            try:
                return await self._inner.connect_tcp(str(address), port, timeout, None, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failure:
                error = failure
        raise error

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

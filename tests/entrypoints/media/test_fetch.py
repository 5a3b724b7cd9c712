"""Fetching: spellings of loopback, rebinding, redirects, folders, slow and endless servers."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from frame.entrypoints.media.fetch import AllowedDomains, Fetcher, FetchError, decode_base64, resolve_host

LOOPBACK = [
    "127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "LOCALHOST.", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0",
    "[::]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "①②⑦.0.0.1", "127.0.0.1.", "[0:0:0:0:0:ffff:7f00:1]", "169.254.169.254", "10.0.0.1",
    "[fe80::1]", "[fd00::1]", "100.64.0.1", "224.0.0.1", "192.168.1.1", "[::127.0.0.1]",
]  # fmt: skip
Respond = Callable[[str, asyncio.StreamWriter], "asyncio.Future[None] | None"]


def fetcher(*domains: str, path: Path | None = None, resolver: object = resolve_host, **bounds: float) -> Fetcher:
    limits = {"max_bytes": 1000, "timeout": 5.0, **bounds}
    return Fetcher(AllowedDomains.parse(domains), None if path is None else str(path), resolver=resolver, **limits)  # type: ignore[arg-type]


async def refusal(one: Fetcher, source: str) -> str:
    with pytest.raises(FetchError) as caught:
        await one.fetch(source)
    return str(caught.value)


@asynccontextmanager
async def serving(responses: dict[str, bytes], delay: float = 0.0) -> AsyncIterator[tuple[int, list[str]]]:
    """A server of raw responses by path, and the requests that it got."""
    requests: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        requests.append(head)
        body = responses[head.split(" ")[1]]
        for byte in [body] if not delay else [body[i : i + 1] for i in range(len(body))]:
            writer.write(byte)
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(delay)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], requests


def response(body: bytes, status: str = "200 OK", **headers: object) -> bytes:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status}\r\n{lines}Connection: close\r\n\r\n".encode() + body


async def test_data_urls() -> None:
    data = bytes(range(256))
    assert await fetcher().fetch("data:image/png;base64," + base64.b64encode(data).decode()) == data
    for body in (
        "data:image/png,abc",
        "data:image/png;base64",
        "data:;base64,YQ",
        "data:;base64,Y Q==",
        "data:;base64,YQ==YQ==",
        "data:;base64,é===",
    ):
        assert "data: URL" in await refusal(fetcher(), body)
    assert "1000" in await refusal(fetcher(), "data:;base64," + "AAAA" * 1000)


@pytest.mark.parametrize("host", LOOPBACK)
async def test_hosts_that_are_not_public(host: str) -> None:
    """With every public host allowed, and before anything is dialled."""
    async with serving({"/": response(b"secret")}) as (port, requests):
        sentence = await refusal(fetcher("*", f"{host.lower().rstrip('.')}.example"), f"http://{host}/")
        assert sentence
        assert "not allowed" in await refusal(fetcher(), f"http://{host}:{port}/")
        assert not requests


async def test_an_allowed_address_is_dialled_and_no_other_port() -> None:
    async with serving({"/x?y=1": response(b"file", Content_Length=4)}) as (port, requests):
        assert await fetcher(f"127.0.0.1:{port}").fetch(f"http://127.0.0.1:{port}/x?y=1") == b"file"
        assert f"host: 127.0.0.1:{port}\r\n" in requests[0].lower()
        assert "not allowed" in await refusal(fetcher("127.0.0.1"), f"http://127.0.0.1:{port}/")
        assert "not allowed" in await refusal(fetcher(f"127.0.0.1:{port}"), "http://127.0.0.1/")


async def test_the_checked_address_is_dialled() -> None:
    """A resolver that gives a public address first, and loopback afterwards."""
    replies = [["93.184.216.34"], ["127.0.0.1"], ["93.184.216.34", "127.0.0.1"]]
    asked: list[str] = []

    async def rebind(host: str, port: int) -> list[str]:
        asked.append(host)
        return replies[len(asked) - 1]

    one = fetcher("evil.example:1", resolver=rebind, timeout=0.2)
    assert "127.0.0.1" not in await refusal(one, "http://evil.example:1/")  # dials the first, which does not respond
    assert asked == ["evil.example"]
    for _ in range(2):
        assert "not public" in await refusal(one, "http://evil.example:1/")


async def test_redirects_are_checked_again() -> None:
    away = {
        "/ok": response(b"", "302 Found", Location="/end"),
        "/end": response(b"end"),
        "/meta": response(b"", "302 Found", Location="http://169.254.169.254/latest/meta-data"),
        "/local": response(b"", "307 Temporary Redirect", Location="http://localhost/"),
        "/file": response(b"", "302 Found", Location="file:///etc/passwd"),
        "/loop": response(b"", "302 Found", Location="/loop"),
        "/malformed": response(b"", "302 Found", Location="http://[::1"),
    }
    async with serving(away) as (port, requests):
        one = fetcher(f"127.0.0.1:{port}", "*")
        url = f"http://127.0.0.1:{port}"
        assert await one.fetch(f"{url}/ok") == b"end"
        assert "not public" in await refusal(one, f"{url}/meta")
        assert "root" not in await refusal(one, f"{url}/file")
        assert "malformed" in await refusal(one, f"{url}/malformed")
        assert "not allowed" in await refusal(fetcher(f"127.0.0.1:{port}"), f"{url}/meta")
        requests.clear()
        assert "more than 3 times" in await refusal(one, f"{url}/loop")
        assert len(requests) == 4


async def test_bytes_and_time_are_bounded() -> None:
    pages = {
        "/said": response(b"", Content_Length=10**12),
        "/endless": response(b"x" * 5000),
        "/zip": response(b"x", Content_Encoding="gzip"),
        "/gone": response(b"the secret page", "404 Not Found"),
        "/broken": b"no http\r\n\r\n",
    }
    async with serving(pages) as (port, _):
        one = fetcher(f"127.0.0.1:{port}")
        for path, words in (("said", "1000"), ("endless", "1000"), ("zip", "compresses"), ("gone", "404"), ("broken", "damaged")):
            sentence = await refusal(one, f"http://127.0.0.1:{port}/{path}")
            assert words in sentence and "secret" not in sentence
    async with serving({"/": response(b"x" * 500)}, delay=0.05) as (port, _):
        assert "within 0.3 s" in await refusal(fetcher(f"127.0.0.1:{port}", timeout=0.3), f"http://127.0.0.1:{port}/")


@pytest.mark.parametrize("url", [
    "http://user@a.example/", "http://a.example\\@b/", "http://a.example/ x", "http://a.example:99999/", "http://%31/", "http:///x", "ftp://a.example/",
    "gopher://a", "javascript:1", "", "x", "http://a.example/" + "x" * 9000, "HTTP://[::1", "http://a.example/\r\nHost: b",
])  # fmt: skip
async def test_malformed_urls(url: str) -> None:
    assert await refusal(fetcher("a.example", "*"), url)


def test_domains() -> None:
    domains = AllowedDomains.parse(["a.example", "*.b.example", "c.example:8080", "10.0.0.0/8"])
    allowed = [("a.example", 443), ("x.b.example", 443), ("y.x.b.example", 443), ("c.example", 8080), ("10.1.2.3", 443)]
    refused = [("x.a.example", 443), ("a.example", 8443), ("b.example", 443), ("c.example", 443), ("evilb.example", 443), ("11.0.0.1", 443)]
    assert all(domains.allows_host(host, port, "https") for host, port in allowed)
    assert not any(domains.allows_host(host, port, "https") for host, port in refused)
    for entry in ("10.0.0.0/99", "", "."):
        with pytest.raises(ValueError, match="domain"):
            AllowedDomains.parse([entry])


async def test_local_files(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "below").mkdir(parents=True)
    (root / "below" / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder").symlink_to(tmp_path)
    (root / "large").write_bytes(b"x" * 2000)
    os.mkfifo(root / "fifo")
    one = fetcher(path=root)
    assert await one.fetch(f"file://{root}/below/a%20b.png") == b"inside"
    assert await one.fetch(f"{root}/below/a b.png") == b"inside"
    for name in ("link", "folder/secret", "../secret", "below/../../secret", "fifo", "below", "", "none", "%2e%2e/secret", "below%00"):
        assert "allowed-local-media-path" in await refusal(one, f"file://{root}/{name}"), name
    assert "allowed-local-media-path" in await refusal(one, f"file://{root}x/secret")
    assert "form file:" in await refusal(one, f"file://host{root}/below")
    assert "1000" in await refusal(one, f"file://{root}/large")
    assert "not read" in await refusal(fetcher(), "file:///etc/passwd")


def test_base64_of_many_pieces() -> None:
    """Texts longer than a piece are decoded as short ones are."""
    data = os.urandom((1 << 18) // 4 * 3 * 2)
    for length in (0, 1, 2, 3, len(data) // 2, len(data) // 2 + 1, len(data)):
        assert decode_base64(base64.b64encode(data[:length]).decode()) == data[:length]
    padded = base64.b64encode(data[: len(data) // 2 - 1]).decode()
    for wrong in (padded + "AAAA", padded + padded, "A", "AA", "AA==AAAA", "AA==\n", "A A=", "-_==", "AAA\u00e9", "A" * (1 << 18) + "A"):
        with pytest.raises(ValueError, match=r"base64|padding"):
            decode_base64(wrong)


async def test_other_work_goes_on_while_a_large_file_is_decoded() -> None:
    """A thread that decodes base64 in one piece holds the interpreter's lock for as long."""
    url = f"data:image/png;base64,{base64.b64encode(bytes(60 << 20)).decode()}"
    loop, shares = asyncio.get_running_loop(), list[float]()
    for _ in range(3):  # a busy machine pauses too
        pauses, task = [0.0], asyncio.ensure_future(fetcher(max_bytes=64 << 20).fetch(url))
        while not task.done():
            began = loop.time()
            await asyncio.sleep(0.001)
            pauses.append(loop.time() - began)
        assert len(await task) == 60 << 20
        shares.append(max(pauses) / sum(pauses))
    assert min(shares) < 0.5

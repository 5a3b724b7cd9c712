"""Web pages of other origins cannot use a server without keys through a browser."""

from __future__ import annotations

import pytest

from frame.entrypoints.origin import why_foreign
from tests.entrypoints.inprocess import serving

BODY = b'{"model": "", "prompt": "x", "max_tokens": 1}'


@pytest.mark.parametrize(
    ("origin", "host", "is_foreign"),
    [
        (None, "127.0.0.1:30000", False),
        (None, "", False),
        (None, "frame.localhost:30000", False),
        (None, "[::1]:30000", False),
        # DNS rebinding: a same-origin request has no Origin header
        (None, "evil.example:30000", True),
        (None, "anything", True),
        (None, "[", True),
        ("http://[", "[", True),
        ("http://127.0.0.1:30000", "127.0.0.1:30000", False),
        ("http://localhost:30000", "localhost:30000", False),
        ("http://[::1]:30000", "[::1]:30000", False),
        ("https://evil.example", "127.0.0.1:30000", True),
        ("http://127.0.0.1:8080", "127.0.0.1:30000", True),
        ("null", "127.0.0.1:30000", True),
        ("http://evil.example:30000", "evil.example:30000", True),  # DNS rebinding
        ("", "", True),
    ],
)
def test_foreign_requests_are_detected(origin: str | None, host: str, is_foreign: bool) -> None:
    headers = [(b"host", host.encode()), *([] if origin is None else [(b"origin", origin.encode())])]
    assert (why_foreign(headers) is not None) == is_foreign


@pytest.mark.parametrize("path", ["/flush_cache", "/v1/completions", "/page/cache.json"])
async def test_a_foreign_page_is_refused(path: str) -> None:
    headers = [(b"host", b"127.0.0.1:30000"), (b"origin", b"https://evil.example")]
    method = "GET" if path.endswith(".json") else "POST"
    async with serving({}) as server:
        reply = await server.request(method, path, BODY, headers)
        assert reply.status == 403
        assert "evil.example" in reply.json()["error"]["message"]
        own = [(b"host", b"127.0.0.1:30000"), (b"origin", b"http://127.0.0.1:30000")]
        assert (await server.request(method, path, BODY, own)).status == 200


@pytest.mark.parametrize("path", ["/page/cache.json", "/server_info", "/"])
async def test_dns_rebinding_is_refused(path: str) -> None:
    async with serving({}) as server:
        reply = await server.request("GET", path, b"", [(b"host", b"evil.example:30000")])
        assert reply.status == 403
        assert "not to evil.example:30000; start it, or the replicas if this name is a router's" in reply.json()["error"]["message"]


async def test_with_keys_the_origin_is_not_checked() -> None:
    headers = [(b"host", b"api.example"), (b"origin", b"https://app.example"), (b"authorization", b"Bearer secret")]
    async with serving({"server": {"api_key": "secret"}}) as server:
        assert (await server.request("GET", "/v1/models", b"", headers)).status == 200
    for secret in ({"admin_key": "secret"}, {"api_key": "user", "admin_key": "secret"}):
        async with serving({"server": secret}) as server:
            assert (await server.request("GET", "/server_info", b"", headers)).status == 200
    async with serving({"server": {"insecure": True}}) as server:
        assert (await server.request("GET", "/v1/models", b"", headers)).status == 200

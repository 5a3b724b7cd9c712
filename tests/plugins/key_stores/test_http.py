"""Introspection over a socket: the suite, what is cached and for how long, and how an endpoint
fails. No failure opens the server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from frame.core.errors import ConfigurationError
from frame.interfaces.keys import KeyStoreContext, KeyStoreError
from frame.plugins.key_stores import IntrospectionOptions
from frame.plugins.key_stores.http import MAX_RESPONSE, MAX_WAITING, IntrospectionKeyStore
from frame.plugins.loader import load_registry
from frame.testing import conformance
from frame.testing.serving.key_store import KEYS
from tests.entrypoints.inprocess import serving


class Endpoint(ThreadingHTTPServer):
    """Knows tokens by `accounts`; `reply` overrides the response, `delay` holds it."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.accounts: dict[str, dict[str, Any]] = {}
        self.asked: Counter[str] = Counter()
        self.headers: list[Any] = []
        self.reply: tuple[int, bytes] | None = None
        self.delay = 0.0
        self.url = f"http://127.0.0.1:{self.server_address[1]}/introspect"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is no failure."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Endpoint

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["content-length"])).decode(), keep_blank_values=True)
        token = form["token"][0]
        self.server.asked[token] += 1
        self.server.headers.append(self.headers)
        time.sleep(self.server.delay)
        known = self.server.accounts.get(token)
        status, body = self.server.reply or (200, json.dumps({"active": False} if known is None else {"active": True, **known}).encode())
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    found = Endpoint()
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join(10)


def make(endpoint: Endpoint, **options: Any) -> IntrospectionKeyStore:
    return IntrospectionKeyStore(KeyStoreContext(), IntrospectionOptions(url=endpoint.url, **options))


@pytest.mark.slow
def test_it_passes_its_suite(endpoint: Endpoint) -> None:
    for number, (key, is_operator) in enumerate(KEYS.items()):
        endpoint.accounts[key] = {"sub": f"account {number}", "scope": "chat admin" if is_operator else "chat"}
    registry = load_registry(installed=False)
    options = {"url": endpoint.url, "user_scope": "chat", "admin_scope": "admin", "max_cached": 128}
    outcomes = conformance.run_suite(conformance.find(registry, "key_store:http", conformance.Setting(options=options)))
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    skipped = [outcome.check for outcome in outcomes if outcome.result == "skipped"]
    places = ["places_are_apart", "a_place_without_keys", "broken_places_are_refused"]
    assert skipped == ["tenants_are_the_same_in_each_process", *places, "lookups_are_fast"]


async def test_one_call_for_many_requests_and_one_tenant_for_an_account(endpoint: Endpoint) -> None:
    endpoint.accounts = {"a": {"sub": "alice"}, "b": {"sub": "alice"}, "c": {"sub": "carol"}}
    endpoint.delay = 0.05
    store = make(endpoint)
    first = await asyncio.gather(*(store.find_holder(b"a") for _ in range(50)))
    assert endpoint.asked["a"] == 1 and len(set(first)) == 1
    same, other = await store.find_holder(b"b"), await store.find_holder(b"c")
    assert first[0] == same != other and first[0] is not None and "alice" not in first[0].tenant
    await store.find_holder(b"a")
    assert endpoint.asked["a"] == 1  # cached
    await store.close()


async def test_what_is_cached_ends(endpoint: Endpoint) -> None:
    endpoint.accounts = {"short": {"sub": "s"}, "expires": {"sub": "s", "exp": time.time() + 0.3}, "old": {"sub": "s", "exp": 1}}
    store = make(endpoint, cache_seconds=0.2)
    assert await store.find_holder(b"short") and await store.find_holder(b"expires") and not await store.find_holder(b"old")
    endpoint.accounts.clear()
    assert await store.find_holder(b"short")  # a revoked token, for `cache_seconds`
    await asyncio.sleep(0.35)
    assert await store.find_holder(b"short") is None and await store.find_holder(b"expires") is None
    endpoint.accounts["short"] = {"sub": "s"}
    await asyncio.sleep(0.25)
    assert await store.find_holder(b"short")
    endpoint.reply = (500, b"")
    await asyncio.sleep(0.25)
    with pytest.raises(KeyStoreError, match="status 500"):  # what was known once opens nothing
        await store.find_holder(b"short")
    await store.close()
    late = make(endpoint, cache_seconds=3600)
    endpoint.reply, endpoint.accounts = None, {"expires": {"sub": "s", "exp": time.time() + 0.2}}
    assert await late.find_holder(b"expires")
    await asyncio.sleep(0.25)
    endpoint.accounts.clear()
    assert await late.find_holder(b"expires") is None  # although the cache would hold it for an hour
    await late.close()


async def test_the_cache_has_a_bound_and_keeps_what_is_used(endpoint: Endpoint) -> None:
    endpoint.accounts = {f"{n}": {"sub": f"{n}"} for n in range(12)}
    store = make(endpoint, max_cached=4)
    for n in range(12):
        await store.find_holder(b"0")
        await store.find_holder(f"{n}".encode())
    assert len(store._cached) == 4 and endpoint.asked["0"] == 1
    assert all(key != b"0" for key in store._cached)  # digests
    await store.close()


async def test_scopes(endpoint: Endpoint) -> None:
    endpoint.accounts = {"none": {"sub": "n"}, "user": {"sub": "u", "scope": "a chat b"}, "like": {"sub": "l", "scope": "chatter achat"},
                         "admin": {"sub": "o", "scope": "admin"}, "list": {"sub": "x", "scope": ["chat"]}}  # fmt: skip
    store = make(endpoint, user_scope="chat", admin_scope="admin")
    holders = {token: await store.find_holder(token.encode()) for token in endpoint.accounts}
    assert [token for token, holder in holders.items() if holder is not None] == ["user", "admin"]
    assert [token for token, holder in holders.items() if holder is not None and holder.is_operator] == ["admin"]
    await store.close()
    plain = make(endpoint)
    held = [await plain.find_holder(token.encode()) for token in endpoint.accounts]
    assert not any(holder is None or holder.is_operator for holder in held)
    await plain.close()


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, b'{"active": true, "sub": "x"}'),
        (401, b""),
        (302, b'{"active": true, "sub": "x"}'),
        (204, b""),
        (200, b""),
        (200, b"true"),
        (200, b'{"sub": "x"}'),
        (200, b'{"active": "true", "sub": "x"}'),
        (200, b'{"active": 1, "sub": "x"}'),
        (200, b'{"active": true}'),
        (200, b'{"active": true, "sub": ""}'),
        (200, b'{"active": true, "sub": 7}'),
        (200, b'{"active": true, "sub": "x", "exp": "never"}'),
        (200, b'{"active": true, "sub": "x"'),
        (200, b"[" * 100_000),
        (200, b'{"active": true, "sub": "x", "y": "' + b"z" * MAX_RESPONSE + b'"}'),
        (200, b"\xff\xfe"),
    ],
    ids=range(17),
)
async def test_responses_that_open_nothing(endpoint: Endpoint, status: int, body: bytes) -> None:
    endpoint.reply = (status, body)
    store = make(endpoint)
    with pytest.raises(KeyStoreError):
        await store.find_holder(b"key")
    endpoint.reply, endpoint.accounts = None, {"key": {"sub": "x"}}
    assert await store.find_holder(b"key")  # a failure is not cached
    await store.close()


async def test_an_endpoint_that_is_slow_or_away(endpoint: Endpoint) -> None:
    endpoint.accounts, endpoint.delay = {"key": {"sub": "x"}}, 1.0
    store = make(endpoint, timeout=0.2)
    with pytest.raises(KeyStoreError, match="cannot be asked"):  # the response that comes later is valid
        await store.find_holder(b"key")
    away = IntrospectionKeyStore(KeyStoreContext(), IntrospectionOptions(url="http://127.0.0.1:9/introspect"))
    with pytest.raises(KeyStoreError, match="cannot be asked"):
        await away.find_holder(b"key")
    results = await asyncio.gather(*(away.find_holder(f"{n}".encode()) for n in range(MAX_WAITING + 50)), return_exceptions=True)
    assert all(isinstance(each, KeyStoreError) for each in results)
    assert sum("are being asked for" in str(each) for each in results) == 50
    await store.close()
    await away.close()


async def test_what_it_sends(endpoint: Endpoint, tmp_path: Path) -> None:
    file = tmp_path / "authorization"
    file.write_text("Basic abc\n")
    store = make(endpoint, authorization_file=str(file))
    await store.find_holder(b"a&b=c d%00")
    assert endpoint.asked == {"a&b=c d%00": 1} and endpoint.headers[0]["authorization"] == "Basic abc"
    assert await store.find_holder("schlüssel".encode()) is None and len(endpoint.asked) == 1
    await store.close()


@pytest.mark.parametrize(("options", "sentence"), [({}, "give the URL"), ({"url": "ftp://x"}, "give the URL"),
                                                   ({"url": "http://x", "authorization_file": "/none"}, "cannot be read")])  # fmt: skip
def test_settings_that_cannot_be_used(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        IntrospectionKeyStore(KeyStoreContext(), IntrospectionOptions(**options))


async def test_a_server_asks_it(endpoint: Endpoint) -> None:
    """Two tokens of one account share a prefix cache; another account does not see it; operators'
    scopes open operators' routes; a failure is a 503."""
    endpoint.accounts = {"a1": {"sub": "a"}, "a2": {"sub": "a"}, "b": {"sub": "b"}, "op": {"sub": "o", "scope": "admin"}}
    options = {"key_store/http": {"url": endpoint.url, "admin_scope": "admin", "cache_seconds": 0.0}}
    async with serving({"server": {"key_store": "http"}, "plugins": {"options": options}}) as server:
        body = {"input_ids": [*range(3, 100)], "sampling_params": {"max_new_tokens": 1}}
        cached = [(await server.post("/generate", body, x_api_key=key)).json()["meta_info"]["cached_tokens"] for key in ("a1", "a2", "b")]
        assert cached[0] == cached[2] == 0 < cached[1]
        assert (await server.post("/generate", body, authorization="Bearer none")).status == 401
        assert (await server.request("GET", "/server_info", headers=((b"x-api-key", b"op"),))).status == 200
        assert (await server.request("GET", "/server_info", headers=((b"x-api-key", b"b"),))).status == 403
        endpoint.reply = (500, b"")
        assert (await server.post("/generate", body, x_api_key="a1")).status == 503
        assert (await server.request("GET", "/health")).status == 200
        await server.services.keys.close()  # type: ignore[union-attr]

"""Web pages of other origins: preflights without a key, headers on responses, streams and errors,
and what stays closed to them.

By requests over ASGI, and by Chromium where it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Browser

from frame.config.server_sections import ServerSection
from frame.core.errors import ConfigurationError
from frame.entrypoints.http.app import App
from frame.entrypoints.origin import read_cors
from tests.entrypoints.http.operations.chromium import browser  # noqa: F401 - a fixture
from tests.entrypoints.inprocess import InProcess, Response, serving
from tests.entrypoints.serving import RunningServer

PAGE = "https://app.example"
HOST = (b"host", b"127.0.0.1:30000")
KEYED = {"api_key": "secret", "admin_key": "op"}
BODY = b'{"model": "", "prompt": [5, 6, 7], "max_tokens": 2}'


async def ask(server: InProcess, method: str, path: str, body: bytes = b"", **headers: str) -> Response:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return await server.request(method, path, body, [HOST, (b"content-type", b"application/json"), *given])


async def preflight(server: InProcess, path: str, method: str = "POST", origin: str = PAGE) -> Response:
    wanted = {"access_control_request_method": method, "access_control_request_headers": "authorization,content-type"}
    return await ask(server, "OPTIONS", path, origin=origin, **wanted)


def shared(reply: Response) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/chat/completions/", "/v1/models", "/v1/responses/resp_1", "/nowhere"])
async def test_a_preflight_needs_no_key(path: str) -> None:
    async with serving({"server": {**KEYED, "cors_origins": [PAGE]}}) as server:
        reply = await preflight(server, path)
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
        assert ("POST" in reply.headers["access-control-allow-methods"]) == (path not in ("/v1/models", "/v1/responses/resp_1"))
        assert "origin" in reply.headers["vary"]
        assert "access-control-allow-credentials" not in reply.headers


async def test_preflights_that_are_refused() -> None:
    async with serving({"server": {**KEYED, "cors_origins": [PAGE]}}) as server:
        for path, origin in (("/v1/models", "https://evil.example"), ("/v1/models", "null"), ("/v1/models", PAGE + ".evil.example"),
                             ("/flush_cache", PAGE), ("/server_info", PAGE)):  # fmt: skip
            reply = await preflight(server, path, origin=origin)
            assert reply.status == 401 and not shared(reply), (path, origin)
        assert (await ask(server, "OPTIONS", "/v1/models", origin=PAGE)).status == 401  # no preflight: it asks for no method
        injected = await ask(server, "OPTIONS", "/v1/models", origin=PAGE, access_control_request_method="GET",
                             access_control_request_headers="x\r\nset-cookie: a")  # fmt: skip
        assert "access-control-allow-headers" not in injected.headers
    async with serving({"server": KEYED}) as server:  # without the setting nothing is shared
        reply = await preflight(server, "/v1/models")
        assert reply.status == 401 and not shared(reply)
        assert not shared(await ask(server, "GET", "/v1/models", origin=PAGE, authorization="Bearer secret"))


async def test_headers_on_responses_streams_and_errors() -> None:
    async with serving({"server": {**KEYED, "cors_origins": [PAGE, "http://localhost:5173"]}}) as server:
        key = {"authorization": "Bearer secret"}
        stream = BODY[:-1] + b', "stream": true}'
        for method, path, body, headers, status in (
            ("GET", "/v1/models", b"", key, 200), ("POST", "/v1/completions", BODY, key, 200),
            ("POST", "/v1/completions", stream, key, 200),
            ("POST", "/v1/completions", b"{", key, 400), ("GET", "/v1/models", b"", {}, 401), ("GET", "/nowhere", b"", key, 404),
            ("GET", "/v1/completions", b"", key, 405), ("GET", "/health", b"", {}, 200), ("GET", "/%zz", b"", {}, 400),
        ):  # fmt: skip
            for origin in (PAGE, "http://localhost:5173"):
                reply = await ask(server, method, path, body, origin=origin, **headers)
                assert (reply.status, reply.headers.get("access-control-allow-origin")) == (status, origin), path
                assert (reply.headers["access-control-expose-headers"], reply.headers["vary"]) == ("*", "origin")
            for more in ({}, {"origin": "https://evil.example"}, {"origin": "http://localhost:5174"}):
                reply = await ask(server, method, path, body, **headers, **more)
                assert reply.status == status and not shared(reply), path
                assert reply.headers["vary"] == "origin"
        for path in ("/server_info", "/flush_cache"):  # operators' routes are no pages'
            assert not shared(await ask(server, "GET", path, origin=PAGE, authorization="Bearer op"))
        server.app = App(server.services, is_admin=True)
        for path in ("/metrics", "/server_info", "/health"):
            assert not shared(await ask(server, "GET", path, origin=PAGE, authorization="Bearer op"))


async def test_the_guard_of_a_server_without_keys_agrees() -> None:
    async with serving({"server": {"cors_origins": [PAGE]}}) as server:
        for host in (b"127.0.0.1:30000", b"gpu.example:30000"):
            reply = await server.request("POST", "/v1/completions", BODY, [(b"host", host), (b"origin", PAGE.encode())])
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, PAGE)
        for path in ("/flush_cache", "/abort_request"):
            assert (await ask(server, "POST", path, b'{"abort_all": true}', origin=PAGE)).status == 403
        refused = await ask(server, "POST", "/v1/completions", BODY, origin="https://evil.example")
        assert refused.status == 403 and not shared(refused) and "--cors-origins" in refused.json()["error"]["message"]
        assert (await server.request("GET", "/v1/models", b"", [(b"host", b"evil.example")])).status == 403
    async with serving({"server": {"cors_origins": ["*"]}}) as server:
        reply = await ask(server, "POST", "/v1/completions", BODY, origin="https://any.example")
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")
        assert (await ask(server, "POST", "/flush_cache", origin="https://any.example")).status == 403


async def test_credentials() -> None:
    async with serving({"server": {**KEYED, "cors_origins": [PAGE], "cors_credentials": True}}) as server:
        for reply in (await preflight(server, "/v1/models", "GET"), await ask(server, "GET", "/v1/models", origin=PAGE)):
            assert (reply.headers["access-control-allow-origin"], reply.headers["access-control-allow-credentials"]) == (PAGE, "true")
            assert reply.headers.get("access-control-expose-headers") != "*"  # stands for itself then


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"cors_origins": ["app.example"]}, "server.cors_origins: 'app.example'"),
        ({"cors_origins": ["https://app.example/"]}, "https://app.example/"),
        ({"cors_origins": ["https://*.example"]}, "https://"),
        ({"cors_origins": ["null"]}, "null"),
        ({"cors_origins": ["https://a.example,https://b.example"]}, "a.example"),
        ({"cors_origins": ["*", "https://a.example"], "cors_credentials": True}, "server.cors_credentials"),
        ({"cors_credentials": True}, "server.cors_credentials"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_cors(ServerSection(**settings))
    assert part in str(error.value)


# in a browser -------------------------------------------------------------------------------------

SCRIPT = """
async ([url, key, body]) => {
  const headers = {"authorization": "Bearer " + key, "content-type": "application/json"};
  try {
    const answer = await fetch(url, {method: body === null ? "GET" : "POST", body, headers});
    return [answer.status, await answer.text(), answer.headers.get("x-request-id")];
  } catch (error) {
    return [0, String(error), null];
  }
}
"""


class Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[str]:
    """A page of another origin."""
    with HTTPServer(("127.0.0.1", 0), Blank) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_in_chromium(browser: Browser, checkpoint: Path, site: str) -> None:  # noqa: F811 - the fixture
    other_origin = site.replace("127.0.0.1", "localhost")
    flags = ("--api-key", "secret", "--cors-origins", site, "--max-model-len", "512", "--max-total-tokens", "1024")
    with RunningServer(checkpoint, *flags) as server:

        def ask_from(origin: str, path: str, body: str | None = None, key: str = "secret") -> Any:
            page = browser.new_page()
            page.goto(origin)
            found = page.evaluate(SCRIPT, [server.url + path, key, body])
            page.close()
            return found

        status, text, name = ask_from(site, "/v1/models")
        assert status == 200 and "tiny-llama" in text and name
        status, text, _ = ask_from(site, "/v1/completions", '{"prompt": [5, 6, 7], "max_tokens": 3, "stream": true}')
        assert status == 200 and text.endswith("data: [DONE]\n\n")
        assert ask_from(site, "/v1/completions", "{")[0] == 400  # a page can read why
        assert ask_from(site, "/v1/models", key="wrong")[0] == 401
        assert ask_from(other_origin, "/v1/models")[0] == 0
        assert ask_from(site, "/flush_cache", "{}")[0] == 0

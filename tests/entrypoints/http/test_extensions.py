"""HTTP extensions of a package that is installed outside of the tree and selected by configuration
alone: own routes, an auth hook, an audit, middleware; and what failing ones do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter

from frame.core.blame import note_origin
from frame.core.errors import PluginError
from frame.core.interfaces.plugin import PluginRecord
from frame.entrypoints.http.app import App
from frame.entrypoints.http.extensions import Extensions
from frame.interfaces.http import HttpContext, HttpExtension, HttpRequest, HttpResponse, RefuseRequest
from frame.interfaces.kinds import KINDS
from frame.plugins.loader import load_registry
from frame.testing.conformance import Setting, checks, find
from tests.entrypoints.inprocess import InProcess, serving
from tests.entrypoints.published import check_response
from tests.entrypoints.serving import RunningServer
from tests.testing.mutants.http_extension import AddHeader

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "frame-members"
version = "1.2"
[project.entry-points.frame]
frame_members = "frame_members"
[tool.hatch.build.targets.wheel]
packages = ["frame_members"]
"""

MANIFEST = """
from pydantic import BaseModel

from frame import hookimpl

class Options(BaseModel):
    members: tuple[str, ...] = ("alice",)

@hookimpl
def register_http_extensions(registry):
    registry.add("members", "frame_members.plugin:Members", options=Options, api="http_extension/1")
"""
PLUGIN = """
from collections import deque

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel

from frame.interfaces.http import HttpExtension, RefuseRequest


class Note(BaseModel):
    text: str
    times: int = 1


class Members(HttpExtension):
    open_paths = frozenset({"/members/count"})

    def __init__(self, context, options=None):
        if "everyone" in options.members:
            raise ValueError("everyone is no member")
        self.members = options.members
        self.audit = deque(maxlen=1000)

    def make_routers(self):
        router = APIRouter(prefix="/members")

        @router.get("/count")
        def count() -> dict[str, int]:
            return {"members": len(self.members)}

        @router.get("/audit")
        async def audit() -> list[dict]:
            return list(self.audit)

        @router.get("/{name}")
        async def member(name: str, verbose: bool = False) -> dict:
            if name not in self.members:
                raise HTTPException(404, f"there is no member {name}")
            return {"name": name, "verbose": verbose}

        @router.post("/notes", status_code=201)
        async def add_note(note: Note) -> Note:
            if note.text == "fail":
                raise ValueError("a bug")
            return note

        return [router]

    async def on_request(self, request):
        if request.headers.get("x-member") not in self.members:
            raise RefuseRequest(402, "this server is for members; send x-member", "members_only", {"x-join": "/join"})

    async def on_response(self, request, response):
        self.audit.append({"route": request.route, "status": response.status, "tokens": response.output_tokens})
"""
ALICE = {"x_member": "alice"}
TEXT = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where pip installed the package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "frame_members").mkdir()
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "frame_members" / "__init__.py").write_text(MANIFEST)
    (source / "frame_members" / "plugin.py").write_text(PLUGIN)
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target")
    subprocess.run([sys.executable, *pip, str(target), str(source)], check=True, timeout=500)
    return target


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The settings that select the extension, which is installed meanwhile."""
    monkeypatch.syspath_prepend(str(site))
    options = {"http_extension/members": {"members": ["alice", "bob"]}}
    yield {"server": {"extensions": ["builtin", "members"], "max_body_bytes": 1 << 16}, "plugins": {"options": options}}
    for name in [name for name in sys.modules if name.startswith("frame_members")]:
        del sys.modules[name]


def get(server: InProcess, path: str, **headers: str) -> Any:
    return server.request("GET", path, headers=[(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()])


async def test_a_package_adds_routes_a_check_and_an_audit(installed: dict[str, Any]) -> None:
    async with serving(installed) as server:
        assert (await get(server, "/members/count")).json() == {"members": 2}  # no hook runs for an open route
        refused = await server.post("/v1/completions", TEXT)
        error = refused.json()["error"]
        assert (refused.status, error["code"], refused.headers["x-join"]) == (402, "members_only", "/join")
        check_response("POST", "/v1/completions", 402, refused.headers["content-type"], refused.body)
        anthropic = await server.post("/v1/messages", {})
        assert (anthropic.status, anthropic.json()["type"]) == (402, "error")  # in the shape of the API
        assert (await server.post("/v1/completions", TEXT, **ALICE)).status == 200
        streamed = await server.post("/v1/completions", {**TEXT, "stream": True}, **ALICE)
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert (await get(server, "/no/such/path", **ALICE)).status == 404
        audit = (await get(server, "/members/audit", **ALICE)).json()
        assert audit[1:] == [
            {"route": "/v1/completions", "status": 402, "tokens": 0}, {"route": "/v1/messages", "status": 402, "tokens": 0},
            {"route": "/v1/completions", "status": 200, "tokens": 3}, {"route": "/v1/completions", "status": 200, "tokens": 3},
            {"route": "none", "status": 404, "tokens": 0},
        ]  # fmt: skip


async def test_own_routes_are_those_of_fastapi(installed: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    async with serving(installed) as server:
        found = await get(server, "/members/bob?verbose=true", **ALICE)
        assert (found.json(), "x-request-id" in found.headers) == ({"name": "bob", "verbose": True}, True)
        assert (await get(server, "/members/carol", **ALICE)).json()["error"]["message"] == "there is no member carol"
        assert (await get(server, "/members/bob?verbose=perhaps", **ALICE)).status == 400
        made = await server.post("/members/notes", {"text": "hi"}, **ALICE)
        assert (made.status, made.json()) == (201, {"text": "hi", "times": 1})
        wrong = (await server.post("/members/notes", {"text": "hi", "times": "x"}, **ALICE)).json()["error"]
        assert wrong["param"] == "times"
        assert (await server.post("/members/notes", {"text": "x" * (1 << 16)}, **ALICE)).status == 413
        with caplog.at_level(logging.ERROR):
            assert (await server.post("/members/notes", {"text": "fail"}, **ALICE)).status == 500
        assert "http_extension 'members' (frame-members 1.2) failed in its route /members/notes" in caplog.text
        described = (await server.request("GET", "/openapi.json", headers=[(b"x-member", b"bob")])).json()
        assert described["paths"]["/members/notes"]["post"]["requestBody"]
        assert "Note" in described["components"]["schemas"]


async def test_extensions_are_selected_and_denied(installed: dict[str, Any]) -> None:
    async with serving({"server": {"extensions": ["openai"]}}) as server:
        assert (await server.post("/v1/completions", TEXT)).status == 200
        assert (await get(server, "/health")).status == (await get(server, "/metrics")).status == 200
        for path in ("/v1/messages", "/generate", "/api/chat", "/members/notes"):
            assert (await server.post(path, {})).status == 404, path
        assert "/v1/messages" not in (await get(server, "/openapi.json")).json()["paths"]
    async with serving({"server": {"extensions": ["anthropic"]}}) as server:
        assert [(await get(server, "/v1/models")).status, (await server.post("/v1/completions", TEXT)).status] == [200, 404]
    for plugins, extensions, words in (
        ({"deny": ["frame-members"]}, ["members"], "members"),
        ({}, ["member"], "did you mean|members"),
        ({"options": {"http_extension/members": {"member": []}}}, ["members"], "member is unknown"),
    ):
        with pytest.raises(Exception, match=words):
            async with serving({"server": {"extensions": extensions}, "plugins": plugins}):
                pass


@pytest.mark.slow
def test_a_server_serves_the_package_or_says_why_not(site: Path, checkpoint: Path) -> None:
    path = {"PYTHONPATH": os.pathsep.join((str(site), os.environ.get("PYTHONPATH", "")))}
    flags = ("--max-model-len", "512", "--max-total-tokens", "1024")
    with RunningServer(checkpoint, "--http-extensions", "openai,members", *flags, env=path) as server:
        assert server.get("/members/count") == {"members": 1}
        assert [server.post(route, TEXT).status_code for route in ("/v1/completions", "/generate")] == [402, 404]
    command = [sys.executable, "-m", "frame", "serve", "--model", str(checkpoint), "--port", "0", *flags]
    failing = ("--http-extensions", "members", "--set", 'plugins.options={"http_extension/members": {"members": ["everyone"]}}')
    done = subprocess.run([*command, *failing], capture_output=True, text=True, env={**os.environ, **path}, timeout=500, check=False)
    assert "http_extension 'members' (frame-members 1.2) failed in Members.__init__ at the start: ValueError" in done.stderr
    assert done.returncode == 78


def test_the_package_passes_its_suite(installed: dict[str, Any]) -> None:
    subject = find(load_registry(), "http_extension:members", Setting(options={"members": ["alice"]}))
    found = checks("http_extension", subject)
    assert len(found) > 8
    for check in found:
        check.run()


OWNER = "http_extension 'test' (frame-test 1)"


def extensions_of(*own: HttpExtension) -> Extensions:
    """The in-tree APIs, then these."""
    registry = load_registry(installed=False)
    for each in own:
        record = PluginRecord("http_extension", "test", "test:Test", "", distribution="frame-test", version="1")
        note_origin(type(each), record, KINDS[record.kind].change)
    return Extensions([*(registry.load(each)(HttpContext("")) for each in registry.records("http_extension")), *own])


class Fails(HttpExtension):
    """Its hooks raise for requests that ask for it."""

    async def on_request(self, request: HttpRequest) -> None:
        if "x-fail" in request.headers:
            raise KeyError("a bug")
        if "x-odd" in request.headers:
            raise RefuseRequest(200, "accepted")

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        if "x-fail-after" in request.headers:
            raise KeyError("a bug")


async def test_a_failing_hook_ends_its_request_alone_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        server.app = App(server.services, extensions=extensions_of(Fails(HttpContext(""))))
        failures = (("x_fail", 500, "failed in on_request"), ("x_odd", 500, "refused a request with status 200"))
        for header, status, words in (*failures, ("x_fail_after", 200, "failed in on_response")):
            caplog.clear()
            assert (await server.post("/v1/completions", TEXT, **{header: "1"})).status == status
            assert f"{OWNER} {words}" in caplog.text
            assert (await server.post("/v1/completions", TEXT)).status == 200
        assert (await get(server, "/health", x_fail="1")).status == 200  # hooks do not run for routes that are open to all


class Adds(HttpExtension):
    def make_middleware(self) -> Any:
        return [(AddHeader, {"value": b"1"}), (Breaks, {})]


class Breaks(AddHeader):
    """Raises before or within a response."""

    def __init__(self, app: Any) -> None:
        super().__init__(app, b"2")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/load":
            raise KeyError("a bug")
        await self.app(scope, receive, send)


async def test_middleware_sees_responses_of_all_routes(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        server.app = App(server.services, extensions=extensions_of(Adds(HttpContext(""))))
        for reply in (
            await server.post("/v1/completions", TEXT), await server.post("/v1/completions", {**TEXT, "stream": True}),
            await get(server, "/none"), await get(server, "/health"),
        ):  # fmt: skip
            assert reply.headers["x-extension"] == "1"
        failed = await get(server, "/load")
        assert (failed.status, failed.json()["error"]["type"]) == (500, "server_error")
        assert f"{OWNER} failed in its middleware" in caplog.text


def routes(*paths: str) -> HttpExtension:
    """An extension with routes of these paths."""

    class Routes(HttpExtension):
        def make_routers(self) -> Any:
            router = APIRouter()
            for path in paths:
                router.add_api_route(path, lambda: None, methods=["GET"])
            return [router]

    return Routes(HttpContext(""))


def returning(**methods: Any) -> HttpExtension:
    """An extension whose methods return these values."""
    return type("Returns", (HttpExtension,), {name: lambda self, value=value: value for name, value in methods.items()})(HttpContext(""))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (routes("/v1/models"), "GET /v1/models is a route of"),
        (routes("/health"), "GET /health is a route of the server"),
        (routes("/a", "/a"), "GET /a is a route of"),
        (routes("/a/{number:int}"), "typed parameter"),
        (returning(make_routers=[3]), r"returned \[3\]"),
        (returning(make_routers=3), "make_routers returned 3"),
        (returning(make_middleware=[AddHeader]), "make_middleware returned"),
    ],
)
def test_what_cannot_be_served_stops_the_start_and_is_named(own: HttpExtension, words: str) -> None:
    with pytest.raises(PluginError, match=words) as caught:
        extensions_of(own)
    assert OWNER in str(caught.value)


async def test_without_hooks_nothing_runs() -> None:
    async with serving() as server:
        assert (server.app.hooks, server.app.extensions.middleware) == (None, [])

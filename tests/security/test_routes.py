"""Access levels of all routes of both listeners, for many spellings of each path and each kind of
key.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends

import frame.entrypoints.http.app as app_module
from frame.config.server_sections import ServerSection
from frame.entrypoints.http.app import App
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.extensions import CORE_ROUTES
from frame.entrypoints.http.protocol.access import Gate
from frame.entrypoints.http.protocol.api_route import Access, ApiRoute, ApiRouter, RequireAccess
from frame.entrypoints.http.protocol.routing import PathIndex, decode_path
from frame.entrypoints.keys import KeyAccess
from frame.interfaces.keys import KeyStoreContext
from frame.plugins.key_stores.file import FileKeyStore
from tests.entrypoints.inprocess import InProcess, serving
from tests.entrypoints.published import ROUTES
from tests.security.test_connections import listening, talk

USER_KEY, ADMIN_KEY = b"user-key", b"admin-key"
KEYS: dict[str, list[tuple[bytes, bytes]]] = {
    "none": [],
    "wrong": [(b"authorization", b"Bearer wrong-key")],
    "user": [(b"authorization", b"Bearer " + USER_KEY)],
    "admin": [(b"x-api-key", ADMIN_KEY)],
}
ENDS = (
    "", "/", "//", "/.", "/..", "/./", "%0a", "%0A", "%0d", "%0d%0a", "%0a%0a", "%00", "%09", "%20", "%7f", "%c2%85", "%e2%80%a8", "%2f",
    "%2F%2e%2e", "%5c", "\\", ";", ";x=1", "?", "?x=%0a", "?x#y", "%3f", "%23", "%", "%zz", "%c0%af", "%ff", ".json", "%252f", "%250a",
    "%0a/", "/%0a", "é", "%EF%BC%8F",
)  # fmt: skip
STARTS = ("/", "/.", "/%2e", "/x/..", "/health/..", "/health/%2e%2e", "/health%2f..", "/page/..", "/page/..%2f..", "/page/x/..", "/page",
          "%0a", "%2f", "\\", "http://x")  # fmt: skip


def spellings(path: str) -> list[str]:
    """Spellings of a route's path that access control and the router might read differently."""
    path = path.replace("{name:path}", "frame-tiny").replace("{name}", "x1")
    middle = [
        path.upper(), path.title(), path.replace("/", "//"), path.replace("/", "%2f"), path.replace("/", "\\"), path.replace("/", "/./"),
        "/" + path[1:].replace("/", "%2F"), path[:1] + "".join(f"%{ord(c):02x}" for c in path[1:2]) + path[2:],
        path[:-1] + f"%{ord(path[-1]):02x}", "/" + "".join(c if c == "/" else f"%{ord(c):02X}" for c in path[1:]),
        "/" + "".join(f"%25{ord(c):02x}" for c in path[1:]), path[:1] + "%00" + path[1:], path[:1] + "%0a" + path[1:],
        "/" + "".join(chr(ord(c) + 0xFEE0) if c.isalpha() else c for c in path[1:]), "/page/" + path[1:].replace("/", "%2f"),
    ]  # fmt: skip
    return [path + end for end in ENDS] + [start + path for start in STARTS] + middle


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["some", "all"])
async def test_no_spelling_of_a_path_runs_more_than_the_key_allows(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """`some`: each route and key gets other spellings than the one before, and its own path."""
    ran: list[ApiRoute] = []

    def spied(route: ApiRoute) -> ApiRoute:
        """The same route; its endpoint takes what comes and answers at once."""

        async def endpoint(**_: Any) -> Any:
            ran.append(route)
            return {}

        other = copy.copy(route)
        other.endpoint, other.body_model = endpoint, None
        other.app = other._reply
        return other

    sections = {"server": {"api_key": USER_KEY.decode(), "admin_key": ADMIN_KEY.decode()}}
    tried = 0
    async with serving(sections) as server:
        for is_admin, routes in ((False, ROUTES), (True, CORE_ROUTES)):
            allowed = {
                "none": {Access.OPEN},
                "wrong": {Access.OPEN},
                "user": {Access.OPEN} if is_admin else {Access.OPEN, Access.USER, Access.OWN},
                "admin": set(Access) if is_admin else {Access.OPEN, Access.OWN, Access.ADMIN},
            }
            server.app = App(server.services, is_admin, tuple(spied(route) for route in routes))
            for number, (operation, (name, headers)) in enumerate(itertools.product(routes, KEYS.items())):
                some = spellings(operation.path)[(number + number // len(KEYS)) % step :: step]
                for spelling, method in itertools.product(some, {*operation.methods, "GET", "HEAD"}):
                    ran.clear()
                    reply = await server.request(method, spelling, b"", headers)
                    tried += 1
                    where = f"{method} {spelling} with the key {name} ran {ran} and answered {reply.status}"
                    assert len(ran) <= 1 and all(one.access in allowed[name] for one in ran), where
                    assert bool(ran) == (reply.status == 200), where
                    assert ran or reply.status in (400, 401, 403, 404, 405), where
                ran.clear()
                path = spellings(operation.path)[0]
                await server.request(min(operation.methods), path, b"", headers)
                assert [one.path for one in ran] == [operation.path] * (operation.access in allowed[name]), f"{path} with the key {name}"
    assert tried > 20_000 // step


async def test_line_feed_after_the_path_is_refused() -> None:
    async with serving({"server": {"api_key": "user", "admin_key": "op"}}) as server:
        for path in ("/page/cache.json", "/page/about.json", "/page/live.json", "/server_info", "/flush_cache", "/pause_generation"):
            for end in ("%0a", "%00", "%0d%0a", "%7f"):
                for method, headers in itertools.product(("GET", "POST"), ([], [(b"authorization", b"Bearer user")])):
                    reply = await server.request(method, path + end, b"{}", headers)
                    assert reply.status == 400, path
                    assert "control character" in reply.json()["error"]["message"]


async def test_bytes_on_a_socket() -> None:
    """The router reads the path as uvicorn decodes it."""
    async with serving({"server": {"api_key": "user"}}) as server:
        for path, expected in (
            ("/health", 200), ("/health/", 200), ("/health%0a", 400), ("/page/cache.json%0a", 400), ("/page/cache.json", 401),
            ("/page%2fcache.json", 400), ("/nowhere", 401), ("//page/cache.json", 401), ("/page/cache.json/", 401), ("/%zz", 400),
        ):  # fmt: skip
            async with listening(server.app) as connect:
                reply = await talk(connect, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            assert int(reply.split()[1]) == expected, path


@pytest.mark.parametrize("is_admin", [False, True])
async def test_the_gate_admits_each_level_for_its_own_key(is_admin: bool) -> None:
    keys = KeyAccess(lambda: FileKeyStore(KeyStoreContext(USER_KEY.decode())))
    gate = Gate(ServerSection(api_key=USER_KEY.decode(), admin_key=ADMIN_KEY.decode()), keys, is_admin)
    admitted = set()
    for (name, headers), access in itertools.product(KEYS.items(), Access):
        with contextlib.suppress(ApiError):
            scope: dict[str, Any] = {"headers": [(b"host", b"localhost"), *headers], "server": ("127.0.0.1", 1)}
            await gate.identify(scope)
            gate.admit(scope, access)
            admitted.add((name, access.name))
    keyed = {("admin", "OWN"), ("admin", "ADMIN")} | ({("admin", "USER")} if is_admin else {("user", "USER"), ("user", "OWN")})
    assert admitted == {(name, "OPEN") for name in KEYS} | keyed


def test_route_without_access_level_is_refused() -> None:
    async def endpoint() -> Any:
        """Nothing."""

    with pytest.raises(TypeError):
        ApiRouter()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no access level"):
        ApiRouter(access=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="/x declares no access level"):
        ApiRoute("/x", endpoint, methods=["GET"])
    with pytest.raises(TypeError, match="/x declares no access level"):
        ApiRoute("/x", endpoint, methods=["GET"], dependencies=[Depends(endpoint)])


def test_every_route_declares_one_level() -> None:
    """Of both listeners; the dependency that admits a request is the one that states the level."""
    for route in (*ROUTES, *CORE_ROUTES):
        admitting = [each.dependency for each in route.dependencies if isinstance(each.dependency, RequireAccess)]
        assert [each.level for each in admitting] == [route.access], route.path
        assert route.dependant.dependencies[0].call is admitting[0], f"{route.path} does something before"


def test_no_code_compares_paths_of_requests() -> None:
    """`scope["path"]` is used in errors, logs and spans; only the router makes decisions by it."""
    folder = Path(app_module.__file__).parent
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare | ast.Match):
                assert '["path"]' not in ast.unparse(node).replace("'", '"').partition("\n")[0], f"{file.name}:{node.lineno}"


async def test_trailing_slash_is_ignored() -> None:
    async with serving({"server": {"api_key": "user"}}) as server:
        key = [(b"authorization", b"Bearer user"), (b"content-type", b"application/json")]
        for path in ("/v1/models/", "/v1/models/frame-tiny/", "/metrics/", "/health/"):
            assert (await server.request("GET", path, b"", key)).status == 200, path
        reply = await server.request("POST", "/v1/completions/", b'{"model": "", "prompt": [5, 6], "max_tokens": 1}', key)
        assert reply.status == 200
        assert (await server.request("GET", "/v1/models//", b"", key)).status == 404
        assert (await server.request("GET", "/v1/models/")).status == 401


# the router ---------------------------------------------------------------------------------------


def router() -> PathIndex[str]:
    rows = [
        ("/", ("GET",), "index"),
        ("/a", ("GET",), "read"),
        ("/a", ("POST",), "write"),
        ("/a/{name}", ("GET", "DELETE"), "one"),
        ("/a/b", ("GET",), "static"),
        ("/a/{name}/c", ("GET",), "below"),
        ("/m.n/{name:path}", ("GET",), "rest"),
    ]
    return PathIndex(rows)


@pytest.mark.parametrize(
    ("method", "raw", "expected"),
    [
        ("GET", b"/", ("index", {})),
        ("GET", b"/a", ("read", {})),
        ("HEAD", b"/a", ("read", {})),
        ("POST", b"/a/", ("write", {})),
        ("PUT", b"/a", (None, {})),
        ("GET", b"/a/b", ("static", {})),
        ("DELETE", b"/a/x%20y", ("one", {"name": "x y"})),
        ("GET", b"/a/x/c/", ("below", {"name": "x"})),
        ("GET", b"/m.n/x/y", ("rest", {"name": "x/y"})),
        # As OpenAI's client encodes a model name
        ("GET", b"/m.n/x%2Fy", ("rest", {"name": "x/y"})),
        ("GET", b"/mxn/x", None),
        ("GET", b"/A", None),
        ("GET", b"//", None),
        ("GET", b"a", None),
    ],
)
def test_paths_that_the_router_finds(method: str, raw: bytes, expected: Any) -> None:
    found = router().find(decode_path(raw))
    assert (None if found is None else (found.endpoint(method), found.parameters)) == expected


@pytest.mark.parametrize(
    "raw", [b"/a\n", b"/a%0a", b"/a%00", b"/%zz", b"/%", b"/%f", b"/%ff", b"/%c2%85", b"/\xff", b"/a%2fb", b"/a/x%2Fc"]
)
def test_paths_that_the_router_refuses(raw: bytes) -> None:
    with pytest.raises(ApiError) as error:
        router().find(decode_path(raw))
    assert error.value.status == 400


def test_methods_and_doubles() -> None:
    found = router().find("/a/x")
    assert found is not None and found.methods() == ["DELETE", "GET", "HEAD"]
    with pytest.raises(ValueError, match="GET /a is declared twice"):
        PathIndex([("/a", ("GET",), 1), ("/a", ("GET", "POST"), 2)])


# what changes state -------------------------------------------------------------------------------

READING = {"server_info", "outline_cache", "outline_requests"}  # commands that do not change the engine


async def actions(server: InProcess, path: str, method: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands of a request to the engine that change its state."""
    client, found = server.services.client, list[str]()
    control, abort, start = client.send_command, client.abort_requests, client.start_sequence

    def spied(name: str, act: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            found.append(given[0] if name == "control" else name)
            return act(*given, **named)

        return noted

    with monkeypatch.context() as patched:
        patched.setattr(client, "send_command", spied("control", control))
        patched.setattr(client, "abort_requests", spied("abort", abort))
        patched.setattr(client, "start_sequence", spied("start", start))
        await server.request(method, path, b'{"abort_all": true}')
    return [action for action in found if action not in READING]


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.slow
async def test_get_and_head_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving({"batches": {"folder": str(tmp_path / "batches")}}) as server:
        kept = (await server.request("POST", "/v1/responses", b'{"input": "hi", "max_output_tokens": 2}')).json()["id"]
        files = listed(tmp_path)
        for is_admin, routes in ((False, ROUTES), (True, CORE_ROUTES)):
            server.app = App(server.services, is_admin)
            for operation, method, query in itertools.product(routes, ("GET", "HEAD"), ("", "?abort_all=true&rid=x")):
                path = operation.path.replace("{name}", kept).replace("{name:path}", "frame-tiny")
                expected = ["start"] if operation.path == "/health_generate" else []
                assert await actions(server, path + query, method, monkeypatch) == expected, f"{method} {path} changes state"
        server.app = App(server.services)
        assert (await server.request("GET", f"/v1/responses/{kept}")).status == 200
        assert listed(tmp_path) == files
        # The check finds a change
        assert await actions(server, "/flush_cache", "POST", monkeypatch) == ["flush_cache"]
        assert (await server.request("GET", "/flush_cache")).status == 405

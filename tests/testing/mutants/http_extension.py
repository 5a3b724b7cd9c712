"""HTTP extensions with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from frame.interfaces.http import HttpContext, HttpExtension, HttpRequest, HttpResponse, RefuseRequest
from tests.testing.mutants import MutantList


class AddHeader:
    """ASGI middleware that adds a header to each response."""

    def __init__(self, app: Any, value: bytes) -> None:
        self.app = app
        self.value = value

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_header(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-extension", self.value)]}
            await send(message)

        await self.app(scope, receive, with_header)


def read_nothing() -> dict[str, str]:
    return {}


class Reference(HttpExtension):
    """One route, a check of a header, a bounded audit, and a middleware."""

    open_paths: ClassVar[frozenset[str]] = frozenset({"/extension/status"})
    middleware: ClassVar[type] = AddHeader
    conformance_requests = (HttpRequest("POST", "/v1/chat/completions", "none", {"authorization": "Bearer key"}, "id"),)
    conformance_refusals = ((HttpRequest("POST", "/v1/chat/completions", "none", {"authorization": "Bearer other"}, "id"), 403),)
    conformance_bodies: ClassVar[Mapping[str, Any]] = {"/extension/status": {"model": "model", "recorded": 1}}

    def __init__(self, context: HttpContext, options: Any = None) -> None:
        self.name = context.served_name
        self.audit: deque[tuple[str, int]] = deque(maxlen=100)

    def make_routers(self) -> Sequence[Any]:
        from fastapi import APIRouter

        router = APIRouter()

        @router.get("/extension/status")
        async def read_status() -> dict[str, Any]:
            """The number of recorded responses."""
            return {"model": self.name, "recorded": len(self.audit)}

        return [router]

    def make_middleware(self) -> Sequence[tuple[type, Mapping[str, Any]]]:
        return [(self.middleware, {"value": b"1"})]

    async def on_request(self, request: HttpRequest) -> None:
        if not request.headers.get("authorization", "").startswith("Bearer k"):
            raise RefuseRequest(403, "this server is for members; send Authorization: Bearer KEY")

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        self.audit.append((request.request_id, response.status))


mutant = MUTANTS = MutantList("http_extension", reference=Reference)


@mutant
class TakesAServedPath(Reference):
    """Declares a route with the path of a route of the server."""

    def make_routers(self) -> Sequence[Any]:
        from fastapi import APIRouter

        router = APIRouter()
        router.add_api_route("/v1/models", read_nothing, methods=["GET"])
        return [router]


@mutant
class AddsRoutesEachTime(Reference):
    """Adds its route to one router of the class at each call."""

    router: ClassVar[Any] = None

    def make_routers(self) -> Sequence[Any]:
        from fastapi import APIRouter

        kind = type(self)
        kind.router = kind.router or APIRouter()
        kind.router.add_api_route(f"/extension/status{len(kind.router.routes)}", read_nothing, methods=["GET"])
        return [kind.router]

    open_paths = frozenset()


@mutant
class ReturnsOneRouter(Reference):
    """Returns a router instead of a list of routers."""

    def make_routers(self) -> Any:
        return super().make_routers()[0]


@mutant
class MisspellsAnOpenPath(Reference):
    """Names an open path that none of its routes has, so that its route needs a key."""

    open_paths = frozenset({"/extension/state"})


@mutant
class FailsInItsRoute(Reference):
    """Reads a list of its own in its route that no constructor made."""

    records: list[str]

    def make_routers(self) -> Sequence[Any]:
        from fastapi import APIRouter

        router = APIRouter()
        router.add_api_route("/extension/status", lambda: {"recorded": len(self.records)}, methods=["GET"])
        return [router]


@mutant
class HooksAreNoCoroutines(Reference):
    """Defines `on_request` without async, so that awaiting its result fails."""

    def on_request(self, request: HttpRequest) -> None:  # type: ignore[override]
        return None


@mutant
class NeedsTheHeader(Reference):
    """Fails on requests without the header that it checks."""

    async def on_request(self, request: HttpRequest) -> None:
        if request.headers["authorization"] != "Bearer key":
            raise RefuseRequest(403, "wrong key; send another")


@mutant
class DecodesAnyHeader(Reference):
    """Decodes Basic credentials without catching malformed ones."""

    async def on_request(self, request: HttpRequest) -> None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        if scheme == "Basic" and base64.b64decode(value, validate=True) != b"user:secret":
            raise RefuseRequest(401, "wrong user or password; send others")


@mutant
class RaisesPermissionError(Reference):
    """Refuses by an exception of its own instead of RefuseRequest."""

    async def on_request(self, request: HttpRequest) -> None:
        if "authorization" not in request.headers:
            raise PermissionError("no key")


@mutant
class RefusesWithSuccess(Reference):
    """Refuses with status 200."""

    async def on_request(self, request: HttpRequest) -> None:
        if "authorization" not in request.headers:
            raise RefuseRequest(200, "this server is for members; send a key")


@mutant
class RefusesWithoutReason(Reference):
    """Refuses with an empty sentence."""

    async def on_request(self, request: HttpRequest) -> None:
        if "authorization" not in request.headers:
            raise RefuseRequest(401, "")


@mutant
class SplitsHeaders(Reference):
    """Copies a line break into a response header."""

    async def on_request(self, request: HttpRequest) -> None:
        if "authorization" not in request.headers:
            raise RefuseRequest(401, "send a key", headers={"www-authenticate": f"Basic realm={request.path}\r\nx-more: 1"})


@mutant
class ReturnsItsDecision(Reference):
    """Returns False for a refused request, which accepts it."""

    async def on_request(self, request: HttpRequest) -> Any:
        return request.headers.get("authorization") == "Bearer key"


@mutant
class KeepsTheCurrentRequest(Reference):
    """Keeps the request in the object while it waits, where another request replaces it."""

    async def on_request(self, request: HttpRequest) -> None:
        self.current = request
        await asyncio.sleep(0)
        await super().on_request(self.current)


@mutant
class SharesStateInTheClass(Reference):
    """Keeps the hosts that it has seen in the class, and accepts them in every server."""

    seen: ClassVar[set[str]] = set()

    async def on_request(self, request: HttpRequest) -> None:
        if request.client in self.seen:
            return
        await super().on_request(request)

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        self.seen.add(request.client)


@mutant
class BlocksTheEventLoop(Reference):
    """Waits for a slow service without giving up the event loop."""

    async def on_request(self, request: HttpRequest) -> None:
        if request.request_id == "id-0":
            time.sleep(0.3)  # noqa: ASYNC251 - the bug
        await super().on_request(request)


@mutant
class KeepsEveryRequest(Reference):
    """Appends each response to a list without a bound."""

    def __init__(self, context: HttpContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.audit = []  # type: ignore[assignment]


@mutant
class CountsByTenant(Reference):
    """Keeps a counter for each tenant for ever."""

    def __init__(self, context: HttpContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.counts: dict[str, list[int]] = {}

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        self.counts.setdefault(request.tenant, []).append(response.status)


@mutant
class KnowsFewStatuses(Reference):
    """Fails to record statuses other than 200 and 500."""

    names: ClassVar[dict[int, str]] = {200: "ok", 500: "failed"}

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        self.audit.append((self.names[response.status], response.status))


@mutant
class DividesByTheDuration(Reference):
    """Computes a rate from a duration that may be zero."""

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        self.audit.append((request.request_id, int(response.output_tokens / response.seconds)))


class Buffers(AddHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        held: list[Any] = []

        async def hold(message: Any) -> None:
            held.append(message)

        await self.app(scope, receive, hold)
        for message in held:
            await send(message)


class DropsEmpty(AddHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def decoded(message: Any) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": message["body"].decode("utf-8", "ignore").encode()}
            await send(message)

        await self.app(scope, receive, decoded)


class ReadsBody(AddHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await self.app(scope, receive, send)


class Swallows(AddHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except BaseException:
            return


class ReplacesHeaders(AddHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def replaced(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [(b"x-extension", self.value)]}
            await send(message)

        await self.app(scope, receive, replaced)


class HidesErrors(AddHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Exception:
            return


class ReadsTexts(AddHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        for name, value in scope.get("headers", ()):
            name.decode(), value.decode()
        await super().__call__(scope, receive, send)


mutant.each(
    Reference,
    "middleware",
    ("BuffersResponses", "Its middleware holds a stream until it is complete.", Buffers),
    ("DecodesBodies", "Its middleware decodes parts of a response as text and loses bytes that are not valid.", DropsEmpty),
    ("ReadsTheBody", "Its middleware reads the first part of the body and does not hand it on.", ReadsBody),
    ("HidesCancellation", "Its middleware catches the cancellation of a request.", Swallows),
    ("DropsHeaders", "Its middleware replaces the headers of responses.", ReplacesHeaders),
    ("HidesErrors", "Its middleware catches errors of the server, and sends no response.", HidesErrors),
    ("DecodesHeaders", "Its middleware decodes headers as UTF-8, and fails for others.", ReadsTexts),
)


@mutant
class LogsHeaders(Reference):
    """Logs the headers of requests that are refused, with the keys in them."""

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        await super().on_response(request, response)
        if response.status >= 400:
            logging.getLogger("extension").warning("refused: %s", dict(request.headers))


@mutant
class CountsAgents(Reference):
    """Counts the requests of each user agent, which clients choose."""

    def __init__(self, context: HttpContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.agents: dict[str, int] = {}

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        agent = request.headers.get("user-agent", "")
        self.agents[agent] = self.agents.get(agent, 0) + 1


@mutant
class ForgetsServedRequestsAlone(Reference):
    """Keeps the requests under way, and those that ended with an error for ever."""

    def __init__(self, context: HttpContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.running: dict[str, HttpRequest] = {}

    async def on_request(self, request: HttpRequest) -> None:
        self.running[request.request_id] = request
        await super().on_request(request)

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        if response.status < 400:
            self.running.pop(request.request_id, None)


@mutant
class LogsTheLastRequest(Reference):
    """Keeps the request in itself, and logs a response with the id of the last one."""

    async def on_request(self, request: HttpRequest) -> None:
        self.request = request
        await super().on_request(request)

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        logging.getLogger(__name__).debug("%s has status %d", getattr(self, "request", request).request_id, response.status)

"""HTTP extensions: house rules, a header and a route; and extensions with a bug each."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import BaseModel

from frame.interfaces.http import HttpContext, HttpExtension, HttpRequest, HttpResponse, RefuseRequest
from tests.testing.held_out import Wrong


class AddsHeader:
    """ASGI middleware: adds `x-house` to each response."""

    def __init__(self, app: Any, value: str) -> None:
        self.app, self.value = app, value.encode("latin-1", "replace")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_header(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"x-house", self.value)]}
            await send(message)

        await self.app(scope, receive, send_with_header if scope["type"] == "http" else send)


class House(HttpExtension):
    """Refuses `x-house: closed`, and counts responses by status."""

    middleware: ClassVar[type] = AddsHeader

    def __init__(self, context: HttpContext, options: BaseModel | None = None) -> None:
        self.context = context
        self.statuses: Counter[int] = Counter()
        self.seconds: deque[float] = deque(maxlen=1000)

    def make_routers(self) -> Sequence[APIRouter]:
        router = APIRouter(prefix="/house")

        @router.get("/status")
        async def read_status() -> dict[str, Any]:
            """Responses by status."""
            return self.describe()

        return [router]

    def describe(self) -> dict[str, Any]:
        return {"model": self.context.served_name, "responses": {str(status): count for status, count in self.statuses.items()}}

    def make_middleware(self) -> Sequence[tuple[type, Mapping[str, Any]]]:
        return [(self.middleware, {"value": "open"})]

    async def on_request(self, request: HttpRequest) -> None:
        if request.headers.get("x-house") == "closed":
            raise RefuseRequest(403, "the house is closed; leave x-house out")

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        self.statuses[response.status] += 1
        self.seconds.append(response.seconds)


TWIN = House
WRONG = Wrong()


@WRONG.add("Responses are booked on other tenants: the request is kept in the object until a response comes.")
class KeepsRequest(House):
    current: HttpRequest | None = None
    booked: ClassVar[Counter[str]] = Counter()

    async def on_request(self, request: HttpRequest) -> None:
        self.current = request
        await super().on_request(request)

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        await super().on_response(request, response)
        if self.current is not None:
            self.booked[self.current.tenant] += response.output_tokens

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "tokens": dict(self.booked)}


@WRONG.add("The server's memory grows with each request: start times are kept by request id, and refused ones never leave.")
class KeepsIds(House):
    def __init__(self, context: HttpContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.starts: dict[str, float] = {}

    async def on_request(self, request: HttpRequest) -> None:
        self.starts[request.request_id] = time.monotonic()
        await super().on_request(request)


@WRONG.add("All streams stand still while one request is checked: the hook waits for a service without `await`.")
class BlocksLoop(House):
    async def on_request(self, request: HttpRequest) -> None:
        time.sleep(0.05)  # noqa: ASYNC251 - the round trip of a synchronous client
        await super().on_request(request)


class CollectsBody(AddsHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        messages: list[Any] = []

        async def keep(message: Any) -> None:
            messages.append(message)

        await super().__call__(scope, receive, keep if scope["type"] == "http" else send)
        for message in messages:
            await send(message)


@WRONG.add("Streams come in one piece at their end: the middleware collects the messages of a response.")
class CollectsStreams(House):
    middleware = CollectsBody


class HttpOnly(AddsHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])  # there are none in "lifespan"
        if b"x-house-debug" in headers:
            scope = {**scope, "house_debug": True}
        await super().__call__(scope, receive, send)


@WRONG.add("The server does not start or stop properly: the middleware fails on events that are no requests.")
class FailsOnLifespan(House):
    middleware = HttpOnly


class CutsStream(AddsHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = [0]

        async def send_some(message: Any) -> None:
            size[0] += len(message.get("body", b""))
            if size[0] <= 1_000_000 or not message.get("body"):
                await send(message)

        await super().__call__(scope, receive, send_some if scope["type"] == "http" else send)


@WRONG.add("Responses above 1 MB, such as batches of embeddings, lose their end: the middleware limits them.")
class CutsResponses(House):
    middleware = CutsStream


class LengthOfFirst(AddsHeader):
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_changed(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message.get("headers", ()) if name != b"content-type"]
                message = {**message, "headers": kept}
            await send(message)

        await super().__call__(scope, receive, send_changed if scope["type"] == "http" else send)


@WRONG.add("Clients do not parse responses: the middleware replaces headers, and leaves the content type out.")
class DropsHeaders(House):
    middleware = LengthOfFirst


@WRONG.add("A refused client is told that all is well: the refusal has the status 200, and a sentence of the error in it.")
class RefusesWithOk(House):
    async def on_request(self, request: HttpRequest) -> None:
        if request.headers.get("x-house") == "closed":
            raise RefuseRequest(200, "the house is closed; leave x-house out")
        if request.headers.get("user-agent", "").startswith("curl/0"):
            raise RefuseRequest(302, "moved", headers={"location": "/"})


@WRONG.add("Model lists of the server are replaced: the extension has a route of the same path.")
class TakesPath(House):
    def make_routers(self) -> Sequence[APIRouter]:
        router = APIRouter()

        @router.get("/v1/models")
        async def list_models() -> dict[str, Any]:
            """The models."""
            return {"data": []}

        return [*super().make_routers(), router]


@WRONG.add("Requests that end at once are answered with 500: tokens are divided by seconds, which are 0.")
class DividesBySeconds(House):
    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        await super().on_response(request, response)
        self.rate = response.output_tokens / response.seconds
        self.share = response.output_tokens / (response.prompt_tokens + response.output_tokens)


@WRONG.add("Anyone reads who uses the server: its audit route needs no key, and lists tenants.")
class OpensAudit(House):
    open_paths: ClassVar[frozenset[str]] = frozenset({"/house/status", "/v1/chat/completions"})

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        await super().on_response(request, response)
        self.last = request.tenant

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "last": getattr(self, "last", "")}


@WRONG.add("Nothing is ever refused: errors of the check are swallowed, and a refusal is one.")
class SwallowsRefusals(House):
    async def on_request(self, request: HttpRequest) -> None:
        try:
            await super().on_request(request)
        except Exception:
            return


@WRONG.add("Metrics have a series for each URL that a scanner tries: responses are counted by path, without a limit.")
class CountsPaths(House):
    def __init__(self, context: HttpContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.paths: Counter[str] = Counter()

    async def on_response(self, request: HttpRequest, response: HttpResponse) -> None:
        await super().on_response(request, response)
        self.paths[request.path] += 1

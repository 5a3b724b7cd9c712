"""Conformance checks for HTTP extensions: constructor, routes, hooks and middleware, without a
server.

Used by `frame plugins check` and the pytest plugin. An extension that refuses requests is checked
with the suite's own; give the class `conformance_requests` to add some that it accepts. The class
may state more of what it does, in `conformance_refusals` and `conformance_bodies`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import httpx
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from frame.interfaces.http import MAX_REFUSAL, MIN_REFUSAL, HttpContext, HttpExtension, HttpRequest, HttpResponse, RefuseRequest
from frame.testing.conformance import Check, SkipCheck, Subject, call_check, count_elements, find_checks
from frame.testing.generators import make_alike
from frame.testing.serving import http_examples
from frame.testing.serving.http_middleware import check_app

CONTEXT = HttpContext("model", max_context=4096)
MAX_SENTENCE = 4096  # characters of a refusal
MAX_TEXTS = 60  # of an extension's code, which are tried as values of headers
MAX_SECONDS = 1.8e-3  # for the fastest of some calls of a hook
MAX_BLOCKING = 0.2  # seconds that the event loop may stand still
FEW, MANY = 3000, 6000  # requests before memory is compared
MAX_GROWTH = 200  # elements that an extension may hold more after MANY requests than after FEW
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"authorization": "Bearer key"},
    {"authorization": "Basic !!! no base64"},
    {"authorization": ""},
    {"authorization": "Bearer", "x-api-key": "ü\x80"},
    {"content-type": "application/json", "user-agent": "x" * 8000, "x-forwarded-for": "::1, 10.0.0.1"},
)
OWN_HEADERS = {  # to which a number is added for each request
    "authorization": "Bearer", "user-agent": "agent", "x-forwarded-for": "10.0.0.1,", "x-request-id": "id", "cookie": "id=",
}  # fmt: skip
SECRET, SECRET_HEADERS = "conformance-secret-key", ("authorization", "x-api-key", "cookie", "proxy-authorization")
STATUSES = (200, 204, 304, 400, 401, 404, 429, 499, 500, 503)
Decision = tuple[str, int, str]


def example_requests(target: type) -> list[HttpRequest]:
    """The suite's requests, then those of the class."""
    chat = "/v1/chat/completions"
    paths = (("POST", chat, chat), ("GET", "/v1/models/a/b ü", "/v1/models/{name:path}"), ("PUT", "/", "none"))
    requests = [
        HttpRequest(method, path, route, MappingProxyType(headers), f"id-{number}", tenant, client)
        for number, headers in enumerate(HEADERS)
        for method, path, route in paths
        for tenant, client in (("", ""), ("tenant", "127.0.0.1"))
    ]
    return [*requests, *getattr(target, "conformance_requests", ()), *(each for each, _ in getattr(target, "conformance_refusals", ()))]


async def decide(extension: HttpExtension, request: HttpRequest) -> Decision:
    """What `on_request` makes of a request. Raises AssertionError for anything but None and a
    valid refusal."""
    hook: Any = extension.on_request
    try:
        returned = await hook(request)
    except RefuseRequest as refusal:
        status, sentence = refusal.status, refusal.sentence
        assert type(status) is int and MIN_REFUSAL <= status <= MAX_REFUSAL, f"on_request refuses with status {status!r}"
        assert isinstance(sentence, str) and sentence.strip(), "on_request refuses without a sentence"
        assert len(sentence) <= MAX_SENTENCE and "\n" not in sentence, "on_request refuses with a long sentence, or several lines"
        pairs = [*refusal.headers.items()]
        assert all("\n" not in text and "\r" not in text and text.isascii() for pair in pairs for text in pair), "a header is not one line"
        return "refused", status, sentence
    except Exception as error:
        raise AssertionError(f"on_request raises {type(error).__name__} ({error}) for headers {dict(request.headers)!r:.200}") from error
    assert returned is None, f"on_request returns {returned!r:.100}; return None or raise RefuseRequest"
    return "accepted", 0, ""


def suite(subject: Subject) -> Iterable[Check]:
    """The checks of one extension: those of the methods that its class has."""
    target = subject.target

    def make() -> Any:
        return target(CONTEXT, subject.options)

    def has(*names: str) -> bool:
        return any(getattr(target, name) is not getattr(HttpExtension, name) for name in names)

    by_method: tuple[tuple[tuple[str, ...], tuple[Callable[..., Any], ...]], ...] = (
        (("make_routers",), (check_routes, check_routes_are_repeatable, check_own_routes_respond)),
        (("on_request",), (check_decisions, check_headers_that_it_reads, check_requests_stand_alone)),
        (("on_request",), (check_objects_are_independent, check_tenants_are_apart)),
        (("on_response",), (check_responses, check_requests_under_way)),
        (("on_request", "on_response"), (check_hooks_are_coroutines, check_event_loop, check_hooks_are_fast, check_memory, check_secrets)),
        (("make_middleware",), (check_middleware,)),
    )
    yield Check("constructor", lambda: make() and None)
    for names, checks in by_method:
        for check in checks if has(*names) else ():
            yield Check(check.__name__.removeprefix("check_"), partial(call_check, check, make, target))
    for name, check in find_checks(http_examples.__name__) if has("on_request", "make_routers") else ():
        yield Check(name, partial(call_check, partial(check, requests=example_requests(target), decide=decide), make, target))


# routes -------------------------------------------------------------------------------------------


def _routes(extension: HttpExtension) -> list[Any]:
    routers = list(extension.make_routers())
    assert all(isinstance(router, APIRouter) for router in routers), "make_routers returns something else than APIRouter objects"
    return [route for router in routers for route in router.routes]


def check_routes(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """Routes are plain HTTP routes with paths of their own, and can be described."""
    from frame.entrypoints.http.extensions import CORE_ROUTES, load_built_in

    extension = make()
    routes = _routes(extension)
    served = {(route.path, method): route for route in load_built_in().routes for method in route.methods or ()}
    core = {(route.path, method) for route in CORE_ROUTES for method in route.methods or ()}
    seen = set()
    for route in routes:
        assert isinstance(route, APIRoute), f"{route!r} is no plain HTTP route"
        for method in route.methods or ():
            key = (route.path, method)
            assert served.get(key, route) is route and key not in core, f"{method} {route.path} is a route of the server"
            assert key not in seen, f"{method} {route.path} is declared twice"
            seen.add(key)
    unknown = extension.open_paths - {route.path for route in routes}
    assert not unknown, f"open_paths has {sorted(unknown)}, which is no path of the extension"
    get_openapi(title="extension", version="1", routes=routes)


def check_routes_are_repeatable(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """`make_routers` adds nothing to what it returned before."""
    first = [(route.path, sorted(route.methods or ())) for route in _routes(make())]
    extension = make()
    for _ in range(2):
        routes = [(route.path, sorted(route.methods or ())) for route in _routes(extension)]
        assert routes == first, f"make_routers returned {len(first)} routes, later {len(routes)}"


def check_own_routes_respond(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """Routes that need no parameter answer without an error of the server."""
    from frame.entrypoints.http.protocol.api_route import ApiRouter

    extension = make()
    routes = [route for router in extension.make_routers() if not isinstance(router, ApiRouter) for route in router.routes]
    plain: list[Any] = [route for route in routes if "GET" in (getattr(route, "methods", None) or ())]
    plain = [route for route in plain if "{" not in route.path]
    if not plain:
        raise SkipCheck("the extension has no route of its own that GET reads without parameters")
    for route in plain:
        status = asyncio.run(_get(route))
        assert status < 500, f"GET {route.path} answers {status}"


async def _get(route: Any) -> int:
    """The status of a response of a server that has this route alone."""
    app = FastAPI()
    app.router.routes.append(route)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://conformance") as client:
        try:
            return (await asyncio.wait_for(client.get(route.path), 10)).status_code
        except TimeoutError:
            raise AssertionError(f"GET {route.path} does not answer") from None
        except Exception as error:
            raise AssertionError(f"GET {route.path} raises {type(error).__name__}: {error}") from error


# hooks --------------------------------------------------------------------------------------------


def check_hooks_are_coroutines(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """Hooks are `async def` functions."""
    for name in ("on_request", "on_response"):
        assert inspect.iscoroutinefunction(getattr(make(), name)), f"{name} is no async def"


async def check_decisions(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """`on_request` accepts or refuses every request, whatever its headers."""
    for request in example_requests(target):
        await decide(make(), request)


class _WatchedHeaders(dict[str, str]):
    """Headers that note which names are asked for."""

    def __init__(self, headers: Mapping[str, str], asked: set[str]) -> None:
        super().__init__(headers)
        self._asked = asked

    def get(self, name: str, default: Any = None) -> Any:
        self._asked.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self._asked.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._asked.add(str(name))
        return super().__contains__(name)


def _list_texts(target: type) -> list[str]:
    """The texts in the code of a class: values that it compares with."""
    codes = [value.__code__ for kind in target.__mro__[:-1] for value in vars(kind).values() if inspect.isfunction(value)]
    texts: dict[str, None] = {}
    for code in codes:  # grows by the functions within
        for constant in code.co_consts:
            if inspect.iscode(constant):
                codes.append(constant)
            elif isinstance(constant, str) and constant.isascii() and constant.isprintable() and len(constant) < 60:
                texts[constant] = None
    return [*texts][:MAX_TEXTS]


async def check_headers_that_it_reads(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """Each header that it asks for has each text of its own code as a value. A refusal that it
    makes is raised, with the status of an error."""
    asked: set[str] = set()
    for request in example_requests(target):
        await decide(make(), replace(request, headers=_WatchedHeaders(request.headers, asked)))
    made: list[RefuseRequest] = []
    begin = RefuseRequest.__init__

    def note(self: RefuseRequest, *arguments: Any, **named: Any) -> None:
        made.append(self)
        begin(self, *arguments, **named)

    example = example_requests(target)[0]
    texts = _list_texts(target)
    with mock.patch.object(RefuseRequest, "__init__", note):
        for name in sorted(asked):
            for value in (*texts, *(f"{text}1" for text in texts)):
                made.clear()
                decision = await decide(make(), replace(example, headers=_WatchedHeaders({name: value}, asked)))
                assert decision[0] == "refused" or not made, f"on_request makes a refusal for {name}: {value!r}, and accepts the request"


async def check_requests_stand_alone(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """The decision about a request is the same alone and among others at once."""
    if getattr(target, "is_stateful", False):
        raise SkipCheck("is_stateful: the decision depends on earlier requests")
    requests = example_requests(target)
    alone = [await decide(make(), request) for request in requests]
    extension = make()
    for order in (requests, requests[::-1]):
        decisions = await asyncio.gather(*(decide(extension, request) for request in order))
        expected = alone if order is requests else alone[::-1]
        wrong = next((i for i, pair in enumerate(zip(decisions, expected, strict=True)) if pair[0] != pair[1]), None)
        assert wrong is None, f"alone the decision is {expected[wrong or 0]}, among other requests {decisions[wrong or 0]}"


async def check_objects_are_independent(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """What one object saw changes nothing for another, as of a second server."""
    requests = example_requests(target)
    before = [await decide(make(), request) for request in requests]
    first = make()
    for request in requests * 3:
        await decide(first, request)
        await first.on_response(request, HttpResponse(200, 0.1))
    after = [await decide(make(), request) for request in requests]
    assert before == after, "a new object decides otherwise after another one served requests"


async def check_tenants_are_apart(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """What one tenant sends changes no decision about another one, whose name begins alike."""
    example = example_requests(target)[3]
    for one, other in make_alike((8, 32, 60), fill="t"):
        busy, quiet = replace(example, tenant=one), replace(example, tenant=other)
        expected, extension = await decide(make(), quiet), make()
        for _ in range(400):
            await decide(extension, busy)
        got = await decide(extension, quiet)
        assert got == expected, f"after 400 requests of the tenant {one!r}, the decision about {other!r} is {got} and not {expected}"


async def check_hooks_are_fast(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    extension, request = make(), example_requests(target)[3]
    for name, hook in (
        ("on_request", lambda: decide(extension, request)),
        ("on_response", lambda: extension.on_response(request, HttpResponse(200, 0.1))),
    ):
        best = min([await measure_pause(hook) for _ in range(20)])
        assert best < MAX_SECONDS, f"{name} holds the event loop for {best * 1e3:.1f} ms each time"


async def check_responses(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """`on_response` raises for no status, for requests that `on_request` did not see either."""
    extension = make()
    for request in example_requests(target):
        for status in STATUSES:
            try:
                for tokens in (0, 70_000, 1 << 33):
                    await extension.on_response(request, HttpResponse(status, 0.0, tokens, tokens))
            except Exception as error:
                raise AssertionError(f"on_response raises {type(error).__name__} ({error}) for status {status}") from error


async def check_event_loop(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """Hooks do not block the event loop: files, other servers and long computations belong in
    threads."""
    extension, request = make(), example_requests(target)[0]
    for hook in (lambda: decide(extension, request), lambda: extension.on_response(request, HttpResponse(200, 0.1))):
        minimum = float("inf")
        for _ in range(5):  # a busy machine may stop the process now and then
            minimum = min(minimum, await measure_pause(hook))
            if minimum < MAX_BLOCKING:
                break
        assert minimum < MAX_BLOCKING, f"a hook blocks the event loop for {minimum:.2f} s"


async def measure_pause(act: Callable[[], Awaitable[Any]]) -> float:
    """The longest time, in seconds, that the event loop stands still during `act`."""
    max_length, is_over = 0.0, False

    async def tick() -> None:
        nonlocal max_length
        while not is_over:
            started = time.perf_counter()
            await asyncio.sleep(0)
            max_length = max(max_length, time.perf_counter() - started)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0)
    await act()
    await asyncio.sleep(0)
    is_over = True
    await ticking
    return max_length


async def check_memory(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """What an extension holds does not grow with the number of requests, of which each has headers
    and a client of its own, whether they are served, fail or end early."""

    async def serve(extension: HttpExtension, numbers: range) -> int:
        examples = example_requests(target)
        for number in numbers:
            request = replace(examples[number % len(examples)], request_id=f"request-{number}", tenant=f"tenant-{number}")
            own = {name: f"{value} {number}" for name, value in {**OWN_HEADERS, **request.headers}.items()}
            request = replace(request, path=f"/v1/files/{number}", client=f"10.{number >> 8}.{number & 255}.1", headers=own)
            await decide(extension, request)
            await extension.on_response(request, HttpResponse(STATUSES[number // len(examples) % len(STATUSES)], 0.1))
        return count_elements(extension)

    extension = make()
    few = await serve(extension, range(FEW))
    many = await serve(extension, range(FEW, MANY))
    sentence = f"the extension holds {few} elements after {FEW} requests, {many} after {MANY}; keep a bounded number"
    assert many - few <= MAX_GROWTH, sentence


async def check_requests_under_way(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """Of two requests under way at once the extension logs what it logs of them in turn."""
    accepted = [each for each in example_requests(target) if (await decide(make(), each))[0] == "accepted"]
    if not accepted:
        raise SkipCheck("the extension refuses all requests of the suite; list some that it accepts as conformance_requests")
    names = (("under-way-1", "/v1/first"), ("under-way-2", "/v1/second"))
    first, second = (replace(accepted[-1], request_id=name, path=path, tenant=name) for name, path in names)

    async def serve(order: Sequence[tuple[str, HttpRequest]]) -> list[str]:
        extension = make()
        with record_logs() as shown:
            for hook, request in order:
                if hook == "on_request":
                    await decide(extension, request)
                else:
                    await extension.on_response(request, HttpResponse(200, 0.25))
        return sorted(shown)

    in_turn = await serve([(hook, request) for request in (first, second) for hook in ("on_request", "on_response")])
    at_once = await serve([(hook, request) for hook in ("on_request", "on_response") for request in (first, second)])
    assert at_once == in_turn, f"of requests in turn it logs {in_turn!r:.300}, of the same at once {at_once!r:.300}"


@contextlib.contextmanager
def record_logs() -> Iterator[list[str]]:
    """What loggers of any level are told meanwhile."""
    shown: list[str] = []

    def note(_: logging.Logger, record: logging.LogRecord) -> None:
        shown.append(f"{record.getMessage()} {record.exc_info}")

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.DEBUG)
    try:
        with mock.patch.object(logging.Logger, "callHandlers", note):
            yield shown
    finally:
        root.setLevel(level)


async def check_secrets(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """The headers that carry keys are in no log record, on no output and in no refusal."""
    output = io.StringIO()
    with record_logs() as shown, redirect_stdout(output), redirect_stderr(output):
        for number, example in enumerate(example_requests(target)):
            extension = make()
            request = replace(example, headers={**example.headers, **dict.fromkeys(SECRET_HEADERS, f"Bearer {SECRET}")})
            shown.append(str((await decide(extension, request))[2]))
            await extension.on_response(request, HttpResponse(STATUSES[number % len(STATUSES)], 0.1))
    leak = next((text for text in (*shown, output.getvalue()) if SECRET in text), "")
    assert not leak, f"the extension shows a header with a key: {leak!r:.200}"


# middleware ---------------------------------------------------------------------------------------


def check_middleware(make: Callable[[], HttpExtension], target: type[HttpExtension]) -> None:
    """Middleware hands on the request and each part of the response as they come."""
    middleware: Sequence[Any] = list(make().make_middleware())
    for pair in middleware:
        is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], type)
        assert is_pair, "make_middleware returns no (class, arguments) pairs"
    for kind, arguments in middleware:
        asyncio.run(check_app(partial(kind, **arguments)))

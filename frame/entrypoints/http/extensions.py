"""The HTTP extensions that the configuration selects: `Extensions` holds their routes, middleware
and hooks.

A third party's `APIRouter` gets the access levels, bounded bodies, error shape and counting of the
server's own routes; FastAPI runs its endpoints, so dependencies, validation and response models
work as usual. Hooks and middleware are guarded: an error ends its request alone. The log and errors
name the extension, its package and version. Used by the server, the application and `ApiRoute`.
Must not import a plugin.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from frame.config.resolved import Resolved
from frame.core.blame import blaming, describe, remedy
from frame.core.errors import PluginError
from frame.entrypoints.http.errors import SEE_LOG, ApiError, DisconnectedError
from frame.entrypoints.http.operations import adapters, admin, page, states, weights
from frame.entrypoints.http.protocol.api_route import Access, ApiRoute, ApiRouter, ContextDep
from frame.entrypoints.http.request_context import JSON, Receive, RequestContext, Scope, Send
from frame.entrypoints.http.validation_errors import validation_error
from frame.interfaces.http import MAX_REFUSAL, MIN_REFUSAL, HttpContext, HttpExtension, HttpRequest, HttpResponse, RefuseRequest
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry

log = logging.getLogger(__name__)

KIND = "http_extension"
_CONVERTER = re.compile(r"{\w+:(?!path})")
# The routes that belong to no extension; extensions with the same paths are refused.
CORE_ROUTES = tuple(
    route
    for router in (
        admin.health_router, admin.metrics_router, page.router, page.public_router, admin.router, admin.own_router,
        admin.version_router, adapters.router, states.router, weights.router,
    )
    for route in router.api_routes
)  # fmt: skip
Middleware = tuple[type, dict[str, Any], HttpExtension]  # class, keyword arguments, whose


class Extensions:
    """The extensions of one server. `routes`: what is served; `documented`: routes of third
    parties, as `/openapi.json` shows them."""

    def __init__(self, extensions: Sequence[HttpExtension]) -> None:
        self.hooks = Hooks(extensions)
        self.routes: list[ApiRoute] = []
        self.documented: list[APIRoute] = []
        self.middleware: list[Middleware] = []
        owners: dict[tuple[str, str], tuple[str, Any]] = {}  # (method, path) -> who has it, and the route
        owners.update(((method, route.path), ("the server", route)) for route in CORE_ROUTES for method in route.methods or ())
        for each in extensions:
            for router in _routers(each):
                self._add_routes(each, router, owners)
            self.middleware += _middleware(each)

    def _add_routes(self, extension: HttpExtension, router: APIRouter, owners: dict[tuple[str, str], tuple[str, Any]]) -> None:
        is_ours = isinstance(router, ApiRouter)
        for route in router.api_routes if isinstance(router, ApiRouter) else make_plugin_routes(extension, router):
            keys = [(method, route.path) for method in sorted(route.methods or ())]
            clash = next((key for key in keys if key in owners), None)
            if clash is not None:
                owner, other = owners[clash]
                if other is route:  # a router that two APIs share
                    continue
                instead = "rename it, or remove one of them from server.extensions"
                raise PluginError(f"{describe(extension)}: {' '.join(clash)} is a route of {owner} too; {instead}.")
            owners.update((key, (describe(extension), route)) for key in keys)
            self.routes.append(route)
        if not is_ours:
            self.documented += [route for route in router.routes if getattr(route, "include_in_schema", False)]  # type: ignore[misc]


def load_extensions(resolved: Resolved, registry: Registry) -> Extensions:
    """The extensions that were selected. Raises PluginError that names the one that fails."""
    context = HttpContext(resolved.served_name, resolved.task, resolved.max_context)
    with blaming("at the start"):
        return Extensions([registry.create(choice, context) for choice in resolved.plugins.get(KIND, ())])


@cache
def load_built_in() -> Extensions:
    """All in-tree extensions, where no configuration selects some."""
    registry = load_registry(installed=False)
    return Extensions([registry.load(each)(HttpContext("")) for each in registry.records(KIND)])


def _routers(extension: HttpExtension) -> list[APIRouter]:
    routers: Any = extension.make_routers()
    if not isinstance(routers, Sequence) or not all(isinstance(router, APIRouter) for router in routers):
        raise PluginError(f"{describe(extension)}: make_routers returned {routers!r:.100}; return a list of FastAPI's APIRouter objects.")
    return list(routers)


def _middleware(extension: HttpExtension) -> list[Middleware]:
    pairs: Any = extension.make_middleware()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], type)):
            raise PluginError(f"{describe(extension)}: make_middleware returned {pair!r:.100}; return (class, arguments) pairs.")
    return [(kind, dict(arguments), extension) for kind, arguments in pairs]


# routes of third parties --------------------------------------------------------------------------


def make_plugin_routes(extension: HttpExtension, router: APIRouter) -> Iterator[ApiRoute]:
    """The routes of one router. Raises PluginError for a route that cannot be served."""
    owner = describe(extension)
    for route in router.routes:
        if not isinstance(route, APIRoute):
            raise PluginError(f"{owner}: the router has a {type(route).__name__}; declare plain HTTP routes with @router.get and the like.")
        if _CONVERTER.search(route.path):
            raise PluginError(f"{owner}: the path {route.path} has a typed parameter; write {{name}} and annotate its type.")
        level = Access.OPEN if route.path in extension.open_paths else Access.USER
        wrapping = ApiRouter(access=level)
        methods = sorted(set(route.methods or ()) - {"HEAD"})
        wrapping.add_api_route(route.path, _forwarding(extension, route), methods=methods, include_in_schema=False)
        yield from wrapping.api_routes


def _forwarding(extension: HttpExtension, route: APIRoute) -> Any:
    """The endpoint that lets FastAPI run the plugin's route with a bounded body."""

    async def forward(context: ContextDep) -> None:
        try:
            await _run(route, context)
        except (ApiError, DisconnectedError):
            raise
        except HTTPException as error:
            headers = tuple((name.lower().encode(), value.encode("latin-1")) for name, value in (error.headers or {}).items())
            raise ApiError(error.status_code, str(error.detail), headers=headers) from None
        except RequestValidationError as error:
            raise validation_error([{**each, "loc": each["loc"][1:]} for each in error.errors()], error.body) from None
        except Exception:
            sentence = "%s failed in its route %s; the request is answered with 500; %s"
            log.exception(sentence, describe(extension), route.path, remedy(extension))
            raise ApiError(500, SEE_LOG) from None

    return forward


async def _run(route: APIRoute, context: RequestContext) -> None:
    pending: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": await context.body(), "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await context.receive()

    async with AsyncExitStack() as files:
        await route.app({**context.scope, "fastapi_middleware_astack": files}, receive, context.send_message)


# hooks and middleware -----------------------------------------------------------------------------


class Hooks:
    """The hooks of all extensions, in the configured order."""

    def __init__(self, extensions: Sequence[HttpExtension]) -> None:
        self._before = [each for each in extensions if each.has_hook("on_request")]
        self._after = [each for each in extensions if each.has_hook("on_response")]

    def __bool__(self) -> bool:
        return bool(self._before or self._after)

    async def check_request(self, context: RequestContext, route: str) -> None:
        """Run `on_request` of each extension. Raises ApiError."""
        if not self._before:
            return
        request = _describe(context, route)
        for extension in self._before:
            try:
                await extension.on_request(request)
            except RefuseRequest as refusal:
                raise _refusal(extension, refusal) from None
            except Exception:
                log.exception("%s failed in on_request; the request is answered with 500; %s", describe(extension), remedy(extension))
                raise ApiError(500, SEE_LOG) from None

    async def record_response(self, context: RequestContext, route: str, status: int) -> None:
        """Run `on_response` of each extension; an error is logged, and the others run."""
        if not self._after:
            return
        request, response = _describe(context, route), _summarise(context, status)
        for extension in self._after:
            try:
                await extension.on_response(request, response)
            except Exception:
                log.exception("%s failed in on_response; %s", describe(extension), remedy(extension))


def _describe(context: RequestContext, route: str) -> HttpRequest:
    """The request as hooks see it, made once for each request."""
    scope = context.scope
    described: HttpRequest | None = scope.get("hook_request")
    if described is None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = scope["client"][0] if scope.get("client") else ""
        described = scope["hook_request"] = HttpRequest(
            scope["method"], scope["path"], route, MappingProxyType(headers), context.request_id, context.tenant, host
        )
    return described


def _summarise(context: RequestContext, status: int) -> HttpResponse:
    state = context.state
    seconds = time.perf_counter() - context.scope["arrived"]
    if state is None:
        return HttpResponse(status, seconds)
    num_prompt_tokens = sum(len(first.prompt) for first in state.first_sequences)
    return HttpResponse(status, seconds, num_prompt_tokens, sum(sequence.num_tokens for sequence in state.sequences))


def _refusal(extension: HttpExtension, refusal: RefuseRequest) -> ApiError:
    """The refusal as an ApiError. A status that is no error is a fault of the extension: 500."""
    if not (isinstance(refusal.status, int) and MIN_REFUSAL <= refusal.status <= MAX_REFUSAL):
        sentence = "%s refused a request with status %r; RefuseRequest takes %d to %d"
        log.error(sentence, describe(extension), refusal.status, MIN_REFUSAL, MAX_REFUSAL)
        return ApiError(500, SEE_LOG)
    headers = tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in refusal.headers.items())
    return ApiError(refusal.status, refusal.sentence, code=refusal.code, headers=headers)


class GuardedMiddleware:
    """`kind(app, **arguments)`, whose errors become a response 500 unless one has begun.
    Errors of inner applications do not come this far: routes write theirs."""

    def __init__(self, app: Any, kind: type, arguments: Mapping[str, Any], extension: HttpExtension) -> None:
        self._app = kind(app, **arguments)
        self._extension = extension

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            sentence = "%s failed in its middleware; the request is answered with 500; %s"
            log.exception(sentence, describe(self._extension), remedy(self._extension))
            if is_started:
                raise  # the server closes the connection: a response that is cut off must not look complete
            body = ApiError(500, SEE_LOG).body()
            await send({"type": "http.response.start", "status": 500, "headers": [JSON, (b"content-length", b"%d" % len(body))]})
            await send({"type": "http.response.body", "body": body})


def with_channel(app: Any) -> Any:
    """Lets routes write through the middleware: they send to `scope["asgi_channel"]`."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        scope["asgi_channel"] = (receive, send)
        await app(scope, receive, send)

    return call

"""Builds the HTTP extensions that the configuration selects: `Extensions` holds their routes,
middleware and hooks.

A third party's `APIRouter` gets the access levels, bounded bodies, error shape and counting of the
server's own routes; FastAPI runs its endpoints, so dependencies, validation and response models
work as usual. Used by the server and the application. Errors name the extension, its package and
version. Must not import a plugin.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AsyncExitStack
from functools import cache
from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from frame.config.resolved import Resolved
from frame.core.blame import blaming, describe, remedy
from frame.core.errors import PluginError
from frame.core.interfaces.http import HttpContext, HttpExtension
from frame.entrypoints.http.errors import SEE_LOG, ApiError, DisconnectedError
from frame.entrypoints.http.extensions.hooks import Hooks
from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.operations import admin, page
from frame.entrypoints.http.protocol.api_route import Access, ApiRoute, ApiRouter, ContextDep
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.validation_errors import validation_error
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry

log = logging.getLogger(__name__)

KIND = "http_extension"
_CONVERTER = re.compile(r"{\w+:(?!path})")
# The routes that belong to no extension; extensions with the same paths are refused.
CORE_ROUTES = tuple(
    route
    for router in (
        native.health_router, native.metrics_router, page.router, page.public_router, admin.router, admin.own_router,
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
    found: Any = extension.make_routers()
    if not isinstance(found, Sequence) or not all(isinstance(router, APIRouter) for router in found):
        raise PluginError(f"{describe(extension)}: make_routers returned {found!r:.100}; return a list of FastAPI's APIRouter objects.")
    return list(found)


def _middleware(extension: HttpExtension) -> list[Middleware]:
    found: Any = extension.make_middleware()
    for pair in found:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], type)):
            raise PluginError(f"{describe(extension)}: make_middleware returned {pair!r:.100}; return (class, arguments) pairs.")
    return [(kind, dict(arguments), extension) for kind, arguments in found]


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
        made = ApiRouter(access=level)
        methods = sorted(set(route.methods or ()) - {"HEAD"})
        made.add_api_route(route.path, _forwarding(extension, route), methods=methods, include_in_schema=False)
        yield from made.api_routes


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

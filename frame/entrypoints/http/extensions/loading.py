"""Builds the HTTP extensions that the configuration selects: `Extensions` holds their routes,
middleware and hooks.

Used by the server and the application. Errors name the extension, its package and version. Must
not import a plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from frame.core.blame import blaming, describe
from frame.core.config.resolved import Resolved
from frame.core.errors import PluginError
from frame.core.interfaces.http import HttpContext, HttpExtension
from frame.entrypoints.http.extensions.hooks import Hooks
from frame.entrypoints.http.extensions.plugin_routes import make_plugin_routes
from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.operations import admin, page
from frame.entrypoints.http.protocol.api_route import ApiRoute, ApiRouter
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry

KIND = "http_extension"
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
                remedy = "rename it, or remove one of them from server.extensions"
                raise PluginError(f"{describe(extension)}: {' '.join(clash)} is a route of {owner} too; {remedy}.")
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

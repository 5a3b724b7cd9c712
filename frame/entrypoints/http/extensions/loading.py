"""Builds the HTTP extensions that the configuration selects: `Extensions` holds their routes,
middleware and hooks.

Used by the server and the application. Errors name the extension, its package and version. Must
not import a plugin.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter

from frame.core.errors import PluginError
from frame.core.interfaces.http import HttpContext
from frame.entrypoints.http.extensions.core_routes import CORE_ROUTES
from frame.entrypoints.http.extensions.hooks import Hooks, LoadedExtension
from frame.entrypoints.http.extensions.plugin_routes import make_plugin_routes
from frame.entrypoints.http.protocol.api_route import ApiRoute, ApiRouter
from frame.entrypoints.keys import load_keys
from frame.plugins.loader import load_registry

if TYPE_CHECKING:
    from fastapi.routing import APIRoute

    from frame.core.config.resolved import PluginChoice, Resolved
    from frame.plugins.registry import Registry

KIND = "http_extension"
Middleware = tuple[type, dict[str, Any], str]  # class, keyword arguments, owner


class Extensions:
    """The extensions of one server. `routes`: what is served; `documented`: routes of third
    parties, as `/openapi.json` shows them."""

    def __init__(self, loaded: Sequence[LoadedExtension]) -> None:
        self.hooks = Hooks(loaded)
        self.routes: list[ApiRoute] = []
        self.documented: list[APIRoute] = []
        self.middleware: list[Middleware] = []
        owners: dict[tuple[str, str], tuple[str, Any]] = {}  # (method, path) -> who has it, and the route
        owners.update(((method, route.path), ("the server", route)) for route in CORE_ROUTES for method in route.methods or ())
        for each in loaded:
            for router in _routers(each):
                self._add_routes(each, router, owners)
            self.middleware += _middleware(each)

    def _add_routes(self, loaded: LoadedExtension, router: APIRouter, owners: dict[tuple[str, str], tuple[str, Any]]) -> None:
        is_ours = isinstance(router, ApiRouter)
        for route in router.api_routes if isinstance(router, ApiRouter) else make_plugin_routes(loaded, router):
            keys = [(method, route.path) for method in sorted(route.methods or ())]
            clash = next((key for key in keys if key in owners), None)
            if clash is not None:
                owner, other = owners[clash]
                if other is route:  # a router that two APIs share
                    continue
                remedy = "rename it, or remove one of them from server.extensions"
                raise PluginError(f"{loaded.owner}: {' '.join(clash)} is a route of {owner} too; {remedy}.")
            owners.update((key, (loaded.owner, route)) for key in keys)
            self.routes.append(route)
        if not is_ours:
            self.documented += [route for route in router.routes if getattr(route, "include_in_schema", False)]  # type: ignore[misc]


def load_extensions(resolved: Resolved, registry: Registry) -> Extensions:
    """The extensions that were selected. Raises PluginError that names the one that fails."""
    context = HttpContext(resolved.served_name, resolved.task, resolved.max_context, load_keys(resolved.user.server) is not None)
    return Extensions([_load(registry, choice, context) for choice in resolved.plugins.get(KIND, ())])


def _load(registry: Registry, choice: PluginChoice, context: HttpContext) -> LoadedExtension:
    owner = f"{KIND} {choice.name!r} ({choice.distribution} {choice.version})"
    try:
        made = registry.create(choice, context)
    except PluginError:
        raise
    except Exception as error:
        raise PluginError(f"{owner} cannot be built: {type(error).__name__}: {error}.") from error
    return LoadedExtension(owner, made)


@cache
def load_built_in() -> Extensions:
    """All in-tree extensions, where no configuration selects some."""
    registry = load_registry(installed=False)
    return Extensions([LoadedExtension(f"{KIND} {each.name!r}", registry.load(each)(HttpContext(""))) for each in registry.records(KIND)])


def _routers(loaded: LoadedExtension) -> list[APIRouter]:
    owner, extension = loaded
    try:
        found = list(extension.make_routers())
    except Exception as error:
        raise PluginError(f"{owner}: make_routers failed: {type(error).__name__}: {error}.") from error
    for router in found:
        if not isinstance(router, APIRouter):
            raise PluginError(f"{owner}: make_routers returned a {type(router).__name__}; return FastAPI's APIRouter objects.")
    return found


def _middleware(loaded: LoadedExtension) -> list[Middleware]:
    owner, extension = loaded
    try:
        return [(kind, dict(arguments), owner) for kind, arguments in extension.make_middleware()]
    except Exception as error:
        raise PluginError(f"{owner}: make_middleware failed: {type(error).__name__}: {error}; return (class, arguments) pairs.") from error

"""`make_plugin_routes`: routes of a third party's `APIRouter` as routes of this server, with access
levels, bounded bodies, the error shape and counting of every other route.

FastAPI runs the endpoint itself: dependencies, validation and response models work as usual. Used
when extensions are loaded. Must not depend on a dialect.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, MutableMapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from frame.core.blame import describe, remedy
from frame.core.errors import PluginError
from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.errors import SEE_LOG, ApiError, DisconnectedError
from frame.entrypoints.http.protocol.api_route import Access, ApiRoute, ApiRouter, ContextDep
from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.validation_errors import validation_error

log = logging.getLogger(__name__)

_CONVERTER = re.compile(r"{\w+:(?!path})")


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

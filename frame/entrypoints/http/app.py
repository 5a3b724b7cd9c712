"""`App`: the FastAPI application over the routes of all dialects: request scope, CORS, dispatch by
path, error responses, OpenAPI.

Used by the server, once for the API and once for the listener of operators.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from frame.entrypoints.engine_client.quotas import QuotaExceededError
from frame.entrypoints.http.errors import OPENAI, ApiError, DisconnectedError, ErrorShape
from frame.entrypoints.http.extensions import CORE_ROUTES, Extensions, GuardedMiddleware, load_built_in, with_channel
from frame.entrypoints.http.failures import too_many
from frame.entrypoints.http.protocol.access import Gate
from frame.entrypoints.http.protocol.api_route import CLIENT_GONE, JSON_BODY, MAX_PATH_CHARS, Access, ApiRoute, count_response
from frame.entrypoints.http.protocol.bodies import AT_ONCE, SMALL_BODY, Bodies, prompt_limit, value_limit
from frame.entrypoints.http.protocol.routing import PathIndex, decode_path
from frame.entrypoints.http.request_context import Receive, RequestContext, Scope, Send
from frame.entrypoints.http.services import Services
from frame.entrypoints.logs import REQUEST_ID, request_id_of
from frame.entrypoints.origin import Cors, is_preflight, read_cors
from frame.entrypoints.version import package_version

# The route that is counted for requests that no route took: no key, no such path, wrong method, or
# a preflight
NO_ROUTE = "none"
ANY_METHOD = ("GET", "POST", "DELETE")  # of a path without a route, whose 404 a page may read


class App(FastAPI):
    """The whole application. A path without a route has the access level `USER`, so that a client
    without a key cannot find out which paths exist.

    `is_admin`: the application of the operators' own listener, where users' keys mean nothing and
    extensions add nothing. `extensions`: None: all in-tree APIs. `hooks`: None where no extension
    has one.
    Routes and dependencies read `services`, `gate`, `bodies` and `body_limits`.
    """

    def __init__(
        self, services: Services, is_admin: bool = False, routes: Sequence[ApiRoute] | None = None, extensions: Extensions | None = None
    ) -> None:
        super().__init__(title="frame", version=package_version(), openapi_url=None, docs_url=None, redoc_url=None)
        server, context = services.resolved.user.server, services.resolved.max_context
        self._cors = None if is_admin else read_cors(server)
        self.extensions = Extensions(()) if is_admin else extensions or load_built_in()
        self.hooks = self.extensions.hooks or None
        self.api_routes = routes or (CORE_ROUTES if is_admin else (*self.extensions.routes, *CORE_ROUTES))
        self.dispatcher = Dispatcher(self.api_routes, self._cors)
        self.services = services
        self.gate = Gate(server, services.keys, is_admin, self._cors)
        self.bodies = Bodies(AT_ONCE * server.max_body_bytes, server.client_timeout, value_limit(context))
        self.body_limits = body_limits(services)
        self._openapi_json: asyncio.Task[bytes] | None = None
        if services.batches is not None and not is_admin:
            services.batches.sender.route = self.run_for_tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        # Handlers write to the server's own `send`: each middleware's wrapper would cost time for
        # every token.
        scope["asgi_channel"] = (receive, send)
        if "admitted" not in scope:
            scope["tenant"] = ""
            scope["request_id"] = request_id_of(scope["headers"])
            scope["arrived"] = time.perf_counter()
            REQUEST_ID.set(scope["request_id"])  # in the context of this request's task alone
            if self._cors is not None:
                scope["response_headers"] = self._cors.response_headers(scope["headers"])
        scope["app"] = self
        if self.middleware_stack is None:
            self.middleware_stack = self.build_middleware_stack()
        try:
            await self.middleware_stack(scope, receive, send)
        finally:  # all refer to the scope: with them, the request would stay until a garbage collection
            scope.pop("asgi_channel", None)
            scope.pop("context", None)
            scope.pop("hand_over", None)

    def build_middleware_stack(self) -> Any:
        """The extensions' middlewares, around the dispatcher. FastAPI's own are left out: routes
        write their own errors, and five wrappers cost 50 us for each request."""
        app: Any = self.dispatcher
        if self.extensions.middleware:
            app = with_channel(app)
        for kind, options, extension in reversed(self.extensions.middleware):
            app = GuardedMiddleware(app, kind, options, extension)
        return app

    async def run_for_tenant(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request of the server's own for a tenant whose key was checked when the work was
        given, such as a line of a batch."""
        match = self.dispatcher.index.find(scope["path"])
        route = None if match is None else match.endpoint(scope["method"])
        if route is None or route.access is Access.ADMIN:
            raise ValueError(f"{scope['method']} {scope['path']} cannot be run for a tenant")
        scope["admitted"] = True
        scope["raw_path"] = scope["path"].encode()
        await self(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI 3.1 description of all routes."""
        if self.openapi_schema is None:
            shown = [route for route in self.api_routes if route.include_in_schema]
            schema = get_openapi(title=self.title, version=self.version, routes=[*shown, *self.extensions.documented])
            self.openapi_schema = complete_schema(schema, shown)
        return self.openapi_schema

    async def encode_openapi(self) -> bytes:
        """`openapi` as JSON. It is built once, within seconds, in a thread."""
        if self._openapi_json is None:
            self._openapi_json = asyncio.create_task(asyncio.to_thread(lambda: msgspec.json.encode(self.openapi())))
        return await asyncio.shield(self._openapi_json)


class Dispatcher:
    """The innermost ASGI application, with an index of paths in place of regexes in turn."""

    def __init__(self, routes: Sequence[ApiRoute], cors: Cors | None) -> None:
        self.routes = routes
        self.index: PathIndex[ApiRoute] = PathIndex((route.path, route.methods or (), route) for route in routes)
        self._cors = cors
        shapes: dict[str, set[ErrorShape]] = {}
        for route in routes:
            for prefix in _prefixes(route.path):
                shapes.setdefault(prefix, set()).add(route.errors)
        # of the paths below which every route writes errors alike, for those that no route has
        self._shapes = {prefix: kinds.pop() for prefix, kinds in shapes.items() if len(kinds) == 1}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._dispatch(scope, receive, send)
        except QuotaExceededError as error:
            await _refuse(scope, too_many(error))
        except ApiError as error:
            await _refuse(scope, error)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError, QuotaExceededError for a request that no route has run."""
        gate: Gate = scope["app"].gate
        match = self.index.find(decode_path(scope["raw_path"]))
        if self._cors is not None:
            if match is not None and any(route.access is Access.ADMIN for route in match.endpoints.values()):
                scope["response_headers"] = ()  # operators' routes are for no page
            elif is_preflight(scope["method"], scope["headers"]) and self._cors.allows(scope["headers"]):
                await _reply_to_preflight(self._cors, scope, ANY_METHOD if match is None else match.methods())
                return
        if match is None:
            path = scope["path"][:MAX_PATH_CHARS]
            scope["errors"] = next((self._shapes[prefix] for prefix in reversed(_prefixes(path)) if prefix in self._shapes), OPENAI)
            await gate.identify(scope)
            gate.admit(scope, Access.USER)
            raise ApiError(404, f"there is no {path} here; /openapi.json says what there is, such as /v1/chat/completions")
        scope["errors"] = next(iter(match.endpoints.values())).errors
        route = match.endpoint(scope["method"])
        if route is None:
            await gate.identify(scope)
            gate.admit(scope, max(other.access for other in match.endpoints.values()))
            methods = match.methods()
            shown = " or ".join(method for method in methods if method != "HEAD")
            sentence = f"{scope['path'][:MAX_PATH_CHARS]} does not take {scope['method']}; use {shown}"
            raise ApiError(405, sentence, headers=((b"allow", ", ".join(methods).encode()),))
        scope["errors"], scope["path_params"], scope["route"] = route.errors, match.parameters, route
        if route.access is not Access.OPEN and "admitted" not in scope:
            await gate.identify(scope)
        await route.app(scope, receive, send)


def _prefixes(path: str) -> list[str]:
    """The path's first segment, its first two, and so on."""
    return list(accumulate(path.strip("/").split("/"), "{}/{}".format))


def body_limits(services: Services) -> dict[str, int]:
    """Bytes that a body may have, by what it holds."""
    maximum = services.resolved.user.server.max_body_bytes
    prompts = maximum if services.media is not None else min(maximum, prompt_limit(services.resolved.max_context))
    return {"file": maximum, "small": min(maximum, SMALL_BODY), "prompts": prompts}


async def _refuse(scope: Scope, error: ApiError) -> None:
    """Answer a request that no route has run."""
    receive, send = scope["asgi_channel"]
    context = RequestContext(scope, receive, send, 0, scope.get("errors", OPENAI))
    with suppress(DisconnectedError):
        await context.fail(error)
    app = scope["app"]
    count_response(app.services.metrics, NO_ROUTE, context)
    if app.hooks is not None:
        await app.hooks.record_response(context, NO_ROUTE, context.status or CLIENT_GONE)


async def _reply_to_preflight(cors: Cors, scope: Scope, methods: Sequence[str]) -> None:
    """Answer a browser's preflight, which brings no key, with the path's methods only."""
    scope["response_headers"] = cors.preflight_headers(scope["headers"], methods)
    receive, send = scope["asgi_channel"]
    context = RequestContext(scope, receive, send, 0)
    with suppress(DisconnectedError):
        await context.respond(b"", headers=())
    count_response(scope["app"].services.metrics, NO_ROUTE, context)


# OpenAPI ------------------------------------------------------------------------------------------

FAILURES = {"4XX": "The request is refused.", "5XX": "The server failed, or is overloaded."}
# FastAPI's own error body, which no route sends
REPLACED = ("HTTPValidationError", "ValidationError")


def complete_schema(schema: dict[str, Any], routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """FastAPI's schema of these routes, changed in place. Raises ValueError for two types of one
    name."""
    schema["info"]["license"] = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
    schema["security"] = [{}, {"bearer": []}, {"key": []}]
    components = schema.setdefault("components", {})
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    models = {id(model): model for route in routes for model in (route.errors.model, *route.response_types.values())}
    references, definitions = TypeAdapter.json_schemas(
        [(key, "serialization", TypeAdapter(model)) for key, model in models.items()], ref_template="#/components/schemas/{model}"
    )
    shapes = {key: {"schema": shape} for (key, _), shape in references.items()}
    bodies = components.setdefault("schemas", {})
    for name in REPLACED:
        bodies.pop(name, None)
    for name, definition in definitions.get("$defs", {}).items():
        if bodies.setdefault(name, definition) != definition:
            raise ValueError(f"two bodies are named {name}; rename the type of the response")
    for route in routes:
        content = {media_type: shapes[id(model)] for media_type, model in route.response_types.items()}
        failure = {"content": {JSON_BODY: shapes[id(route.errors.model)]}}
        responses = {"200": {"description": "The response.", **({"content": content} if content else {})}}
        responses |= {status: {"description": description, **failure} for status, description in FAILURES.items()}
        for method in route.methods or ():
            operation = schema["paths"][route.path_format][method.lower()]
            operation["responses"] = responses
            if route.access is Access.OPEN:
                operation["security"] = []
    return schema

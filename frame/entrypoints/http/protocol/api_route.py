"""`ApiRouter`, `ApiRoute`: FastAPI's router and route with what every route of this server needs:
an access level, bounded bodies, the error shape of its dialect, counting and tracing.

Used by the modules that declare routes, and by the application. Must not depend on a route or the
engine.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.dependencies.utils import solve_dependencies
from fastapi.routing import APIRoute
from pydantic import BaseModel

from frame.core.blame import explain
from frame.entrypoints.http.errors import OPENAI, ApiError, DisconnectedError, ErrorShape
from frame.entrypoints.http.paced_json import PacedBody, collect_pieces, each_piece, encode_steps
from frame.entrypoints.http.request_body import parse_body
from frame.entrypoints.http.request_context import BLOCKS, Receive, RequestContext, Scope, Send, check_query
from frame.entrypoints.http.services import Services
from frame.entrypoints.http.validation_errors import validation_error
from frame.entrypoints.logs import ACCESS
from frame.interfaces.http import HttpExtension

log = logging.getLogger(__name__)

MAX_PATH_CHARS = 200  # characters of a path that a log line or an error quotes
CLIENT_GONE = 499  # the status that is counted for a request whose client left before the response began
JSON_BODY = "application/json"
HANDOFF = b"x-frame-handoff"  # the router's header, of `frame.entrypoints.handoff`, which only servers with a fleet key import
BodyKind = Literal["prompts", "small", "file"]


class Access(IntEnum):
    """Who may use a route. A higher level includes no lower one: the admin key is no user's key."""

    OPEN = 0  # every client, without a key; only for what reveals nothing of the server
    USER = 1  # holders of an API key, where the server has keys; for what serves requests or describes them
    OWN = 2  # users for their own requests (the handler checks `RequestContext.tenant`, "" for operators), and operators for all
    ADMIN = 3  # operators, on their own listener or with the admin key; for what changes the server or shows its configuration


@dataclass(frozen=True, slots=True, eq=False)
class ScopeDependency:
    """Dependency whose value is read from the ASGI scope. A route that has no others is resolved
    without FastAPI's `solve_dependencies`, which costs 10 us for each dependency."""

    read: Callable[[Scope], Any]

    async def __call__(self, request: Request) -> Any:
        return self.read(request.scope)


# Parameters of route handlers: the request, and what the routes share.
ContextDep = Annotated[RequestContext, Depends(ScopeDependency(lambda scope: scope["context"]))]
ServicesDep = Annotated[Services, Depends(ScopeDependency(lambda scope: scope["app"].services))]


@dataclass(frozen=True, slots=True, eq=False)
class RequireAccess:
    """Dependency: admits a request by its key, and counts it in the key's quota until it ends.
    Raises ApiError 401 or 403, QuotaExceededError."""

    level: Access

    async def __call__(self, request: Request) -> None:
        self.read(request.scope)

    def read(self, scope: Scope) -> None:
        if "admitted" in scope:  # a request of the server's own, such as a line of a batch
            return
        app = scope["app"]
        tenant = scope["tenant"] = app.gate.admit(scope, self.level)
        if tenant and self.level is not Access.OWN:  # requests that end others need no quota
            scope["lease"] = app.services.quotas.open_lease(tenant)


@dataclass(frozen=True, slots=True, eq=False)
class BodyLimit:
    """Declares what the body of a route holds, which bounds its size: prompts (bounded by the
    context), a file, or neither (small)."""

    kind: BodyKind

    async def __call__(self) -> None:
        """Nothing: `ApiRoute` reads `kind` when the route is declared."""


SMALL_BODY, FILE_BODY = Depends(BodyLimit("small")), Depends(BodyLimit("file"))


def responds_with(
    model: Any, *, events: Any = None, media_type: str = JSON_BODY, stream_type: str = "text/event-stream"
) -> dict[int | str, dict[str, Any]]:
    """The argument `responses` of a route whose 200 body is of type `model`. `events`: the type of
    one event of its stream, which is sent with `stream_type`."""
    return {200: {media_type: model, **({} if events is None else {stream_type: events})}}


class ApiRoute(APIRoute):
    """A route whose request is admitted before its body is read. The endpoint returns what is sent
    as JSON, or None where it has written the response itself."""

    errors: ErrorShape = OPENAI

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        dependencies = [each.dependency for each in options.get("dependencies") or ()]
        levels = [each.level for each in dependencies if isinstance(each, RequireAccess)]
        if len(levels) != 1:
            raise TypeError(f"the route {path} declares no access level; give its ApiRouter Access.OPEN, USER, OWN or ADMIN")
        self.access: Access = levels[0]
        self.body_kind: BodyKind = next((each.kind for each in dependencies if isinstance(each, BodyLimit)), "prompts")
        # By media type, for `response_docs`; FastAPI would make fields of them.
        self.response_types: dict[str, Any] = (options.pop("responses", None) or {}).get(200, {})
        options["dependencies"] = [each for each in options["dependencies"] if not isinstance(each.dependency, BodyLimit)]
        super().__init__(path, endpoint, **options)
        self.body_model: type[BaseModel] | None = None
        if fields := self.dependant.body_params:
            self._body_name, self._needs_body = fields[0].name, fields[0].field_info.is_required()
            annotation: Any = fields[0].field_info.annotation
            self.body_model = next(each for each in getattr(annotation, "__args__", (annotation,)) if issubclass(each, BaseModel))
            self.dependant.body_params = []  # FastAPI would validate it before it knows who asks, and without bounds
        self._query_names = frozenset(each.alias for each in self.dependant.query_params)
        self._readers = scope_readers(self.dependant)
        self.app = self._reply

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The route's ASGI application. Raises ApiError, QuotaExceededError."""
        app = scope["app"]
        receive, send = scope["asgi_channel"]
        context = RequestContext(scope, receive, send, app.body_limits[self.body_kind], self.errors, app.bodies)
        scope["context"] = context
        try:
            if self._readers is not None:
                values = {name: value for name, read in self._readers if (value := read(scope)) is not None}
                await self._run(context, values, (), app)
                return
            async with AsyncExitStack() as stack:
                scope["fastapi_inner_astack"] = scope["fastapi_function_astack"] = stack
                solved = await solve_dependencies(
                    request=Request(scope, receive, send), dependant=self.dependant, async_exit_stack=stack, embed_body_fields=False
                )
                await self._run(context, solved.values, solved.errors, app)
        finally:
            await context.close()
            if (lease := scope.get("lease")) is not None and "admitted" not in scope:
                lease.close()

    async def _run(self, context: RequestContext, values: dict[str, Any], errors: Sequence[Any], app: Any) -> None:
        """Run the endpoint for a request that was admitted, and send an error when it raises."""
        scope, tracing, hooks = context.scope, app.services.tracing, app.hooks
        span = None
        if tracing is not None and scope["method"] == "POST":
            span = tracing.start(f"{scope['method']} {self.path}", scope["headers"])
        with suppress(DisconnectedError):
            try:
                if hooks is not None and self.access is not Access.OPEN and "admitted" not in scope:
                    await hooks.check_request(context, self.path)
                for name, value in scope["headers"]:
                    if name == BLOCKS and (fleet := app.services.fleet) is not None and fleet.asks_for_blocks(scope["path"], value):
                        scope["tell_blocks"] = fleet.tell_blocks
                    elif name == HANDOFF:
                        from frame.entrypoints.http.protocol.continuation import read_fleet_header

                        await read_fleet_header(context, app.services.fleet, value)
                        break
                query: bytes = scope.get("query_string", b"")
                if query:
                    context.ignored = check_query(query, self._query_names)
                if errors:
                    raise validation_error([{**error, "loc": error["loc"][1:]} for error in errors], dict.fromkeys(self._query_names))
                if self.body_model is not None:
                    values[self._body_name] = await self._read_body(context)
                try:
                    result = await self.endpoint(**values)
                finally:
                    if context.state is not None:  # nothing reads its output any more
                        app.services.client.abort_request(context.state)
                    if context.recorder is not None:
                        context.recorder.close()
                if isinstance(result, PacedBody):
                    await _respond_paced(context, app.services, result)
                elif result is not None:
                    await context.respond(msgspec.json.encode(result))
            except ApiError as error:
                await context.fail(error)
            except DisconnectedError:
                raise
            except Exception as error:
                log.exception("%s %s failed: %s", scope["method"], scope["path"], explain(error))
                await context.fail(ApiError(500, "the server failed on this request; its log says why"))
            finally:
                count_response(app.services.metrics, self.path, context)
                if span is not None:
                    _end_span(span, self.path, context)
                if hooks is not None:
                    await hooks.record_response(context, self.path, context.status or CLIENT_GONE)

    async def _read_body(self, context: RequestContext) -> BaseModel | None:
        assert self.body_model is not None
        value = await context.read_json(is_required=self._needs_body)
        if value is None and not self._needs_body:
            return None
        body, ignored = parse_body(self.body_model, value)
        context.ignored += ignored
        await context.take_turn_if_large()  # the endpoint converts it
        return body


async def _respond_paced(context: RequestContext, services: Services, body: PacedBody) -> None:
    """Send a large response. Raises DisconnectedError."""
    state = context.state
    is_over = None if state is None else lambda: state.is_disconnected
    pieces = await collect_pieces(services.formatting, context.tenant, encode_steps(body.value), is_over)
    await context.respond_pieces(each_piece(pieces), sum(map(len, pieces)))


def scope_readers(dependant: Dependant) -> list[tuple[str, Callable[[Scope], Any]]] | None:
    """The dependencies of a route as (parameter, function of the scope), in order; None where one
    is of another kind, or the route has parameters of its own."""
    params = (dependant.path_params, dependant.query_params, dependant.header_params, dependant.cookie_params)
    if any(params) or dependant.request_param_name:
        return None
    if not all(isinstance(each.call, ScopeDependency | RequireAccess) for each in dependant.dependencies):
        return None
    calls: list[Any] = [each.call for each in dependant.dependencies]
    return [(each.name or "", call.read) for each, call in zip(dependant.dependencies, calls, strict=True)]


class ApiRouter(APIRouter):
    """The routes of one module that have the same access level and error shape."""

    def __init__(self, *, access: Access, errors: ErrorShape = OPENAI) -> None:
        if not isinstance(access, Access):
            raise TypeError(f"{access!r} is no access level; give Access.OPEN, USER, OWN or ADMIN")
        super().__init__(route_class=ApiRoute, dependencies=[Depends(RequireAccess(access))], redirect_slashes=False)
        self._errors = errors

    def add_api_route(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        options["operation_id"] = options.get("operation_id") or operation_name(path, options["methods"])
        super().add_api_route(path, endpoint, **options)
        route = self.routes[-1]
        assert isinstance(route, ApiRoute)
        route.errors = self._errors

    @property
    def api_routes(self) -> list[ApiRoute]:
        return [route for route in self.routes if isinstance(route, ApiRoute)]


def make_extension(module: str, *routers: ApiRouter) -> type[HttpExtension]:
    """The HTTP extension of an API of this server. `module`: the name of the module that has it."""
    return type("Routes", (HttpExtension,), {"make_routers": lambda _: routers, "__module__": module})


def operation_name(path: str, methods: list[str]) -> str:
    """The OpenAPI operation id: method and path, such as `post_v1_completions`."""
    return "_".join([methods[0].lower(), *re.findall(r"\w+", re.sub(r"{(\w+)(:path)?}", r"\1", path))])


def count_response(metrics: Any, route: str, context: RequestContext) -> None:
    """Count the response in the metrics and, where it is wanted, write it to the access log."""
    status, scope = context.status or CLIENT_GONE, context.scope
    if metrics is not None:
        metrics.count_response(route, status)
    if ACCESS.isEnabledFor(logging.INFO):
        seconds = round(time.perf_counter() - scope["arrived"], 6)
        host = scope["client"][0] if scope.get("client") else None
        fields = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds, "client": host}
        path, client = scope["path"][:MAX_PATH_CHARS], host or "this machine"  # a Unix socket, or a line of a batch
        ACCESS.info("%s %s %d in %.3f s from %s", scope["method"], path, status, seconds, client, extra={"fields": fields})


def _end_span(span: Any, route: str, context: RequestContext) -> None:
    """End the span of a request that has a response, or whose client left."""
    status, scope = context.status or CLIENT_GONE, context.scope
    attributes = {
        "http.request.method": scope["method"], "http.route": route, "http.response.status_code": status,
        "frame.request_id": context.request_id,
    }  # fmt: skip
    span.end(attributes, context.state, f"status {status}" if status >= 500 else None)

"""The ASGI application: guards (key, method, path), the table of routes, and what becomes of errors. Plain ASGI all the way, because every
wrapper around `send` would be paid for each token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from frame.entrypoints.http import admin, anthropic, batches, classes, embeddings, moderations, native, openai, page, relevance, responses
from frame.entrypoints.http.bodies import AT_ONCE, Bodies
from frame.entrypoints.http.call import Call, Receive, Scope, Send
from frame.entrypoints.http.errors import OPENAI, ApiError, DisconnectedError
from frame.entrypoints.http.failures import too_many
from frame.entrypoints.http.openapi import description_of
from frame.entrypoints.http.origin import why_foreign
from frame.entrypoints.http.services import Operation, Routes, Services
from frame.entrypoints.keys import load_keys
from frame.entrypoints.logs import ACCESS, REQUEST_ID, request_id_of
from frame.entrypoints.shares import ShareExceededError
from frame.entrypoints.tracing import RequestSpan

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready"})  # no key needed
LONGEST_PATH = 200  # characters of a path that an error quotes

REFUSED = "none"  # the route of responses to requests that no route took: no key, no such path, wrong method
GONE = 499  # the status of a request whose client left before the response began

ROUTES: Routes = (
    *openai.ROUTES,
    *responses.ROUTES,
    *embeddings.ROUTES,
    *relevance.ROUTES,
    *classes.ROUTES,
    *moderations.ROUTES,
    *anthropic.ROUTES,
    *batches.ROUTES,
    *native.ROUTES,
    *page.ROUTES,
    *admin.ROUTES,
)
ADMIN_ROUTES: Routes = (*admin.ROUTES, *native.OBSERVING, *page.ROUTES)  # of the listener for operators
ADMIN_PATHS = frozenset(operation.path for operation in admin.ROUTES)


class Endpoint:
    """One route: makes the `Call`, and answers for the handler when it raises."""

    def __init__(self, operation: Operation, services: Services, bodies: Bodies) -> None:
        self._path = operation.path
        self._handler = operation.handler
        self._errors = operation.errors
        self._traced = "POST" in operation.methods
        self._services = services
        self._bodies = bodies
        self._max_body = services.resolved.user.server.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracing = self._services.tracing
        span = None if tracing is None or not self._traced else tracing.start(f"{scope['method']} {self._path}", scope["headers"])
        call = Call(scope, receive, send, self._max_body, self._errors, self._bodies)
        with suppress(DisconnectedError):
            try:
                await self._handler(call, self._services)
            except ApiError as error:
                await call.fail(error)
            except DisconnectedError:
                raise
            except Exception:
                log.exception("%s %s failed", scope["method"], scope["path"])
                await call.fail(ApiError(500, "the server failed on this request; its log says why"))
            finally:
                _count(self._services, self._path, call)
                if span is not None:
                    _end(span, self._path, call)
                await call.close()


class App:
    """The whole application. Every path but the health checks and the page's files needs a key, if there are keys, also where
    there is no route.

    `scope["tenant"]` names the key's holder for the routes: "" where no key is asked for. `is_admin`: the application of operators' own
    listener, where users' keys mean nothing.
    """

    def __init__(self, services: Services, is_admin: bool = False) -> None:
        server = services.resolved.user.server
        self._services = services
        self._keys = None if is_admin else load_keys(server)
        self._admin = admin.AdminGuard(server, is_admin)
        self._is_open_to_all = server.insecure
        routes: Routes = ADMIN_ROUTES if is_admin else ROUTES
        operations = (*routes, description_of(routes))
        self._shapes = {operation.path: operation.errors for operation in operations}
        bodies = Bodies(AT_ONCE * server.max_body_bytes, server.client_timeout)
        self._router = Router([Route(o.path, Endpoint(o, services, bodies), methods=list(o.methods)) for o in operations])
        self._router.redirect_slashes = False
        if services.batches is not None and not is_admin:
            services.batches.route = self._route
        self._router.default = _not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        scope["tenant"] = ""
        scope["request_id"] = request_id_of(scope["headers"])
        scope["arrived"] = time.perf_counter()
        REQUEST_ID.set(scope["request_id"])  # in the context of this request's task alone
        try:
            if scope["path"] in ADMIN_PATHS:
                if self._keys is not None and not self._admin.opens(scope["headers"]) and self._keys.tenant(scope["headers"]) is None:
                    raise _no_key()  # to strangers these are paths like any other
                self._admin.check(scope["headers"])
                self._check_origin(scope)
                await self._route(scope, receive, send)
                return
            if self._keys is None:
                self._check_origin(scope)
            if self._keys is None or scope["path"] in OPEN_PATHS or page.is_open(scope["path"]):
                await self._route(scope, receive, send)
                return
            tenant = self._keys.tenant(scope["headers"])
            if tenant is None:
                raise _no_key()
            scope["tenant"] = tenant
            with self._services.shares.open(tenant) as share:
                scope["share"] = share
                await self._route(scope, receive, send)
        except ShareExceededError as error:
            await self._refuse(scope, receive, send, too_many(error))
        except ApiError as error:
            await self._refuse(scope, receive, send, error)
        except HTTPException as error:
            await self._refuse(scope, receive, send, _method_error(scope, error))

    def _check_origin(self, scope: Scope) -> None:
        """Where no key is asked for, a browser must not be made to act for a page from elsewhere."""
        is_safe = self._is_open_to_all or _is_unix(scope) or self._admin.opens(scope["headers"])
        sentence = None if is_safe else why_foreign(scope["headers"])
        if sentence is not None:
            raise ApiError(403, sentence)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # lets the router raise for a wrong method instead of answering in plain text
        await self._router(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
        call = Call(scope, receive, send, 0, self._shapes.get(scope["path"], OPENAI))
        with suppress(DisconnectedError):
            await call.fail(error)
        _count(self._services, REFUSED, call)


def _count(services: Services, route: str, call: Call) -> None:
    """The response into the metrics and, where it is wanted, into the log."""
    status, scope = call.status or GONE, call.scope
    if services.metrics is not None:
        services.metrics.count_response(route, status)
    if ACCESS.isEnabledFor(logging.INFO):
        seconds = round(time.perf_counter() - scope["arrived"], 6)
        fields = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": seconds, "client": _host(scope)}
        path, client = scope["path"][:LONGEST_PATH], fields["client"] or "this machine"  # a Unix socket, or a line of a batch
        ACCESS.info("%s %s %d in %.3f s from %s", scope["method"], path, status, seconds, client, extra={"fields": fields})


def _end(span: RequestSpan, route: str, call: Call) -> None:
    """The span of a request that was answered, or whose client left."""
    status, scope = call.status or GONE, call.scope
    attributes = {
        "http.request.method": scope["method"], "http.route": route, "http.response.status_code": status,
        "frame.request_id": call.request_id,
    }  # fmt: skip
    span.end(attributes, call.answer, f"status {status}" if status >= 500 else None)


def _is_unix(scope: Scope) -> bool:
    """Whether the request came over a Unix socket, which no browser reaches."""
    server = scope.get("server")
    return server is not None and server[1] is None


def _host(scope: Scope) -> str | None:
    return scope["client"][0] if scope.get("client") else None


def _no_key() -> ApiError:
    error = ApiError(401, "the API key is missing or wrong; send Authorization: Bearer KEY or x-api-key: KEY", code="invalid_api_key")
    error.headers = ((b"www-authenticate", b"Bearer"),)
    return error


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"][:LONGEST_PATH]
    raise ApiError(404, f"there is no {path} here; /openapi.json says what there is, such as /v1/chat/completions")


def _method_error(scope: Scope, error: HTTPException) -> ApiError:
    """405 with the methods that the path takes, in the sentence and as `Allow`."""
    allowed = sorted((error.headers or {}).get("Allow", "").split(", "))
    shown = " or ".join(method for method in allowed if method != "HEAD")
    found = ApiError(error.status_code, f"{scope['path'][:LONGEST_PATH]} does not take {scope['method']}; use {shown or 'another method'}")
    found.headers = ((b"allow", ", ".join(allowed).encode()),)
    return found


async def _lifespan(receive: Receive, send: Send) -> None:
    answers: Mapping[str, str] = {"lifespan.startup": "lifespan.startup.complete", "lifespan.shutdown": "lifespan.shutdown.complete"}
    while True:
        kind: Any = (await receive())["type"]
        await send({"type": answers[kind]})
        if kind == "lifespan.shutdown":
            return

"""The ASGI application: the table of routes, the access check of the matched route, and what becomes of errors. Plain ASGI all the way,
because every wrapper around `send` would be paid for each token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from frame.entrypoints.engine_client.quotas import QuotaExceededError
from frame.entrypoints.http.anthropic import messages as anthropic
from frame.entrypoints.http.dialects import cohere, ollama, sagemaker, sglang, tei, vllm
from frame.entrypoints.http.errors import OPENAI, ApiError, DisconnectedError, ErrorShape
from frame.entrypoints.http.failures import too_many
from frame.entrypoints.http.native import classes, relevance
from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.openai import batches, conversations, embeddings, moderations, responses
from frame.entrypoints.http.openai import completions as openai
from frame.entrypoints.http.operations import admin, page
from frame.entrypoints.http.operations.openapi import description_of
from frame.entrypoints.http.protocol.access import Gate
from frame.entrypoints.http.protocol.bodies import AT_ONCE, SMALL_BODY, Bodies, prompt_limit, value_limit
from frame.entrypoints.http.protocol.origin import Cors, is_preflight, read_cors
from frame.entrypoints.http.protocol.routing import Router, decode_path
from frame.entrypoints.http.request_context import Call, Receive, Scope, Send
from frame.entrypoints.http.services import Access, Operation, Routes, Services
from frame.entrypoints.logs import ACCESS, REQUEST_ID, request_id_of
from frame.entrypoints.tracing import RequestSpan

log = logging.getLogger(__name__)

LONGEST_PATH = 200  # characters of a path that an error quotes

REFUSED = "none"  # the route of responses to requests that no route took: no key, no such path, wrong method, or a preflight
ANY_METHOD = ("GET", "POST", "DELETE")  # of a path without a route, whose 404 a page may read
GONE = 499  # the status of a request whose client left before the response began

ROUTES: Routes = (
    *openai.ROUTES,
    *responses.ROUTES,
    *conversations.ROUTES,
    *embeddings.ROUTES,
    *relevance.ROUTES,
    *classes.ROUTES,
    *moderations.ROUTES,
    *anthropic.ROUTES,
    *batches.ROUTES,
    *vllm.ROUTES,
    *sglang.ROUTES,
    *cohere.ROUTES,
    *tei.ROUTES,
    *ollama.ROUTES,
    *sagemaker.ROUTES,
    *native.ROUTES,
    *page.ROUTES,
    *admin.ROUTES,
)
ADMIN_ROUTES: Routes = (*admin.ROUTES, *native.OBSERVING, *page.ROUTES)  # of the listener for operators


class Endpoint:
    """One operation: admits the request by the operation's access level, makes the `Call`, and answers when the handler raises."""

    def __init__(self, operation: Operation, services: Services, bodies: Bodies, gate: Gate) -> None:
        self.access = operation.access
        self.errors = operation.errors
        self._path = operation.path
        self._handler = operation.handler
        self._traced = "POST" in operation.methods
        self._services = services
        self._bodies = bodies
        self._gate = gate
        self._max_body = _body_limit(operation, services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError, ShareExceededError for a request that may not run."""
        tenant = scope["tenant"] = self._gate.admit(scope, self.access)
        if not tenant or self.access is Access.OWN:  # what ends requests must not wait for a free place
            await self.run(scope, receive, send)
            return
        with self._services.shares.open(tenant) as share:
            scope["share"] = share
            await self.run(scope, receive, send)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the handler for a request that was admitted."""
        tracing = self._services.tracing
        span = None if tracing is None or not self._traced else tracing.start(f"{scope['method']} {self._path}", scope["headers"])
        call = Call(scope, receive, send, self._max_body, self.errors, self._bodies)
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
    """The whole application. A path without a route has the access level `user`, so that strangers do not learn which paths exist.

    `scope["tenant"]` names the key's holder for the routes: "" where no key is asked for. `is_admin`: the application of operators' own
    listener, where users' keys mean nothing.
    """

    def __init__(self, services: Services, is_admin: bool = False, routes: Routes | None = None) -> None:
        server = services.resolved.user.server
        self._services = services
        self._cors = None if is_admin else read_cors(server)
        self._gate = Gate(server, is_admin, self._cors)
        self.keys = self._gate.keys
        if routes is None:
            routes = ADMIN_ROUTES if is_admin else ROUTES
        bodies = Bodies(AT_ONCE * server.max_body_bytes, server.client_timeout, value_limit(services.resolved.max_context))
        self._router = Router(
            (operation.path, operation.methods, Endpoint(operation, services, bodies, self._gate))
            for operation in (*routes, description_of(routes))
        )
        if services.batches is not None and not is_admin:
            services.batches.route = self.run_for_tenant

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
        if self._cors is not None:
            scope["response_headers"] = self._cors.response_headers(scope["headers"])
        errors = OPENAI
        try:
            found = self._router.find(decode_path(scope["raw_path"]))
            if self._cors is not None:
                if found is not None and any(endpoint.access is Access.ADMIN for endpoint in found.endpoints.values()):
                    scope["response_headers"] = ()  # operators' routes are for no page
                elif is_preflight(scope["method"], scope["headers"]) and self._cors.allows(scope["headers"]):
                    await self._answer_preflight(self._cors, scope, receive, send, ANY_METHOD if found is None else found.methods())
                    return
            if found is None:
                self._gate.admit(scope, Access.USER)
                raise _not_found(scope)
            errors = next(iter(found.endpoints.values())).errors
            endpoint = found.endpoint(scope["method"])
            if endpoint is None:
                self._gate.admit(scope, max(other.access for other in found.endpoints.values()))
                raise _wrong_method(scope, found.methods())
            errors, scope["path_params"] = endpoint.errors, found.parameters
            await endpoint(scope, receive, send)
        except QuotaExceededError as error:
            await self._refuse(scope, receive, send, too_many(error), errors)
        except ApiError as error:
            await self._refuse(scope, receive, send, error, errors)

    async def run_for_tenant(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run a request of the server's own for a tenant whose key was checked when the work was given, such as a line of a batch."""
        found = self._router.find(scope["path"])
        endpoint = None if found is None else found.endpoint(scope["method"])
        if endpoint is None or endpoint.access is Access.ADMIN:
            raise ValueError(f"{scope['method']} {scope['path']} cannot be run for a tenant")
        await endpoint.run(scope, receive, send)

    async def _answer_preflight(self, cors: Cors, scope: Scope, receive: Receive, send: Send, methods: Sequence[str]) -> None:
        """What a browser asks before a page's request. It brings no key, and the answer tells no more than /openapi.json's reader knows."""
        scope["response_headers"] = cors.preflight_headers(scope["headers"], methods)
        call = Call(scope, receive, send, 0)
        with suppress(DisconnectedError):
            await call.respond(b"", headers=())
        _count(self._services, REFUSED, call)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, error: ApiError, errors: ErrorShape) -> None:
        call = Call(scope, receive, send, 0, errors)
        with suppress(DisconnectedError):
            await call.fail(error)
        _count(self._services, REFUSED, call)


def _body_limit(operation: Operation, services: Services) -> int:
    """Bytes that a route's body may have."""
    most = services.resolved.user.server.max_body_bytes
    if operation.body == "file":
        return most
    return min(most, SMALL_BODY if operation.body == "small" else prompt_limit(services.resolved.max_context))


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


def _host(scope: Scope) -> str | None:
    return scope["client"][0] if scope.get("client") else None


def _not_found(scope: Scope) -> ApiError:
    path = scope["path"][:LONGEST_PATH]
    return ApiError(404, f"there is no {path} here; /openapi.json says what there is, such as /v1/chat/completions")


def _wrong_method(scope: Scope, methods: list[str]) -> ApiError:
    """405 with the methods that the path takes, in the sentence and as `Allow`."""
    shown = " or ".join(method for method in methods if method != "HEAD")
    error = ApiError(405, f"{scope['path'][:LONGEST_PATH]} does not take {scope['method']}; use {shown}")
    error.headers = ((b"allow", ", ".join(methods).encode()),)
    return error


async def _lifespan(receive: Receive, send: Send) -> None:
    answers: Mapping[str, str] = {"lifespan.startup": "lifespan.startup.complete", "lifespan.shutdown": "lifespan.shutdown.complete"}
    while True:
        kind: Any = (await receive())["type"]
        await send({"type": answers[kind]})
        if kind == "lifespan.shutdown":
            return

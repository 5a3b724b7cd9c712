"""The hooks and the middleware of HTTP extensions, guarded: an error ends its request alone, and
the log names the extension.

Used by the application and by `ApiRoute`, where an extension has any. Must not depend on a route.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

from frame.core.blame import describe, remedy
from frame.core.interfaces.http import MAX_REFUSAL, MIN_REFUSAL, HttpExtension, HttpRequest, HttpResponse, RefuseRequest
from frame.entrypoints.http.errors import SEE_LOG, ApiError
from frame.entrypoints.http.request_context import JSON, Receive, RequestContext, Scope, Send

log = logging.getLogger(__name__)


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
    found: HttpRequest | None = scope.get("hook_request")
    if found is None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = scope["client"][0] if scope.get("client") else ""
        found = scope["hook_request"] = HttpRequest(
            scope["method"], scope["path"], route, MappingProxyType(headers), context.request_id, context.tenant, host
        )
    return found


def _summarise(context: RequestContext, status: int) -> HttpResponse:
    state = context.reply
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
    """`kind(app, **arguments)`, whose errors are answered with 500 unless the response has begun.
    Errors of inner applications do not come this far: routes answer theirs."""

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

"""`GuardedMiddleware`: one middleware of an HTTP extension; an error of it ends its request alone,
and the log names the extension.

Used by the application where an extension has middleware. Must not depend on a route.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from frame.core.blame import describe, remedy
from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.errors import SEE_LOG, ApiError
from frame.entrypoints.http.request_context import JSON, Receive, Scope, Send

log = logging.getLogger(__name__)


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


class InnermostChannel:
    """Lets routes write through the middleware: they send to `scope["asgi_channel"]`."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["asgi_channel"] = (receive, send)
        await self._app(scope, receive, send)

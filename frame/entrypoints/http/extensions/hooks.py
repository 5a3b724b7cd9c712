"""`Hooks`: runs `on_request` and `on_response` of the HTTP extensions that have them, and names the
extension whose hook fails.

Used by the application and by `ApiRoute`, which have None where no extension has a hook. Must not
depend on a route.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import MappingProxyType

from frame.core.blame import describe, remedy
from frame.core.interfaces.http import MAX_REFUSAL, MIN_REFUSAL, HttpExtension, HttpRequest, HttpResponse, RefuseRequest
from frame.entrypoints.http.errors import SEE_LOG, ApiError
from frame.entrypoints.http.request_context import RequestContext

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
    state = context.answer
    seconds = time.perf_counter() - context.scope["arrived"]
    if state is None:
        return HttpResponse(status, seconds)
    prompts = {sequence.prompt_index: len(sequence.prompt) for sequence in state.sequences}
    return HttpResponse(status, seconds, sum(prompts.values()), sum(sequence.num_tokens for sequence in state.sequences))


def _refusal(extension: HttpExtension, refusal: RefuseRequest) -> ApiError:
    """The refusal as an ApiError. A status that is no error is a fault of the extension: 500."""
    if not (isinstance(refusal.status, int) and MIN_REFUSAL <= refusal.status <= MAX_REFUSAL):
        sentence = "%s refused a request with status %r; RefuseRequest takes %d to %d"
        log.error(sentence, describe(extension), refusal.status, MIN_REFUSAL, MAX_REFUSAL)
        return ApiError(500, SEE_LOG)
    headers = tuple((name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in refusal.headers.items())
    return ApiError(refusal.status, refusal.sentence, code=refusal.code, headers=headers)

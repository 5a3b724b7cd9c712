"""Dependencies that route handlers ask for: `ContextDep`, the request, and `ServicesDep`, what the
routes share.

Used by the modules that declare routes. Must not depend on a route.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from frame.entrypoints.http.request_context import RequestContext
from frame.entrypoints.http.services import Services


async def get_context(request: Request) -> Any:
    """The `RequestContext` of this request, which its route has made."""
    return request.scope["context"]


async def get_services(request: Request) -> Any:
    """The server's `Services`."""
    return request.app.state.services


ContextDep = Annotated[RequestContext, Depends(get_context)]
ServicesDep = Annotated[Services, Depends(get_services)]

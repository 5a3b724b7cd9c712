"""Dependencies that route handlers ask for: `ContextDep`, the request, and `ServicesDep`, what the
routes share.

Used by the modules that declare routes. Must not depend on a route.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends

from frame.entrypoints.http.protocol.api_route import ScopeDependency
from frame.entrypoints.http.request_context import RequestContext, Scope
from frame.entrypoints.http.services import Services


def get_context(scope: Scope) -> Any:
    """The `RequestContext` of this request, which its route has made."""
    return scope["context"]


def get_services(scope: Scope) -> Any:
    """The server's `Services`."""
    return scope["app"].services


ContextDep = Annotated[RequestContext, Depends(ScopeDependency(get_context))]
ServicesDep = Annotated[Services, Depends(ScopeDependency(get_services))]

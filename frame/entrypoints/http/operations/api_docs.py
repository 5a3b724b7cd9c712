"""`/openapi.json`, the OpenAPI description of the routes, and `/docs`, a page that shows it without
a network."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request

from frame.entrypoints.http.operations.page import send_asset
from frame.entrypoints.http.protocol.api_route import Access, ApiRouter, ContextDep
from frame.entrypoints.http.protocol.response_docs import responds_with

public_router = ApiRouter(access=Access.OPEN)
router = ApiRouter(access=Access.USER)


@public_router.get("/docs", responses=responds_with(str, media_type="text/html"))
async def docs(context: ContextDep) -> Any:
    """A page for people that shows the routes and their schemas."""
    await send_asset(context, "docs.html")


@router.get("/openapi.json", responses=responds_with(dict[str, Any]))
async def openapi(request: Request, context: ContextDep) -> Any:
    """This description, as OpenAPI 3.1."""
    state = request.app.state
    if not hasattr(state, "openapi_json"):
        state.openapi_json = msgspec.json.encode(request.app.openapi())
    await context.respond(state.openapi_json)

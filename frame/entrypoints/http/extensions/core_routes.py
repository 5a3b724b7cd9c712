"""`CORE_ROUTES`: the routes that belong to no extension: health, metrics, operators, the status
page, the description of the API.

Used by the application, and to refuse extensions with the same paths.
"""

from __future__ import annotations

from frame.entrypoints.http.native import generate as native
from frame.entrypoints.http.operations import admin, api_docs, page

CORE_ROUTES = tuple(
    route
    for router in (
        native.health_router, native.metrics_router, page.router, page.public_router, admin.router, admin.own_router, api_docs.router,
        api_docs.public_router,
    )
    for route in router.api_routes
)  # fmt: skip

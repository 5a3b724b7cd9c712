"""The HTTP extension `cohere`: Cohere's /v2/embed."""

from __future__ import annotations

from frame.entrypoints.http.dialects import cohere
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class CohereRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (cohere.router,)

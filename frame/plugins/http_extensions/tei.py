"""The HTTP extension `tei`: /embed and /rerank of text-embeddings-inference."""

from __future__ import annotations

from frame.entrypoints.http.dialects import tei
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class TeiRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (tei.router, tei.rerank_router)

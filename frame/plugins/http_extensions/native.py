"""The HTTP extension `native`: /generate, /tokenize, reranking, scoring and classification."""

from __future__ import annotations

from frame.entrypoints.http.native import classify, generate, rerank
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class NativeRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (generate.router, rerank.router, classify.router)

"""The HTTP extension `native`: /generate, /tokenize, reranking, scoring and classification."""

from __future__ import annotations

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.native import classify, generate, rerank
from frame.entrypoints.http.protocol.api_route import ApiRouter


class NativeRoutes(HttpExtension):
    """The routers of all modules of the API."""

    def make_routers(self) -> tuple[ApiRouter, ...]:
        return (generate.router, rerank.router, classify.router)

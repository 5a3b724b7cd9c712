"""The HTTP extension `native`: /generate, /tokenize, reranking, scoring and classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.native import classify, generate, rerank

if TYPE_CHECKING:
    from fastapi import APIRouter


class NativeRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (generate.router, rerank.router, classify.router)

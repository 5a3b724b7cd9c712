"""The HTTP extension `tei`: /embed and /rerank of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.dialects import tei

if TYPE_CHECKING:
    from fastapi import APIRouter


class TeiRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (tei.router, tei.rerank_router)

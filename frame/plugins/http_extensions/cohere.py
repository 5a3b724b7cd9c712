"""The HTTP extension `cohere`: Cohere's /v2/embed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.dialects import cohere

if TYPE_CHECKING:
    from fastapi import APIRouter


class CohereRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (cohere.router,)

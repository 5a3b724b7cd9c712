"""The HTTP extension `ollama`: the Ollama API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.dialects import ollama

if TYPE_CHECKING:
    from fastapi import APIRouter


class OllamaRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (ollama.router,)

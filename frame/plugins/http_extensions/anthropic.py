"""The HTTP extension `anthropic`: the Anthropic Messages API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.anthropic import messages
from frame.entrypoints.http.openai import completions

if TYPE_CHECKING:
    from fastapi import APIRouter


class AnthropicRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        return (messages.router, completions.models_router)

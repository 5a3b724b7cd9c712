"""The HTTP extension `anthropic`: the Anthropic Messages API."""

from __future__ import annotations

from frame.entrypoints.http.anthropic import messages
from frame.entrypoints.http.openai import completions
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class AnthropicRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (messages.router, completions.models_router)

"""The HTTP extension `ollama`: the Ollama API."""

from __future__ import annotations

from frame.entrypoints.http.dialects import ollama
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class OllamaRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (ollama.router,)

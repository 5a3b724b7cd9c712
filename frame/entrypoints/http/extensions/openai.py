"""The HTTP extension `openai`: chat, responses, embeddings, audio, batches."""

from __future__ import annotations

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.audio import transcriptions
from frame.entrypoints.http.openai import batches, completions, conversations, embeddings, moderations, responses
from frame.entrypoints.http.protocol.api_route import ApiRouter


class OpenAIRoutes(HttpExtension):
    """The routers of all modules of the API."""

    def make_routers(self) -> tuple[ApiRouter, ...]:
        parts = (responses, conversations, embeddings, moderations, batches, transcriptions)
        return (completions.router, completions.models_router, *(part.router for part in parts))

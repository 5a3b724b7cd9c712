"""The HTTP extension `openai`: the OpenAI API: chat, responses, embeddings, audio, batches."""

from __future__ import annotations

from frame.entrypoints.http.audio import transcriptions
from frame.entrypoints.http.openai import batches, completions, conversations, embeddings, moderations, responses
from frame.plugins.http_extensions.built_in import BuiltInRoutes


class OpenAIRoutes(BuiltInRoutes):
    """The routers of the API."""

    routers = (
        completions.router, completions.models_router, responses.router, conversations.router,
        embeddings.router, moderations.router, batches.router, transcriptions.router,
    )  # fmt: skip

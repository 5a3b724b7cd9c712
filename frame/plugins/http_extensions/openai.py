"""The HTTP extension `openai`: the OpenAI API: chat, responses, embeddings, audio, batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from frame.core.interfaces.http import HttpExtension
from frame.entrypoints.http.audio import transcriptions
from frame.entrypoints.http.openai import batches, completions, conversations, embeddings, moderations, responses

if TYPE_CHECKING:
    from fastapi import APIRouter


class OpenAIRoutes(HttpExtension):
    """Returns the routers of the API."""

    def make_routers(self) -> Sequence[APIRouter]:
        chat = (completions.router, completions.models_router, responses.router, conversations.router)
        return (*chat, embeddings.router, moderations.router, batches.router, transcriptions.router)

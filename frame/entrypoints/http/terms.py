"""`Terms`: how a request is to be treated, whatever it asks for. The bodies of every route that runs the model have these.

Knows no route.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# What a client may attach to what is kept for it: as much as OpenAI allows.
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]


class Terms(msgspec.Struct, kw_only=True):
    """`cache_salt` is the client's part of the name of the prefix cache that the request sees; `rid` names the request."""

    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None  # seconds
    rid: str | None = None

    def rank(self) -> int:
        """The priority that the scheduler is told. Raises ApiError where a dialect has words for it that are wrong."""
        return self.priority or 0

"""`CacheFeed`: the prefix cache's runs as JSON, read from the engine at most every two seconds
however many pages ask.

Used by the route of the page. A tenant reads its own runs only, and no text of them.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

import msgspec

from frame.core.interfaces.cache import owner_of
from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.text.tokenizer import Tokenizer

SHARED_SECONDS = 2.0  # for which all pages get the same data
ASK_SECONDS = 5.0  # that the engine gets
MAX_RUNS = 300  # nodes of the prefix cache that are drawn


class CacheSources(Protocol):
    """What the data is read from, which `Services` has."""

    client: EngineClient | ReplicaClient
    tokenizer: Tokenizer | None


class CacheFeed:
    """One for each server. All methods run in the event loop."""

    def __init__(self, sources: CacheSources) -> None:
        self._sources = sources
        self._lock = asyncio.Lock()
        self._made_at = float("-inf")  # `time.monotonic`
        self._outline: dict[str, Any] = {}
        self._whole = b""  # for operators
        self._error: EngineDeadError | TimeoutError | None = None  # of the last question

    async def read_cache(self, tenant: str) -> bytes:
        """`CacheOutline` as JSON; `tenant` is "" for operators, who read all of it. Raises
        EngineDeadError, TimeoutError."""
        async with self._lock:  # pages that come meanwhile wait for this one's data
            if time.monotonic() - self._made_at >= SHARED_SECONDS:
                await self._ask()
                self._made_at = time.monotonic()
        if self._error is not None:
            raise self._error
        return self._encode(tenant) if tenant else self._whole

    async def _ask(self) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                self._outline = (await self._sources.client.send_command("outline_cache", limit=MAX_RUNS)).data
            self._whole, self._error = self._encode(""), None
        except (EngineDeadError, TimeoutError) as error:
            self._error = error.with_traceback(None)

    def _encode(self, tenant: str) -> bytes:
        tokenizer = None if tenant else self._sources.tokenizer  # prompts belong to their senders
        runs = [run for run in self._outline["runs"] if not tenant or owner_of(run["namespace"]) == tenant]
        numbers = {name: place for place, name in enumerate(dict.fromkeys(run["namespace"] for run in runs))}
        shown = [
            {
                **{name: value for name, value in run.items() if name != "first_ids"},
                "namespace": numbers[run["namespace"]],
                "tenant": "" if tenant else owner_of(run["namespace"]),
                "text": "" if tokenizer is None else tokenizer.decode(run["first_ids"], False),
            }
            for run in runs
        ]
        return msgspec.json.encode({**self._outline, "runs": shown})

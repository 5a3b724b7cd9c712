"""Evaluates a server over its OpenAI-compatible API, with greedy requests to `/v1/chat/completions`
and `/v1/completions`. Must not know a task."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from frame.entrypoints.tools.eval.tasks import Message
from frame.entrypoints.tools.server_calls import make_headers

TIMEOUT = 300.0  # seconds of a request


class HttpBackend:
    """An `EvalBackend` for the server at `base_url`; an async context manager."""

    def __init__(
        self, base_url: str, model: str | None = None, api_key: str | None = None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        root = base_url.rstrip("/")
        headers = make_headers(api_key)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        url = root if root.endswith("/v1") else f"{root}/v1"
        self.client = httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT, limits=limits, transport=transport)
        self.model = model

    async def __aenter__(self) -> Self:
        if self.model is None:
            response = await self.client.get("/models")
            response.raise_for_status()
            self.model = response.json()["data"][0]["id"]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.client.aclose()

    async def complete_chat(self, messages: Sequence[Message], max_tokens: int) -> str:
        """The assistant's next message."""
        choice = await self._post("/chat/completions", {"messages": list(messages)}, max_tokens)
        return choice["message"]["content"] or ""

    async def complete(self, prompt: str, max_tokens: int) -> str:
        """The continuation of `prompt`."""
        choice = await self._post("/completions", {"prompt": prompt}, max_tokens)
        return choice["text"] or ""

    async def _post(self, path: str, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        request = {**body, "model": self.model, "max_tokens": max_tokens, "temperature": 0.0, "stream": False}
        response = await self.client.post(path, json=request)
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {response.text[:200]}")
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice

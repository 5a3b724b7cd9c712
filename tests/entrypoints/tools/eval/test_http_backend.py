"""The HTTP backend against a server that answers from memory."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from frame.entrypoints.tools.eval.http_backend import HttpBackend


def server(seen: list[Any]) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "frame-tiny"}]})
        body = json.loads(request.content)
        seen.append((path, body, request.headers.get("authorization")))
        if path == "/v1/chat/completions":
            return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": "42"}}]})
        if body["prompt"] == "too long":
            return httpx.Response(400, json={"error": {"message": "prompt too long"}})
        return httpx.Response(200, json={"choices": [{"text": " pass"}]})

    return httpx.MockTransport(answer)


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1"])
async def test_requests(url: str) -> None:
    seen: list[Any] = []
    async with HttpBackend(url, api_key="secret", transport=server(seen)) as backend:
        assert await backend.complete_chat([{"role": "user", "content": "x"}], 5) == "42"
        assert await backend.complete("def f():", 7) == " pass"
    (chat_path, chat, key), (text_path, text, _) = seen
    assert (chat_path, text_path) == ("/v1/chat/completions", "/v1/completions")
    assert chat["model"] == text["model"] == "frame-tiny"
    assert chat["messages"] == [{"role": "user", "content": "x"}]
    assert (chat["max_tokens"], chat["temperature"], text["prompt"]) == (5, 0.0, "def f():")
    assert key == "Bearer secret"


async def test_errors_say_what_the_server_said() -> None:
    async with HttpBackend("http://host", model="m", transport=server([])) as backend:
        with pytest.raises(RuntimeError, match=r"HTTP 400.*prompt too long"):
            await backend.complete("too long", 3)

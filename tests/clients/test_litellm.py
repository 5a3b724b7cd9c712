"""LiteLLM, unmodified, as an OpenAI-compatible and as an Anthropic-compatible server's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL

MESSAGES = [{"role": "user", "content": "What is 2 + 5?"}]


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    import litellm as library  # after the environment is set: it looks for news of itself when it is imported

    library.telemetry = False
    yield library


@pytest.fixture(params=["openai", "anthropic"])
def ask(request: pytest.FixtureRequest, url: str) -> dict[str, Any]:
    base = url + "/v1" if request.param == "openai" else url
    return {"model": f"{request.param}/{MODEL}", "api_base": base, "api_key": KEY, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


def test_completion_and_stream(litellm: Any, ask: dict[str, Any]) -> None:
    whole = litellm.completion(**ask)
    assert whole.choices[0].message.content == "7"
    assert whole.usage.completion_tokens > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)) == "7"


async def test_async(litellm: Any, ask: dict[str, Any]) -> None:
    assert (await litellm.acompletion(**ask)).choices[0].message.content == "7"
    stream = await litellm.acompletion(**ask, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "7"


def test_errors_keep_their_sentence(litellm: Any, ask: dict[str, Any]) -> None:
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature is -1"):
        litellm.completion(**(ask | {"temperature": -1}))

"""RequestOptions: the bodies of all routes that run the model have the same four fields, and a
priority comes of each."""

from __future__ import annotations

import pytest

from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native.tokenizing import DetokenizeRequest, TokenizeRequest
from frame.entrypoints.http.openai.completions_schema import CompletionRequest
from frame.entrypoints.http.request_body import RequestOptions, parse_body
from tests.entrypoints.published import ROUTES

RUNNING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/score",
           "/v1/classify", "/v1/moderations", "/generate")  # fmt: skip


BODIES = {route.path: route.body_model for route in ROUTES if route.path in RUNNING}


@pytest.mark.parametrize("path", RUNNING)
def test_every_body_that_runs_the_model_has_them(path: str) -> None:
    request = BODIES[path]
    assert request is not None
    assert issubclass(request, RequestOptions)


def test_bodies_that_run_nothing_have_none() -> None:
    assert not any(issubclass(each, RequestOptions) for each in (TokenizeRequest, DetokenizeRequest))


def test_priority() -> None:
    assert (RequestOptions().resolve_priority(), RequestOptions(priority=-3).resolve_priority()) == (0, -3)
    assert CompletionRequest(prompt="x", service_tier="flex").resolve_priority() == -1
    assert CompletionRequest(prompt="x", service_tier="flex", priority=4).resolve_priority() == 4
    with pytest.raises(ApiError, match="service_tier is 'gold'"):
        parse_body(CompletionRequest, {"prompt": "x", "service_tier": "gold"})

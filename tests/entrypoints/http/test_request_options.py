"""Terms: the bodies of all routes that run the model have the same four fields, and a priority comes of each."""

from __future__ import annotations

import pytest

from frame.entrypoints.http.app import ROUTES
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.native.generate import DetokenizeRequest, TokenizeRequest
from frame.entrypoints.http.openai.completions_schema import CompletionRequest
from frame.entrypoints.http.request_options import Terms

RUNNING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank", "/v1/score",
           "/v1/classify", "/v1/moderations", "/generate")  # fmt: skip


BODIES = {operation.path: operation for operation in ROUTES if operation.path in RUNNING}


@pytest.mark.parametrize("path", RUNNING)
def test_every_body_that_runs_the_model_has_them(path: str) -> None:
    request = BODIES[path].request
    assert request is not None
    assert issubclass(request, Terms)


def test_bodies_that_run_nothing_have_none() -> None:
    assert not any(issubclass(each, Terms) for each in (TokenizeRequest, DetokenizeRequest))


def test_priority() -> None:
    assert (Terms().rank(), Terms(priority=-3).rank()) == (0, -3)
    assert CompletionRequest(prompt="x", service_tier="flex").rank() == -1
    assert CompletionRequest(prompt="x", service_tier="flex", priority=4).rank() == 4
    with pytest.raises(ApiError, match="service_tier is 'gold'"):
        CompletionRequest(prompt="x", service_tier="gold").rank()

"""Requests that coding agents sent, recorded with long texts cut and identifiers replaced, are sent
again: without the programs these tests keep what the programs need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.serving import RunningServer

RECORDED = Path(__file__).parent / "recorded"
# What the server ignores of a program's requests; docs/coding_agents.md says why that is safe.
IGNORED = {
    "claude_code": {"thinking.display"},
    "codex": {"tools[4]", "reasoning.summary"},
    "codex_gpt_5_5": {"tools[5]"},
    "codex_gpt_6_2": {"reasoning.context"},
    "opencode": set(),
}


def text_of(reply: httpx.Response) -> str:
    """The text of a stream of any of the three APIs."""
    events: list[Any] = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    deltas += [event["delta"] for event in events if event.get("type") == "content_block_delta"]
    texts = [event["delta"] for event in events if event.get("type") == "response.output_text.delta"]
    return "".join([delta.get("content") or delta.get("text") or "" for delta in deltas] + texts)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.json")))
def test_recorded_requests(scripted_server: RunningServer, name: str) -> None:
    requests = json.loads((RECORDED / f"{name}.json").read_text())["requests"]
    assert len(requests) == 2, "the first, and one with results of tools"
    for request in requests:
        body = request["body"] | {"model": "agent-model"}
        reply = httpx.post(scripted_server.url + request["path"], json=body, headers=request["headers"], timeout=60)
        assert reply.status_code == 200, reply.text
        assert set(filter(None, reply.headers.get("x-frame-ignored-fields", "").split(", "))) == IGNORED[name]
        assert text_of(reply) == "done", "what the model says without a script"


def test_paths_that_agents_try(scripted_server: RunningServer) -> None:
    url = scripted_server.url
    assert httpx.head(url + "/").status_code == 200
    version = {"anthropic-version": "2023-06-01"}
    models = httpx.get(url + "/v1/models?limit=1000&beta=true", headers=version).raise_for_status().json()
    assert (models["data"][0]["id"], models["has_more"]) == ("agent-model", False)
    for path in ("/v1/messages/batches", "/v1/messages/none/more"):
        reply = httpx.get(url + path, headers=version)
        assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (404, "error", "not_found_error")
    assert "type" not in httpx.get(url + "/v1/none").json(), "elsewhere the body is OpenAI's"

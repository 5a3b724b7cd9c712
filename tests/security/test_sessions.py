"""Hostile use of sessions over sockets: one key pins everything, opens sessions without end, and
sends the names of another key's sessions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from frame.entrypoints.http.protocol.session_store import MAX_SESSIONS
from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.serving import RunningServer

KEYS = {"mallory": "key-of-mallory", "bob": "key-of-bob"}
TOKENS = 2048  # of the cache
SHARE = 0.25  # of one key's sessions


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("\n".join(KEYS.values()))
    flags = ["--served-model-name", "m"]
    flags += ["--max-total-tokens", str(TOKENS), "--max-model-len", "512", "--page-size", "16", "--session-share", str(SHARE)]
    model = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    with RunningServer(model, "--api-keys", str(keys), *flags, env={"FRAME_FAKE_STEP": "0"}) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def send(client: httpx.Client, key: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return client.post(path, json=body, headers={"authorization": f"Bearer {KEYS[key]}", **headers})


def generate(client: httpx.Client, key: str, start: int, length: int = 160, **more: Any) -> int:
    """-> cached tokens of a prompt that begins with this number."""
    ids = [3 + (start * 17 + place) % 300 for place in range(length)]
    body = {"input_ids": [3 + start % 300, *ids], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, **more}
    response = send(client, key, "/generate", body)
    assert response.status_code == 200, response.text
    return int(response.json()["meta_info"]["cached_tokens"])


def read_pins(client: httpx.Client) -> tuple[float, float]:
    """(sessions whose prefix is kept, their pages)."""
    metrics = client.get("/metrics", headers={"authorization": f"Bearer {KEYS['bob']}"}).text
    found = {name: float(value) for name, value in re.findall(r"^frame[_:](kv_session\w*)\S* (\S+)$", metrics, re.MULTILINE)}
    return found["kv_sessions"], found["kv_session_pages"]


def test_one_key_cannot_pin_everything(client: httpx.Client) -> None:
    """Its oldest pins end beyond its share, and another key's pinned prefix stays where the first
    one fills the cache several times."""
    assert generate(client, "bob", 1, session_id="mine") == 0
    for number in range(2, 60):
        generate(client, "mallory", number, session_id=f"session {number}", prompt_cache_retention="24h")
    assert generate(client, "bob", 1, session_id="mine") == 160
    assert generate(client, "bob", 999) == 0  # is served at once, without a pin
    pages = TOKENS // 16 * SHARE
    sessions, pinned = read_pins(client)
    assert 2 <= sessions <= 2 * pages
    assert pinned <= 2 * pages


def test_sessions_without_end_are_refused(client: httpx.Client) -> None:
    statuses = [send(client, "mallory", "/open_session", {"capacity_of_str_len": 100}).status_code for _ in range(MAX_SESSIONS + 5)]
    assert statuses == [200] * MAX_SESSIONS + [429] * 5
    opened = send(client, "bob", "/open_session", {"capacity_of_str_len": 100})
    assert opened.status_code == 200
    assert send(client, "bob", "/close_session", {"session_id": opened.json()}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"])
def test_names_are_bounded_in_all_protocols(client: httpx.Client, path: str) -> None:
    fields = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"prompt": "hi"},
        "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        "/v1/responses": {"input": "hi"},
        "/generate": {"input_ids": [5, 6]},
    }
    body: dict[str, Any] = fields[path] if path == "/generate" else {"model": "m", **fields[path]}
    for sent in (body | {"session_id": "x" * 257}, body | {"prompt_cache_key": "x\x1b"}, body | {"prompt_cache_retention": "forever"}):
        response = send(client, "mallory", path, sent)
        assert response.status_code == 400, (path, response.text)
    response = send(client, "mallory", path, body, **{"x-session-id": "y" * 300})
    assert response.status_code == 400
    assert "x-session-id has 300 characters" in response.text


def test_names_of_another_key_are_unknown(client: httpx.Client) -> None:
    """A forged name gets the response of one that does not exist, and changes nothing."""
    opened = send(client, "bob", "/open_session", {"capacity_of_str_len": 400, "session_id": "bobs"})
    assert opened.json() == "bobs"
    sampling = {"max_new_tokens": 2, "ignore_eos": True}
    body = {"input_ids": list(range(3, 103)), "sampling_params": sampling, "session_params": {"id": "bobs"}}
    first = send(client, "bob", "/generate", body).json()
    rid = first["meta_info"]["id"]
    for name in ("bobs", "unknown"):
        closed = send(client, "mallory", "/close_session", {"session_id": name})
        assert (closed.status_code, closed.json()["error"]["message"]) == (404, f"there is no session '{name}'")
        stolen = send(client, "mallory", "/generate", body | {"session_params": {"id": name, "rid": rid}})
        assert stolen.status_code == 400
        assert f"session '{name}' is not open" in stolen.text
    assert generate(client, "mallory", 5, session_id="bobs") >= 0
    again = send(client, "bob", "/generate", body | {"input_ids": [9], "session_params": {"id": "bobs", "rid": rid}})
    assert again.status_code == 200
    assert again.json()["meta_info"]["prompt_tokens"] == 103
    assert again.json()["meta_info"]["cached_tokens"] == 96
    assert send(client, "bob", "/close_session", {"session_id": "bobs"}).status_code == 200

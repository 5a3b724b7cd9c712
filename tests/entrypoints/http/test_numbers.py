"""Numbers in the bodies of every dialect: their types, their ranges, and values that are no finite
number of 64 bits. Over sockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.entrypoints.serving import RunningServer

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSES, MESSAGE = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA, NATIVE, COHERE = "/api/chat", "/generate", "/v2/chat"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2},
    MESSAGE: {"messages": MESSAGES, "max_tokens": 2},
    OLLAMA: {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2}},
    NATIVE: {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    COHERE: {"messages": MESSAGES, "max_tokens": 2},
}
# The name of the field, as each dialect sends and reports it: (temperature, number of tokens)
NAMES = {
    CHAT: ("temperature", "max_tokens"),
    TEXT: ("temperature", "max_tokens"),
    RESPONSES: ("temperature", "max_output_tokens"),
    MESSAGE: ("temperature", "max_tokens"),
    OLLAMA: ("options.temperature", "options.num_predict"),
    NATIVE: ("sampling_params.temperature", "sampling_params.max_new_tokens"),
    COHERE: ("temperature", "max_tokens"),
}
MAXIMA = {CHAT: 2, TEXT: 2, RESPONSES: 2, MESSAGE: 1, OLLAMA: 100, NATIVE: 100, COHERE: 2}


def send(server: RunningServer, path: str, name: str, literal: str) -> tuple[int, str]:
    """The status and the error's sentence of a request whose field `name` is this JSON."""
    body = json.loads(json.dumps({"model": server.model, **BODIES[path]}))
    *outer, last = name.split(".")
    place = body
    for part in outer:
        place = place[part]
    place[last] = "\x00"
    text = json.dumps(body).replace('"\\u0000"', literal)
    response = httpx.post(server.url + path, content=text, headers={"content-type": "application/json"}, timeout=60)
    body = response.json() if response.status_code != 200 else {}
    error = body.get("error") or body.get("message", "")  # Cohere's is a message alone
    return response.status_code, error if isinstance(error, str) else error["message"]


@pytest.fixture(scope="module")
def server(fake_server: RunningServer) -> RunningServer:
    fake_server.model = fake_server.get("/v1/models")["data"][0]["id"]  # type: ignore[attr-defined]
    return fake_server


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("literal", ['"0.7"', '"1"', "true", "false", "[]", "{}", "NaN", "Infinity", "-Infinity", "1e999", "1" + 400 * "0"])
def test_what_is_no_number_is_refused(server: RunningServer, path: str, literal: str) -> None:
    for name in NAMES[path]:
        status, sentence = send(server, path, name, literal)
        assert status == 400, (name, sentence)
        is_json = literal[0] in '"tf[{1' and literal != "1e999"
        assert (sentence.split()[0] == name) == is_json, sentence


@pytest.mark.parametrize("path", BODIES)
def test_a_number_of_more_digits_than_python_reads_is_named(server: RunningServer, path: str) -> None:
    for name in NAMES[path]:
        status, sentence = send(server, path, name, 5000 * "9")
        assert (status, f"{name} is not finite, or beyond the range" in sentence) == (400, True), sentence


@pytest.mark.parametrize("path", BODIES)
def test_the_temperature_has_the_range_of_its_api(server: RunningServer, path: str) -> None:
    name, _ = NAMES[path]
    for value in (0, 0.7, 1, MAXIMA[path]):
        assert send(server, path, name, str(value)) == (200, "")
    for value in (-0.1, MAXIMA[path] + 0.1, 1e9):
        status, sentence = send(server, path, name, str(value))
        assert (status, sentence.split()[0]) == (400, name), sentence


@pytest.mark.parametrize("path", BODIES)
def test_whole_numbers(server: RunningServer, path: str) -> None:
    _, name = NAMES[path]
    assert send(server, path, name, "2.0") == (200, "")
    for literal in ("2.5", "1" + 30 * "0", "18446744073709551616", "-9223372036854775809", "2e30"):
        status, sentence = send(server, path, name, literal)
        assert (status, sentence.split()[0]) == (400, name), (literal, sentence)


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGE, NATIVE])
@pytest.mark.parametrize("literal", ["1", "0", '"true"', '"false"'])
def test_what_is_neither_true_nor_false_is_refused(server: RunningServer, path: str, literal: str) -> None:
    status, sentence = send(server, path, "stream", literal)
    assert status == 400
    assert sentence.startswith("stream is ")
    assert sentence.endswith("; send true or false")

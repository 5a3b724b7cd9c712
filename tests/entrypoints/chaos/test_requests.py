"""Requests that are bad_token, clients that behave oddly, restarts that are refused or asked for at
a bad moment."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.entrypoints.chaos.storm import processes, restarts
from tests.entrypoints.serving import RunningServer, wait_until

KILL, HANG, NAN, TEXT_KILL = 11, 12, 13, 14  # first token ids of prompts that do so
POISON = {
    "FRAME_FAKE_STEP": "0.004",
    "FRAME_FAKE_KILL": str(KILL),
    "FRAME_FAKE_HANG": str(HANG),
    "FRAME_FAKE_NAN": str(NAN),
    "FRAME_FAKE_TEXT_KILL": str(TEXT_KILL),
}
FLAGS = ("--max-model-len", "512", "--max-total-tokens", "8192", "--max-restarts", "10000", "--heartbeat-timeout", "4")


@pytest.fixture(scope="module")
def fragile(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, *FLAGS, "--detokenizer-workers", "1", env=POISON) as running:
        yield running


def body_of(*prompt: int, **more: Any) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": 60, "temperature": 0, "ignore_eos": True, **more}


class Asking:
    """A request that waits for its response."""

    def __init__(self, server: RunningServer, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._found: list[httpx.Response] = []
        url = server.url + "/v1/completions"
        self._thread = threading.Thread(target=lambda: self._found.append(httpx.post(url, json=body, headers=headers, timeout=60)))
        self._thread.start()

    def response(self) -> httpx.Response:
        self._thread.join(60)
        return self._found[0]


def ask(server: RunningServer, *bodies: dict[str, Any], headers: dict[str, dict[str, str]] | None = None) -> list[Asking]:
    """Requests that all run by now. `headers` by rid."""
    before = server.get("/server_info")["running"]
    asking = [Asking(server, body, (headers or {}).get(body.get("rid", ""))) for body in bodies]
    wait_until(lambda: server.get("/server_info")["running"] == before + len(bodies))
    return asking


def text_of(response: httpx.Response) -> str:
    return response.json()["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize(("bad_token", "company", "crashes"), [(KILL, 8, 3), (HANG, 0, 2)])
def test_only_the_request_that_crashes_the_engine_is_refused(fragile: RunningServer, bad_token: int, company: int, crashes: int) -> None:
    innocent = [body_of(5, 6, number, max_tokens=400) for number in range(company)]
    calm = [text_of(asking.response()) for asking in ask(fragile, *innocent)]
    before = restarts(fragile)
    others = ask(fragile, *innocent)
    crashing = fragile.post("/v1/completions", body_of(bad_token, 9))
    assert crashing.status_code == 500
    assert f"crashed the engine {crashes} times" in crashing.json()["error"]["message"]
    assert [text_of(asking.response()) for asking in others] == calm
    wait_until(fragile.ready)
    assert restarts(fragile) - before == crashes
    assert fragile.post("/check_integrity", {}).status_code == 200
    if bad_token == HANG:
        assert any("fake_engine.py" in line and "in launch" in line for line in fragile.lines)  # it said where


@pytest.mark.slow
def test_only_the_request_that_crashes_the_detokenizer_is_refused(fragile: RunningServer) -> None:
    innocent = [body_of(5, 8, number, max_tokens=400) for number in range(8)]
    calm = [text_of(asking.response()) for asking in ask(fragile, *innocent)]
    before = restarts(fragile)
    others = ask(fragile, *innocent)
    crashing = fragile.post("/v1/completions", body_of(TEXT_KILL, 9))
    assert crashing.status_code == 500
    assert "crashed the detokenizer 2 times at the same position; it is refused" in crashing.json()["error"]["message"]
    assert [text_of(asking.response()) for asking in others] == calm
    wait_until(fragile.ready)
    assert restarts(fragile) - before == 2
    assert fragile.post("/check_integrity", {}).status_code == 200


def test_logits_that_are_no_numbers_end_their_request_alone(fragile: RunningServer) -> None:
    innocent = [body_of(5, 7, number, max_tokens=400) for number in range(4)]
    calm = [text_of(asking.response()) for asking in ask(fragile, *innocent)]
    others = ask(fragile, *innocent)
    broken = fragile.post("/v1/completions", body_of(NAN, 9))
    assert broken.status_code == 500
    assert "not finite" in broken.json()["error"]["message"]
    assert [text_of(asking.response()) for asking in others] == calm
    assert fragile.post("/check_integrity", {}).status_code == 200


# restarts -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_while_the_engine_is_away(checkpoint: Path) -> None:
    """New requests wait, those that are aborted or late end, readiness says no, commands say why;
    and a SIGTERM in the middle lets the rest finish."""
    with RunningServer(checkpoint, *FLAGS, env={"FRAME_FAKE_STEP": "0.01", "FRAME_FAKE_START": "3"}) as server:
        bodies = [body_of(5, 6, number, max_tokens=400, rid=rid) for number, rid in enumerate(("first", "named", "late"))]
        first, named, late = ask(server, *bodies, headers={"late": {"x-request-timeout": "2"}})
        processes(server)["scheduler"].kill()
        wait_until(lambda: not server.ready())
        assert httpx.get(server.url + "/health/live").status_code == 200
        refused = httpx.get(server.url + "/server_info")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "is being restarted" in refused.json()["error"]["message"]
        taken = server.metric("frame_prompt_tokens_total")
        second = Asking(server, body_of(5, 6, 8))
        wait_until(lambda: server.metric("frame_prompt_tokens_total") > taken)  # `late` may have ended meanwhile
        server.post("/abort_request", {"rid": "named"})
        assert named.response().json()["choices"][0]["finish_reason"] == "abort"
        assert late.response().status_code == 504
        assert not server.ready()  # it is not the new engine that said so
        server.process.send_signal(signal.SIGTERM)
        assert [each.response().json()["usage"]["completion_tokens"] for each in (first, second)] == [400, 60]
        assert server.wait() == 0


def test_enough_restarts_end_the_server(checkpoint: Path) -> None:
    with RunningServer(checkpoint, "--max-restarts", "1", env=POISON) as server:
        response = server.post("/v1/completions", body_of(KILL))
        assert response.status_code == 500
        assert "killed by signal 6; the server cannot go on" in response.json()["error"]["message"]
        assert server.wait() == 1


# clients ------------------------------------------------------------------------------------------


def connect(server: RunningServer, body: dict[str, Any], version: str = "1.1", room: int | None = None) -> socket.socket:
    """A connection over which `body` was sent; the system keeps `room` bytes of what is not
    read."""
    url = httpx.URL(server.url)
    connection = socket.socket()
    connection.settimeout(30)
    if room is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    connection.connect((url.host, url.port or 0))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: [::1]\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def test_a_request_ends_when_its_client_closes_the_connection(fake_server: RunningServer) -> None:
    for version in ("1.1", "1.0"):
        connect(fake_server, body_of(5, 6, max_tokens=450), version).close()
        wait_until(lambda: fake_server.get("/server_info")["outstanding"] == 0, 2.0)

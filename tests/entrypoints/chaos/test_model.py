"""A real model behind the whole stack: its ranks die in the middle of answers, which end as they
would have."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import httpx
import psutil
import pytest

from frame.checkpoint.model_config import find_model
from tests.entrypoints.chaos.storm import Storm, processes, restarts, strikes
from tests.entrypoints.serving import RunningServer, list_children, wait_until

TEXT = "def add(first, second):\n"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
}
FORCED = "([a-z]{3} = 0x1F4A9_DEADBEEF; ){8}"  # most of it is jumped over
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": TEXT, "max_tokens": 150, "temperature": 0, "ignore_eos": True},
    {"prompt": TEXT * 8, "max_tokens": 150, "temperature": 0.9, "seed": 5, "ignore_eos": True, "logprobs": 2},
    {"prompt": TEXT, "max_tokens": 150, "temperature": 0.8, "seed": 6, "ignore_eos": True, "frequency_penalty": 0.5, "min_tokens": 100},
    {"prompt": TEXT, "temperature": 0.7, "seed": 8, "repetition_penalty": 1.2, "max_tokens": 250, "regex": FORCED},
    {"prompt": "A person: ", "max_tokens": 400, "temperature": 0.7, "seed": 7, "json_schema": json.dumps(SCHEMA)},
)

STRUCK_AT = 8  # characters; the shortest answer has 22


def replies(server: RunningServer, victim: str = "", how: signal.Signals = signal.SIGKILL) -> list[dict[str, Any]]:
    """What the bodies yield, one after another; in the middle of each `victim` is struck."""
    found = []
    for body in BODIES:
        text, logprobs, reason, struck = "", [], None, not victim
        with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=90) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, (event, body)
                choice = event["choices"][0]
                text, reason = text + choice["text"], choice["finish_reason"] or reason
                logprobs += (choice.get("logprobs") or {}).get("tokens", [])
                if not struck and len(text) > STRUCK_AT:
                    struck = True
                    processes(server)[victim].send_signal(how)
        assert struck and len(text) > STRUCK_AT, (body, text)
        found.append({"text": text, "logprobs": logprobs, "reason": reason})
    return found


def test_a_real_engine_dies_and_comes_again(server: RunningServer) -> None:
    body = {"prompt": TEXT, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    calm = server.post("/v1/completions", body).json()["choices"][0]["text"]
    family = list_children(server.process.pid, recursive=True)
    before = restarts(server)
    storm = Storm(1, 200)
    storm.bodies = [{**body, "stream": True, "n": 1}]
    reply = storm(server, 20, processes(server)["scheduler"].kill)[0]
    assert (reply.texts, reply.reasons) == ((calm,), ("length",))
    assert restarts(server) == before + 1
    assert server.post("/check_integrity", {}).status_code == 200
    psutil.wait_procs(family, timeout=120)
    assert not any(child.is_running() for child in family)


@pytest.fixture(scope="module", params=["tp 1", "tp 2", "pp 2"])
def tiny(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    name, size = request.param.split()
    flags = ("--dtype", "float32", f"--{name}", size, "--heartbeat-timeout", "10", "--max-restarts", "1000")
    with RunningServer(find_model("frame-tiny"), *flags, "--grammar-backend", "combined", fake=False) as running:
        yield running


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_every_kind_of_answer_survives(tiny: RunningServer, how: signal.Signals) -> None:
    calm = replies(tiny)
    assert set(json.loads(calm[-1]["text"])) == {"name", "age"} and calm[-2]["text"].count("DEADBEEF") == 8
    for victim in processes(tiny):
        family = list_children(tiny.process.pid, recursive=True)
        before = restarts(tiny)
        assert replies(tiny, victim, how) == calm, victim
        assert restarts(tiny) == before + len(BODIES)
        wait_until(tiny.ready)
        assert tiny.post("/check_integrity", {}).status_code == 200
        psutil.wait_procs(family, timeout=120)
        assert not any(child.is_running() for child in family)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_greedy_texts_survive_a_hundred_strikes_at_random_ranks(tiny: RunningServer) -> None:
    storm = Storm(32, 60)
    for body in storm.bodies:
        body["temperature"] = 0.0
    calm, progress = storm(tiny), storm.progress
    assert not any(reply.error for reply in calm)
    ranks = [name for name in processes(tiny) if name.startswith(("scheduler", "follower"))]
    for number, (victim, how, share) in enumerate(islice(strikes(18, ranks), 100)):
        before = restarts(tiny)
        strike = partial(processes(tiny)[victim].send_signal, how)
        assert storm(tiny, int(share * progress), strike) == calm, (number, victim, how, share)
        assert restarts(tiny) == before + 1, (number, victim, how, share)
        wait_until(tiny.ready, 60)
        wait_until(lambda: tiny.get("/server_info")["outstanding"] == 0)
        assert tiny.post("/check_integrity", {}).status_code == 200
        assert tiny.post("/flush_cache", {}).status_code == 200
        assert tiny.get("/server_info")["used_pages"] == 0

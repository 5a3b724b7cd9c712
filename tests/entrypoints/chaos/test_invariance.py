"""The batch-invariant mode over crashes: engines are killed under streams at random moments, and
every text and log-probability is that of the request alone."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import psutil
import pytest

from frame.checkpoint.model_config import find_model
from tests.entrypoints.chaos.storm import restarts
from tests.entrypoints.serving import RunningServer, list_children, wait_until

MODE = (
    *("--dtype", "bfloat16", "--enable-deterministic-inference", "--max-model-len", "1024", "--max-total-tokens", "16384"),
    *("--max-running-requests", "16", "--heartbeat-timeout", "60", "--max-restarts", "1000"),
)
FORMS = {
    "plain": (),
    "mtp": ("--speculative-algorithm", "mtp", "--speculative-num-steps", "3"),
    "ngram": ("--speculative-algorithm", "ngram", "--speculative-num-steps", "4"),
    "tp 2": ("--tp", "2"),
}
STREAMS = 16  # of the long form
Answer = tuple[str, tuple[float, ...]]  # the text, and the log-probabilities of its tokens


def make_bodies(tokens: int, streams: int) -> list[dict[str, Any]]:
    """Prompts of 3 to 300 tokens, some with the same beginning; greedy and drawn."""
    shared, bodies = list(range(300, 380)), []
    for number in range(streams):
        r = random.Random(number)
        prompt = (shared if number % 3 == 0 else []) + [r.randrange(10, 2000) for _ in range(r.choice((3, 40, 220)))]
        bodies.append({
            "prompt": prompt, "max_tokens": tokens - 3 * number, "temperature": 0.0 if number % 2 else 0.9, "seed": number,
            "ignore_eos": True, "logprobs": 1, "stream": True,
        })  # fmt: skip
    return bodies


class Strikes:
    """Counts the tokens of all streams. At each of `moments`, `strike` is called, and again at the
    next tokens if it returns false."""

    def __init__(self, moments: Sequence[int], strike: Callable[[], bool]) -> None:
        self._moments, self._strike = sorted(moments, reverse=True), strike
        self._count, self._lock = 0, threading.Lock()

    def __call__(self, amount: int) -> None:
        with self._lock:
            self._count += amount
            if self._moments and self._count >= self._moments[-1] and self._strike():
                self._moments.pop()

    @property
    def num_left(self) -> int:
        return len(self._moments)


def ask(server: RunningServer, body: dict[str, Any], count: Callable[[int], object] = lambda amount: None) -> Answer:
    text, logprobs = "", list[float]()
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                found = (choice.get("logprobs") or {}).get("token_logprobs", [])
                text, logprobs = text + choice["text"], logprobs + found
                count(len(found))
    return text, tuple(logprobs)


def ask_all(server: RunningServer, bodies: Sequence[dict[str, Any]], count: Callable[[int], object] = lambda amount: None) -> list[Answer]:
    with ThreadPoolExecutor(len(bodies)) as threads:
        return list(threads.map(partial(ask, server, count=count), bodies))


def list_ranks(server: RunningServer) -> list[psutil.Process]:
    """The processes of the engine that are alive."""
    found = []
    for child in list_children(server.process.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()  # empty of a process that has ended
            if len(command) > 4 and command[4] in ("scheduler", "follower") and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def kill_under_streams(form: str, kills: int, tokens: int, seed: int, streams: int = STREAMS) -> None:
    bodies = make_bodies(tokens, streams)
    total = sum(body["max_tokens"] for body in bodies)
    with RunningServer(find_model("frame-tiny"), *MODE, *FORMS[form], fake=False) as server:
        alone = [ask(server, body) for body in bodies]
        assert [len(logprobs) for _, logprobs in alone] == [body["max_tokens"] for body in bodies]
        r, before = random.Random(seed), restarts(server)

        def strike() -> bool:
            if ranks := list_ranks(server):
                r.choice(ranks).kill()
            return bool(ranks)

        strikes = Strikes([r.randrange(1, total * 9 // 10) for _ in range(kills)], strike)
        found = ask_all(server, bodies, strikes)
        assert [number for number in range(streams) if found[number] != alone[number]] == []
        assert strikes.num_left == 0
        assert restarts(server) - before > kills / 2  # two kills of one engine are one restart
        wait_until(server.ready, 60)
        assert server.post("/check_integrity", {}).status_code == 200
    with RunningServer(find_model("frame-tiny"), *MODE, *FORMS[form], fake=False) as server:
        assert ask_all(server, bodies) == alone, "after a fresh start"


@pytest.mark.slow
def test_three_kills_under_four_streams() -> None:
    kill_under_streams("plain", 3, 24, 1, 4)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", FORMS)
def test_twenty_kills_under_sixteen_streams(form: str, seed: int) -> None:
    kill_under_streams(form, 20, 120, seed)

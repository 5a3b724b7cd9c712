"""A storm of requests whose answers are known, and a hand that stops and kills the server's
processes under them."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from tests.entrypoints.serving import RunningServer, list_children

SHARED = [7] * 40
WORDS = "The quick brown fox jumps over the lazy dog "


def body_of(number: int, steps: int) -> dict[str, Any]:
    """Request `number` of a storm: its answer depends on nothing but its body. Up to `steps`
    tokens."""
    r = random.Random(number)
    prompt: Any = (SHARED if r.random() < 0.3 else []) + [r.randrange(3, 300) for _ in range(r.choice((3, 30, 200)))]
    if number % 4 == 0:
        prompt = WORDS * r.choice((1, 8))  # through the tokenizer
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": r.choice((steps // 4, steps, steps)),
        "temperature": r.choice((0.0, 1.0)),
        "seed": number,
        "ignore_eos": True,
        "stream": r.random() < 0.8,
        "n": r.choice((1, 1, 1, 2)),
    }
    if r.random() < 0.3:
        body["stop"] = ["zq", "\u00e9"]
    if r.random() < 0.2:
        body["logprobs"] = 1
    return body


@dataclass(frozen=True)
class Reply:
    """What a client saw, by choice."""

    texts: tuple[str, ...]
    reasons: tuple[str | None, ...]
    num_logprobs: tuple[int, ...] = ()
    error: str | None = None


class Storm:
    """`count` requests at once, against one server after another. `progress` counts requests that
    were sent and characters that were streamed, which for given requests come to the same sum
    however they are cut into events."""

    def __init__(self, count: int, steps: int) -> None:
        self.bodies = [body_of(number, steps) for number in range(count)]
        self.progress = 0
        self._moment = 0
        self._strike: Callable[[], object] | None = None

    def __call__(self, server: RunningServer, moment: int = 0, strike: Callable[[], object] | None = None) -> list[Reply]:
        """All replies, in order. `strike` is called when the progress comes to `moment`."""

        async def run() -> list[Reply]:
            url = httpx.URL(server.url)
            return list(await asyncio.gather(*(self._ask(url.host, url.port or 0, body) for body in self.bodies)))

        self.progress, self._moment, self._strike = 0, moment, strike
        replies = asyncio.run(run())
        assert self._strike is None, "the storm was over before the strike"
        return replies

    def _count(self, amount: int) -> None:
        self.progress += amount
        strike = self._strike
        if strike is not None and self.progress >= self._moment:
            self._strike = None
            strike()

    async def _ask(self, host: str, port: int, body: dict[str, Any]) -> Reply:
        reader, writer = await asyncio.open_connection(host, port, limit=2**24)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        self._count(1)
        chunks: list[dict[str, Any]] = []
        plain = bytearray()
        try:
            while line := await reader.readline():
                plain += line
                if line.startswith(b"data: {"):
                    chunks.append(json.loads(line[6:]))
                    self._count(sum(len(choice["text"]) for choice in chunks[-1].get("choices", ())))
        finally:
            writer.close()
        if not body["stream"]:
            chunks = [json.loads(plain.partition(b"\r\n\r\n")[2])]
        return _joined(chunks, body["n"])


def _joined(chunks: list[dict[str, Any]], count: int) -> Reply:
    texts, logprobs = [""] * count, [0] * count
    reasons: list[str | None] = [None] * count
    for chunk in chunks:
        if "error" in chunk:
            return Reply((), (), error=chunk["error"]["message"])
        for choice in chunk["choices"]:
            index = choice["index"]
            texts[index] += choice["text"]
            logprobs[index] += len((choice.get("logprobs") or {}).get("tokens", ()))
            reasons[index] = choice["finish_reason"] or reasons[index]
    return Reply(tuple(texts), tuple(reasons), tuple(logprobs))


def processes(server: RunningServer) -> dict[str, psutil.Process]:
    """The server's children by role, and number where there are several."""
    found = {}
    for child in list_children(server.process.pid):
        with_rank = child.cmdline()
        role = with_rank[4]
        rank = with_rank[with_rank.index("--rank") + 1] if "--rank" in with_rank else ""
        found[role + (f"-{rank}" if rank else "")] = child
    return found


def restarts(server: RunningServer) -> float:
    """Restarts of all processes so far."""
    return server.metric("frame_engine_restarts_total")


def strikes(seed: int, names: list[str]) -> Iterator[tuple[str, signal.Signals, float]]:
    """An endless row of (process, signal, moment as a share of the whole progress)."""
    r = random.Random(seed)
    while True:
        for name in r.sample(names, len(names)):
            yield name, r.choice((signal.SIGKILL, signal.SIGSTOP)), r.random() * 0.9

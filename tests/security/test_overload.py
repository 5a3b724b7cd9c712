"""Ten times the capacity: accepted requests meet their deadline, the rest is refused at once,
memory is bounded.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
from collections import Counter, deque
from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from frame.entrypoints.http import request_starter
from frame.entrypoints.http.native import generate
from tests.entrypoints.inprocess import InProcess, serving
from tests.entrypoints.serving import RunningServer

STEP = 0.01  # seconds
TOKENS = 20
PLACES = 8
CAPACITY = PLACES / (STEP * TOKENS)  # requests a second
DEADLINE = 20.0  # seconds; the timeout of each request


@dataclass(slots=True)
class Load:
    """The results of the requests. Times are in seconds."""

    statuses: Counter[int] = field(default_factory=Counter)
    accepted: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


async def overload(url: str, rate: float, seconds: float) -> Load:
    """Send `rate` requests a second, each on its own connection, without waiting for earlier
    ones."""
    parts = urlsplit(url)
    body = json.dumps(
        {"input_ids": [5, 6, 7], "timeout": DEADLINE, "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}}
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    idle: deque[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = deque()
    load = Load()

    async def one() -> None:
        reader, writer = idle.popleft() if idle else await asyncio.open_connection(parts.hostname, parts.port)
        started = time.perf_counter()
        writer.write(head + body)
        reply = await reader.readuntil(b"\r\n\r\n")
        length = int(reply.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        content = await reader.readexactly(length)
        took = time.perf_counter() - started
        status = int(reply.split()[1])
        load.statuses[status] += 1
        if status == 200:
            load.accepted.append(took)
            if len(json.loads(content)["output_ids"]) != TOKENS:
                load.wrong.append(content.decode())
        else:
            load.refused.append(took)
            if status != 503 or b"retry-after" not in reply.lower() or b"queue_full" not in content:
                load.wrong.append(f"{reply!r} {content!r}")
        idle.append((reader, writer))

    tasks: set[asyncio.Task[None]] = set()
    begun = time.perf_counter()
    count = int(rate * seconds)
    for number in range(count):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for _, writer in idle:
        writer.close()
    assert sum(load.statuses.values()) == count
    return load


def memory_of(server: RunningServer) -> int:
    """Bytes of all processes of the server."""
    main = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in (main, *main.children(recursive=True)))


def under_load(folder: Path, times: float, seconds: float) -> tuple[Load, int]:
    """(results, bytes by which the memory of the server grew after the first fifth)."""
    flags = ("--max-running-requests", str(PLACES), "--max-queued-requests", str(PLACES), "--max-model-len", "512")
    environment = {"FRAME_FAKE_STEP": str(STEP), "FRAME_FAKE_PLAIN": "1"}
    with RunningServer(folder, *flags, "--max-total-tokens", "4096", "--skip-tokenizer-init", env=environment) as server:
        asyncio.run(overload(server.url, times * CAPACITY, seconds / 5))
        before = memory_of(server)
        load = asyncio.run(overload(server.url, times * CAPACITY, seconds))
        grown = memory_of(server) - before
        assert server.get("/health") == {}
        assert server.post("/check_integrity", {}).json()["success"]
        assert server.get("/server_info")["outstanding"] == 0
    assert load.wrong == []
    return load, grown


@pytest.mark.slow
def test_ten_times_capacity(tmp_path: Path) -> None:
    load, grown = under_load(_folder(), 10, 3)
    assert set(load.statuses) == {200, 503}
    assert load.statuses[503] > load.statuses[200]  # far more than the queue holds
    assert max(load.accepted) < DEADLINE
    assert statistics.median(load.refused) < statistics.median(load.accepted)
    assert grown < 64 << 20


@pytest.mark.soak
def test_ten_times_capacity_for_long() -> None:
    load, grown = under_load(_folder(), 10, 300)
    shown = {name: [round(1000 * q) for q in statistics.quantiles(times, n=100)[49::49]] for name, times in
             (("accepted", load.accepted), ("refused", load.refused))}  # fmt: skip
    print(f"{dict(load.statuses)}; median and 99th percentile in ms: {shown}; memory {grown / 2**20:+.1f} MiB")
    assert set(load.statuses) == {200, 503}
    assert max(load.accepted) < DEADLINE
    assert grown < 64 << 20


def _folder() -> Path:
    from frame.checkpoint.model_config import find_model

    return Path(find_model("frame-tiny"))


# leaks --------------------------------------------------------------------------------------------


def sizes() -> Counter[str]:
    """Lengths of all collections that are attributes of `frame` objects, by class and attribute."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if not str(kind.__module__).startswith("frame."):
            continue
        found[f"{kind.__module__}.{kind.__qualname__}"] += 1
        names = [*getattr(thing, "__dict__", ()), *(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))]
        for name in names:
            value = getattr(thing, name, None)
            if isinstance(value, dict | list | set | deque) and isinstance(value, Sized):
                found[f"{kind.__module__}.{kind.__qualname__}.{name}"] += len(value)
    return found


async def many(server: InProcess, count: int, start: int) -> None:
    """Send short requests: streamed and whole, timed out, refused, with several sequences."""

    async def one(number: int) -> None:
        body: dict[str, Any] = {"input_ids": [3 + number % 97, 4 + number % 89], "sampling_params": {"max_new_tokens": 1 + number % 3}}
        kind = number % 10
        if kind == 1:
            body["stream"] = True
        elif kind == 2:
            body["timeout"] = 1e-9
        elif kind == 3:
            body["sampling_params"]["temperature"] = -1
        elif kind == 4:
            body["sampling_params"]["n"] = 2
        elif kind == 5:
            body["sampling_params"]["stop"] = ["e"]
        reply = await server.post("/generate", body)
        assert reply.status in ((504, 200) if kind == 2 else (400,) if kind == 3 else (200,)), reply.body

    for first in range(start, start + count, 16):
        await asyncio.gather(*(one(number) for number in range(first, min(first + 16, start + count))))
    loggers = server.services.client.stats.loggers
    assert loggers is not None and loggers.render_metrics() is not None  # counts the values that it has kept
    assert server.services.history is not None
    server.services.history.take_sample(0.0)  # so does the page's history, each few seconds


async def grows(warm: int, count: int) -> dict[str, int]:
    """Collections that grew by a tenth of `count` or more during `count` further requests."""
    async with serving() as server:
        await many(server, warm, 0)
        before = sizes()
        memory = psutil.Process().memory_info().rss
        await many(server, count, warm)
        after = sizes()
        grown = psutil.Process().memory_info().rss - memory
        assert server.services.client.num_outstanding == 0
        assert (await server.services.client.send_command("check_integrity")).ok
        print(f"{count} requests after {warm}: memory {grown / 2**20:+.1f} MiB")
        assert grown < 64 << 20
    return {name: size - before[name] for name, size in after.items() if size - before[name] > count // 10}


@pytest.mark.parametrize(("body", "entries"), [
    ({"logprobs": 3, "max_tokens": 400, "n": 2}, 3200),
    ({"prompt_logprobs": 3, "max_tokens": 400}, 160),
])  # fmt: skip
async def test_log_probabilities_of_a_whole_response_are_bounded(
    body: dict[str, Any], entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request of 4 MiB could ask for 40 million of them."""
    body = {"prompt": [5] * 40, "ignore_eos": True, **body}
    async with serving() as server:
        monkeypatch.setattr(request_starter, "MAX_LOGPROBS_HELD", entries // 2)
        reply = await server.post("/v1/completions", body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, "logprobs"), reply.body[:300]
        async with asyncio.timeout(10):
            while server.services.client.num_outstanding:  # noqa: ASYNC110 - it is aborted
                await asyncio.sleep(0.01)
        monkeypatch.setattr(request_starter, "MAX_LOGPROBS_HELD", entries)
        assert (await server.post("/v1/completions", body)).status == 200


async def test_streams_do_not_repeat_log_probabilities_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"max_new_tokens": 60, "ignore_eos": True}
    body = {"input_ids": [5] * 4, "stream": True, "return_logprob": True, "top_logprobs_num": 3, "sampling_params": sampling}
    async with serving() as server:
        monkeypatch.setattr(generate, "MAX_REPEATED_LOGPROBS", 100)
        reply = await server.post("/generate", body)
        last = json.loads(reply.body.split(b"\n\n")[-3].removeprefix(b"data: "))
        assert (last["error"]["code"], "leave stream out" in last["error"]["message"]) == (400, True)
        monkeypatch.setattr(generate, "MAX_REPEATED_LOGPROBS", 1000)
        assert b'data: {"error"' not in (await server.post("/generate", body)).body


async def test_no_collection_grows() -> None:
    assert await grows(600, 600) == {}


@pytest.mark.soak
async def test_no_collection_grows_in_100_000_requests() -> None:
    assert await grows(2000, 100_000) == {}


async def test_one_request_with_many_sequences_lets_a_later_one_in() -> None:
    """Without keys, and so with one tenant: each running sequence ends before the next begins."""
    async with serving({"scheduler": {"max_running_requests": 1, "max_queued_requests": 40}}) as server:

        def ask(n: int) -> asyncio.Task[Any]:
            body = {"prompt": [5, 6, 7], "n": n, "max_tokens": TOKENS, "ignore_eos": True}
            return asyncio.create_task(server.post("/v1/completions", body))

        many = ask(24)
        while server.services.client.num_sequences < 24:  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.005)
        reply = await ask(1)
        assert reply.status == 200
        assert not many.done()
        assert len((await many).json()["choices"]) == 24

"""A tenant beside a hostile one: its latency and throughput, and the privacy of its data.

The hostile tenant can neither read, abort nor detect the requests of the other one.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.serving import RunningServer, wait_until

MODEST, HOSTILE = "sk-modest", "sk-hostile"
STEP = 0.1  # seconds; long against CPU time, so that times count steps
STREAMS = 4  # of the modest tenant
TOKENS = 5  # of each of its responses
CONNECTIONS = 64


@dataclass(slots=True)
class Service:
    """What the modest tenant received: seconds to each first token, tokens, seconds in all, failed
    requests.
    """

    firsts: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def first(self) -> float:
        return statistics.median(self.firsts)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def modest(url: str, seconds: float, streams: int = STREAMS) -> Service:
    """Send `streams` requests at a time, each for `TOKENS` tokens."""
    got, until, started = Service(), time.perf_counter() + seconds, time.perf_counter()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        while time.perf_counter() < until:
            number += streams
            body = {
                "prompt": [10 + (number * 7 + i * 13) % 290 for i in range(40)],
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "stream": True,
            }
            asked, first = time.perf_counter(), 0.0
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    got.wrong.append((await reply.aread()).decode()[:300])
                    continue
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        first = first or time.perf_counter() - asked
                        got.wrong += [line] if "error" in line else []
            got.firsts.append(first)
            got.tokens += TOKENS

    headers = {"authorization": f"Bearer {MODEST}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
        await asyncio.gather(*(one(client, number) for number in range(streams)))
    got.seconds = time.perf_counter() - started
    return got


@contextmanager
def attacked(url: str) -> Iterator[list[str]]:
    """Runs the hostile tenant in its own process meanwhile; its output is in the list at the
    end."""
    command = [sys.executable, str(Path(__file__).with_name("hostile.py")), url, HOSTILE, str(CONNECTIONS), "7"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    printed: list[str] = []
    try:
        assert process.stdout is not None
        printed.append(process.stdout.readline())
        yield printed
    finally:
        process.terminate()
        printed += process.communicate()[0].splitlines()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "keys").write_text(f"{MODEST}\n{HOSTILE}\n")
    model = make_checkpoint("LlamaForCausalLM", folder / "model")
    flags = ("--api-keys", str(folder / "keys"), "--batch-folder", str(folder / "batches"), "--max-running-requests", "32",
             "--chunked-prefill-size", "512", "--admin-key", "sk-admin", "--max-model-len", "3000")  # fmt: skip
    with RunningServer(model, *flags, env={"FRAME_FAKE_STEP": str(STEP), "FRAME_FAKE_PLAIN": "1"}) as running:
        yield running


def compare(server: RunningServer, seconds: float) -> tuple[Service, Service, list[str]]:
    """The modest tenant alone, and beside the hostile one."""
    alone = asyncio.run(modest(server.url, min(seconds, 10.0)))
    with attacked(server.url) as printed:
        time.sleep(1.0)  # until the hostile tenant has filled the queue
        beside = asyncio.run(modest(server.url, seconds))
    shown = f"alone {alone.first * 1e3:.0f} ms, {alone.rate:.0f} tokens/s; beside {beside.first * 1e3:.0f} ms, {beside.rate:.0f} tokens/s"
    print(shown, printed[-1:])
    assert not alone.wrong and not beside.wrong, beside.wrong[:3]
    return alone, beside, printed


@pytest.mark.slow
def test_hostile_tenant_gets_at_most_its_share(server: RunningServer) -> None:
    """The best of three short rounds, within wide bounds, because the machine may be busy.

    Without fair queueing the modest tenant would get no token in any round.
    """
    modest_things = store_objects(server)
    for _ in range(3):
        alone, beside, _ = compare(server, 3.0)
        if is_fair := beside.first <= 5.0 * alone.first and beside.rate >= 0.3 * alone.rate:
            break
    assert is_fair, (beside.first, alone.first, beside.rate, alone.rate)
    check_objects(server, modest_things)


@pytest.mark.soak
def test_hostile_tenant_for_two_minutes(server: RunningServer) -> None:
    modest_things = store_objects(server)
    alone, beside, _ = compare(server, 120.0)
    assert beside.first <= 2.0 * alone.first
    assert beside.rate >= 0.6 * alone.rate
    check_objects(server, modest_things)


PREFIX = [11 + i * 17 % 280 for i in range(1600)]  # four steps of 512 tokens


def ask(server: RunningServer, method: str, path: str, key: str, **more: Any) -> httpx.Response:
    return httpx.request(method, server.url + path, headers={"authorization": f"Bearer {key}"}, timeout=60, **more)


def first_token(server: RunningServer, key: str, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens of the prompt were cached."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    asked = time.perf_counter()
    reply = ask(server, "POST", "/v1/completions", key, json=body).json()
    return time.perf_counter() - asked, (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def store_objects(server: RunningServer) -> dict[str, str]:
    """Store a file, a batch, a response and a cached prefix for the modest tenant; returns their
    paths.
    """
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}})
    file = ask(server, "POST", "/v1/files", MODEST, files={"file": ("a", line.encode())}, data={"purpose": "batch"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    made = ask(server, "POST", "/v1/batches", MODEST, json=batch).json()["id"]
    response = ask(server, "POST", "/v1/responses", MODEST, json={"input": "a", "max_output_tokens": 1}).json()["id"]
    first_token(server, MODEST, PREFIX)
    return {"file": f"/v1/files/{file}", "batch": f"/v1/batches/{made}", "response": f"/v1/responses/{response}"}


def check_objects(server: RunningServer, things: dict[str, str]) -> None:
    """Check that only the owner can use the stored objects, and that all are there."""
    for path in things.values():
        assert ask(server, "GET", path, MODEST).status_code == 200, path
        assert ask(server, "GET", path, HOSTILE).status_code == 404, path
    assert first_token(server, MODEST, PREFIX)[1] > 0, "a cached prefix was evicted"
    for path, method in ((f"{things['file']}/content", "GET"), (f"{things['batch']}/cancel", "POST"), (things["response"], "DELETE"),
                         (things["file"], "DELETE")):  # fmt: skip
        assert ask(server, method, path, HOSTILE).status_code == 404, path
    batch = {"input_file_id": things["file"].rpartition("/")[2], "endpoint": "/v1/completions", "completion_window": "24h"}
    assert ask(server, "POST", "/v1/batches", HOSTILE, json=batch).status_code == 404
    continued = {"input": "a", "previous_response_id": things["response"].rpartition("/")[2]}
    assert ask(server, "POST", "/v1/responses", HOSTILE, json=continued).status_code in (400, 404)
    check_aborts(server)
    for path, method in (("/flush_cache", "POST"), ("/server_info", "GET")):
        assert ask(server, method, path, HOSTILE).status_code in (401, 403), path
    for listed in ("/v1/files", "/v1/batches"):
        assert not set(ask(server, "GET", listed, HOSTILE).text.split('"')) & {path.rpartition("/")[2] for path in things.values()}


def check_aborts(server: RunningServer) -> None:
    """Check that another key cannot abort a request."""
    with ThreadPoolExecutor(1) as pool:
        body = {"input_ids": [5, 6, 7], "rid": "modest", "sampling_params": {"max_new_tokens": 10, "ignore_eos": True}}
        running = pool.submit(ask, server, "POST", "/generate", MODEST, json=body)
        wait_until(lambda: running.done() or ask(server, "GET", "/server_info", "sk-admin").json()["outstanding"] > 0)
        assert ask(server, "POST", "/abort_request", HOSTILE, json={"rid": "modest"}).status_code == 404
        ask(server, "POST", "/abort_request", HOSTILE, json={"abort_all": True})
        assert running.result().json()["meta_info"]["completion_tokens"] == 10


def test_prompts_of_another_tenant_cannot_be_detected(server: RunningServer) -> None:
    """Neither the count of cached tokens nor the time to the first token reveals them, with any
    salt.
    """
    prompts = [[11 + (i * 17 + 29 * number) % 280 for i in range(1600)] for number in range(1, 6)]
    fresh, repeated, spied = [], [], []
    for number, prompt in enumerate(prompts):
        fresh.append(first_token(server, MODEST, prompt))
        repeated.append(first_token(server, MODEST, prompt))
        spied.append(first_token(server, HOSTILE, prompt))
        salt = {"prompt": [*prompt[:-1], 12 + number], "max_tokens": 1, "cache_salt": f"{number}"}
        reply = ask(server, "POST", "/v1/completions", HOSTILE, json=salt).json()
        assert not (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    assert {cached for _, cached in fresh + spied} == {0}
    assert min(cached for _, cached in repeated) > 1000

    def median(times: list[tuple[float, int]]) -> float:
        return statistics.median(seconds for seconds, _ in times)

    assert median(repeated) < 0.75 * median(fresh)  # the measurement detects a cached prompt
    assert median(spied) > 0.75 * median(fresh)

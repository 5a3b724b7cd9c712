"""Pauses, sleeps and updates of a server under streams: none is lost, and each says which weights
made it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from frame import Engine, SamplingParams
from tests.entrypoints.serving import RunningRouter, RunningServer, list_children, open_engines, wait_until

KEYS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_total_tokens": 16384, "threads": 1, "page_size": 4}
FLAGS = ("--dtype", "float32", "--max-model-len", "256", "--max-total-tokens", "16384", "--page-size", "4", "--sleep-mode", "wait")
NUM_STREAMS, NUM_TOKENS = 8, 200
PROMPTS = [[7 + index, *range(20, 36), 40 + index] for index in range(NUM_STREAMS)]
Result = tuple[list[int], dict[str, Any]]  # tokens, meta_info


@pytest.fixture(scope="module")
def fresh(folders: list[Path]) -> Iterator[list[Engine]]:
    with open_engines(folders, **KEYS) as engines:
        yield engines


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[RunningServer]:
    with RunningServer(folders[0], *FLAGS, fake=False) as running:
        yield running


def params_of(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}


def continue_in(engine: Engine, prompts: list[list[int]], counts: list[int]) -> list[list[int]]:
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in counts]
    return [output.token_ids for output in engine.generate(prompts, params)]


def stream_through(url: str, act: Callable[[httpx.AsyncClient], Awaitable[None]], min_tokens: int = 4) -> list[Result]:
    """Run all streams, and `act` once each has some tokens."""

    async def run() -> list[Result]:
        started = [asyncio.Event() for _ in PROMPTS]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

            async def stream(index: int) -> Result:
                body = {"input_ids": PROMPTS[index], "stream": True, "sampling_params": params_of(NUM_TOKENS)}
                last: dict[str, Any] = {}
                async with client.stream("POST", "/generate", json=body) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            last = json.loads(line.removeprefix("data: "))
                            if len(last["output_ids"]) >= min_tokens:
                                started[index].set()
                return last["output_ids"], last["meta_info"]

            streams = [asyncio.ensure_future(stream(index)) for index in range(NUM_STREAMS)]
            for event in started:
                await event.wait()
            await act(client)
            return list(await asyncio.gather(*streams))

    return asyncio.run(run())


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    response = await client.post(path, json=body or {})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def use(server: RunningServer, folder: Path, version: str) -> None:
    reply = server.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": version})
    assert reply.status_code == 200, reply.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_streams_go_on_over_a_pause_with_an_update(server: RunningServer, fresh: list[Engine], folders: list[Path], mode: str) -> None:
    """No stream is lost, and each names the first token of the new weights. Computed anew, a stream
    is that of a fresh engine after the prompt and the tokens of the old weights."""
    old, new = f"old-{mode}", f"new-{mode}"
    use(server, folders[0], old)

    async def act(client: httpx.AsyncClient) -> None:
        paused = await post(client, "/pause_generation", {"mode": mode})
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        body = {"model_path": str(folders[1]), "weight_version": new}
        updated = await post(client, "/update_weights_from_disk", body)
        assert updated["num_paused_requests"] == 0 and (paused["num_preempted"] == 0) == (mode == "in_place")
        await post(client, "/continue_generation")

    results = stream_through(server.url, act)
    plain = continue_in(fresh[0], PROMPTS, [NUM_TOKENS] * NUM_STREAMS)
    firsts = []
    for (tokens, meta), expected in zip(results, plain, strict=True):
        assert len(tokens) == NUM_TOKENS and meta["finish_reason"]["type"] == "length"
        assert meta["weight_version"] == new
        (_, second) = meta["weight_versions"]
        assert meta["weight_versions"][0] == {"first_token": 0, "version": old} and second["version"] == new
        first = second["first_token"]
        assert 4 <= first < NUM_TOKENS and tokens[:first] == expected[:first]
        firsts.append(first)
    if mode == "retract":
        starts = [prompt + tokens[:first] for prompt, (tokens, _), first in zip(PROMPTS, results, firsts, strict=True)]
        rest = continue_in(fresh[1], starts, [NUM_TOKENS - first for first in firsts])
        assert [tokens[first:] for (tokens, _), first in zip(results, firsts, strict=True)] == rest
    assert server.post("/check_integrity", {}).status_code == 200
    assert server.get("/server_info")["used_pages"] == 0


@pytest.mark.slow
def test_a_repeated_prompt_over_six_versions(server: RunningServer, fresh: list[Engine], folders: list[Path]) -> None:
    """Every response is that of its weights, while a stream of older weights holds the prefix."""
    expected = [continue_in(engine, PROMPTS[:1], [8])[0] for engine in fresh]
    assert expected[0] != expected[1]
    body = {"input_ids": PROMPTS[0], "sampling_params": params_of(8)}
    long = {"input_ids": PROMPTS[0], "stream": True, "sampling_params": params_of(200)}
    for number in range(6):
        with httpx.stream("POST", server.url + "/generate", json=long, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert server.post("/pause_generation", {"mode": "in_place"}).status_code == 200
            use(server, folders[number % 2], f"step-{number}")
            assert server.post("/continue_generation", {}).status_code == 200
            reply = server.post("/generate", body).json()
            assert (reply["output_ids"], reply["meta_info"]["weight_version"]) == (expected[number % 2], f"step-{number}")
        chat = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert server.post("/v1/completions", chat).json()["metadata"] == {"weight_version": f"step-{number}"}
        with httpx.stream("POST", server.url + "/v1/completions", json={**chat, "stream": True}, timeout=60) as stream:
            *_, last, _ = [line for line in stream.iter_lines() if line]
        assert json.loads(last.removeprefix("data: "))["metadata"] == {"weight_version": f"step-{number}"}
    assert f'weight_version="step-5"' in httpx.get(server.url + "/metrics", timeout=30).text  # noqa: F541


def engine_memory(server: RunningServer) -> float:
    """Resident MiB of the engine's process."""
    return float(server.children()["scheduler"].memory_info().rss / 2**20)


@pytest.mark.slow
def test_sleeps_release_memory_and_change_no_token(server: RunningServer, fresh: list[Engine], folders: list[Path]) -> None:
    use(server, folders[0], "before")
    plain = continue_in(fresh[0], PROMPTS, [NUM_TOKENS] * NUM_STREAMS)
    for level, path in ((1, "/sleep?level=1&mode=keep"), (2, "/sleep?level=2&mode=keep")):
        memory: list[float] = []
        prompts = [[5 + (number + place) % 90 for place in range(200)] for number in range(60)]  # their pages stay in the prefix cache
        assert server.post("/generate", {"input_ids": prompts, "sampling_params": params_of(1)}).status_code == 200

        async def act(client: httpx.AsyncClient, level: int = level, path: str = path, memory: list[float] = memory) -> None:
            memory.append(engine_memory(server))
            assert (await post(client, path))["released"] == ["weights", "kv_cache"]
            memory.append(engine_memory(server))
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await client.get("/health/live")).status_code == 200
            health = await client.get("/health")
            assert health.status_code == 503 and "sleeps" in health.text and "retry-after" in health.headers
            refused = await client.post("/update_weights_from_disk", json={"model_path": str(folders[0])})
            assert refused.status_code == 409 and "wake the engine first" in refused.text
            assert (await client.post("/sleep")).status_code == 409
            woken = await post(client, "/wake_up")
            assert woken["needs_weights"] == (level == 2)
            if level == 2:
                asked = await client.post("/generate", json={"input_ids": PROMPTS[0], "sampling_params": params_of(1)})
                assert asked.status_code == 503 and "update them" in asked.text and "retry-after" in asked.headers
                await post(client, "/update_weights_from_disk", {"model_path": str(folders[0]), "weight_version": "before"})
            assert (await client.post("/wake_up")).status_code == 409

        results = stream_through(server.url, act)
        assert [tokens for tokens, _ in results] == plain
        assert memory[0] - memory[1] > 1.0, "the pages of the KV cache are returned"
    assert server.post("/check_integrity", {}).status_code == 200


@pytest.mark.slow
def test_a_killed_engine_comes_back_paused_or_asleep(server: RunningServer, fresh: list[Engine], folders: list[Path]) -> None:
    use(server, folders[1], "killed")
    plain = continue_in(fresh[1], PROMPTS, [NUM_TOKENS] * NUM_STREAMS)
    states = (
        ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
        ("/release_memory_occupation", {}, "/resume_memory_occupation"),
    )
    for number, (stop, body, start) in enumerate(states):

        async def act(client: httpx.AsyncClient, number: int = number, stop: str = stop, body: Any = body, start: str = start) -> None:
            await post(client, stop, body)
            before = sum("engine ready again" in line for line in server.lines)
            server.children()["scheduler"].kill()
            await asyncio.to_thread(wait_until, lambda: sum("engine ready again" in line for line in server.lines) > before, 60)
            expected = (True, []) if number == 0 else (False, ["weights", "kv_cache"])
            for _ in range(300):  # the new engine stops between two steps
                info = (await client.get("/server_info")).json()
                if (info["paused"], info["released"]) == expected:
                    break
                await asyncio.sleep(0.1)
            assert (info["paused"], info["released"]) == expected
            assert info["running"] == 0 and info["weight_version"] == "killed"
            await post(client, start)

        assert [tokens for tokens, _ in stream_through(server.url, act)] == plain


@pytest.mark.slow
def test_a_server_without_sleep_says_so(folders: list[Path]) -> None:
    with RunningServer(folders[0], *FLAGS[:-2], fake=False) as other:
        refused = other.post("/sleep", {})
        assert refused.status_code == 409 and "--sleep-mode wait" in refused.text
        wrong = other.post("/pause_generation", {"mode": "later"})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "mode"


@pytest.mark.slow
def test_a_router_wakes_servers_that_sleep(folders: list[Path]) -> None:
    with (
        RunningServer(folders[0], *FLAGS, fake=False) as first,
        RunningServer(folders[0], *FLAGS, fake=False) as second,
        RunningRouter(first.url, second.url) as router,
    ):
        assert router.post("/sleep", {}).status_code == 200
        wait_until(lambda: httpx.get(router.url + "/health", timeout=30).status_code == 503)
        assert [each.get("/is_sleeping")["is_sleeping"] for each in (first, second)] == [True, True]
        assert router.post("/wake_up", {}).status_code == 200
        wait_until(lambda: httpx.get(router.url + "/health", timeout=30).status_code == 200)
        reply = router.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": params_of(2)})
        assert len(reply.json()["output_ids"]) == 2


# replicas -----------------------------------------------------------------------------------------


def engines(server: RunningServer) -> dict[str, psutil.Process]:
    """By number of the replica."""
    found = {}
    for child in list_children(server.process.pid):
        line = child.cmdline()
        if "scheduler" in line and "--replica" in line:
            found[line[line.index("--replica") + 1]] = child
    return found


@pytest.mark.soak
def test_replicas_change_together(fresh: list[Engine], folders: list[Path]) -> None:
    """An update of two replicas, and one that is killed in each phase: no token of old weights
    comes after one of the new."""
    with RunningServer(folders[0], *FLAGS, "--dp", "2", fake=False) as server:
        expected = [continue_in(engine, PROMPTS[:1], [8])[0] for engine in fresh]
        bad = server.post("/update_weights_from_disk", {"model_path": str(folders[0] / "config.json")})
        assert bad.status_code == 400

        def check(version: str, index: int) -> None:
            for _ in range(4):  # both replicas
                reply = server.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": params_of(8)}).json()
                assert (reply["output_ids"], reply["meta_info"]["weight_version"]) == (expected[index], version)

        async def act(client: httpx.AsyncClient) -> None:
            await post(client, "/update_weights_from_disk", {"model_path": str(folders[1]), "weight_version": "both"})

        results = stream_through(server.url, act, 1)
        assert all(len(tokens) == NUM_TOKENS and meta["weight_version"] == "both" for tokens, meta in results)
        check("both", 1)
        statuses: list[int] = []
        for delay in (0.0, 0.1, 0.2, 0.4):

            async def strike(client: httpx.AsyncClient, delay: float = delay) -> None:
                body = {"model_path": str(folders[0]), "weight_version": f"killed-{delay}"}
                update = asyncio.ensure_future(client.post("/update_weights_from_disk", json=body))
                await asyncio.sleep(delay)
                engines(server)["1"].kill()
                statuses.append((await update).status_code)

            results = stream_through(server.url, strike, 1)
            served = server.get("/get_weight_version")["weight_version"]
            wait_until(lambda: len(server.get("/server_info")["replicas"]) == 2, 60)
            assert {each["weight_version"] for each in server.get("/server_info")["replicas"]} == {served}
            assert all(len(tokens) == NUM_TOKENS for tokens, _ in results)
            assert (statuses[-1], served) in ((200, f"killed-{delay}"), (503, "both"))
            check(served, 0 if statuses[-1] == 200 else 1)
            use(server, folders[1], "both")

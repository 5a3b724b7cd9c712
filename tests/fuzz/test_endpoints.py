"""Random requests to every route: each is answered, none by a failure of the server, and none with
what is the server's own."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from frame.entrypoints.http.app import App
from frame.entrypoints.http.extensions import CORE_ROUTES
from frame.entrypoints.http.protocol.api_route import Access
from tests.entrypoints.inprocess import JSON_TYPE, InProcess, Response, serving
from tests.entrypoints.published import ROUTES
from tests.fuzz.mutations import TEXTS, dumped, mutated, spoiled
from tests.fuzz.requests import BODIES

AT_ONCE = 8
FIRST, ROUNDS = int(os.environ.get("FRAME_FUZZ_FIRST", "2")), int(os.environ.get("FRAME_FUZZ_ROUNDS", "50"))  # 20,000 each
HEADERS = (b"authorization", b"content-type", b"x-request-timeout", b"x-request-id", b"content-length", b"accept", b"traceparent")
METHODS = ("POST", "GET", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH", "X")
POSTED = {operation.path for operation in ROUTES if "POST" in operation.methods and operation.access is Access.ADMIN}
STOPPING = {"/pause_generation", "/pause"}  # does what it says: nothing after it would be answered
PATHS = [operation.path for operation in ROUTES if operation.path not in STOPPING]
PATHS += [*BODIES, *BODIES]  # routes with a body are worth more tries
OPERATORS = [operation.path for operation in CORE_ROUTES]  # of the listener for operators, which still answers after a pause
ADMIN_KEY = b"the-key-of-operators"


def path_of(rng: random.Random, paths: Sequence[str]) -> str:
    path = rng.choice(paths)
    while "{" in path:
        before, _, rest = path.partition("{")
        path = before + rng.choice(("x", "frame-tiny", "resp_1", "%2e%2e", "..", "a" * 300, "é")) + rest.partition("}")[2]
    if rng.random() < 0.05:
        path += rng.choice(("/", "/x", "?a=b&&=", "?" + "a" * 5000, "%00", ";x", "?starting_after=x&limit=-1"))
    return path


def body_of(rng: random.Random, path: str) -> bytes:
    given: Any = rng.choice(BODIES.get(path.partition("?")[0], [{}]))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        given = mutated(rng, given)
    data = dumped(rng, given)
    return spoiled(rng, data) if rng.random() < 0.2 else data


def headers_of(rng: random.Random) -> list[tuple[bytes, bytes]]:
    headers = [JSON_TYPE]
    while rng.random() < 0.2:
        text = rng.choice(TEXTS).encode("utf-8", "surrogatepass")[:200]
        headers.append((rng.choice(HEADERS), rng.choice((text, rng.randbytes(8), b"1", b"Bearer x", b"-1"))))
    return headers


def check(path: str, body: bytes, response: Response, secrets: list[bytes]) -> None:
    what = f"{path} {body[:2000]!r} -> {response.status} {response.body[:1000]!r}"
    assert 200 <= response.status < 500 or response.status in (503, 504), what
    if response.status >= 400:
        found = msgspec.json.decode(response.body)
        error = found.get("error")
        if isinstance(error, dict):
            assert error["type"], what
        # else Ollama's shape, text-embeddings-inference's, or Cohere's
        sentence = error["message"] if isinstance(error, dict) else error or found["message"]
        assert sentence and "Traceback" not in sentence and "object at" not in sentence, what
    elif response.headers.get("content-type", "").startswith("application/json"):
        msgspec.json.decode(response.body)
    for secret in secrets:
        assert secret not in response.body, what


def method_of(rng: random.Random, path: str) -> str:
    if rng.random() < 0.1:
        return rng.choice(METHODS)
    path = path.partition("?")[0]
    return "POST" if path in BODIES or (path in POSTED and rng.random() < 0.5) else "GET"


async def attack(server: InProcess, seed: int, count: int, paths: Sequence[str] = PATHS, key: bytes = b"") -> dict[int, int]:
    """Send `count` requests to such paths, some at once, most with the key where there is one. ->
    answers by status."""
    found: dict[int, int] = {}
    root = server.services.resolved.model_path
    secrets = [root.encode(), str(Path(root).parent).encode(), *filter(None, [key])]

    async def one(number: int) -> None:
        rng = random.Random(f"{seed}-{number}")
        path = path_of(rng, paths)
        method = method_of(rng, path)
        body, headers = body_of(rng, path), headers_of(rng)
        if key and rng.random() < 0.9:
            headers.insert(0, (b"x-api-key", key))
        try:
            response = await server.request(method, path, body, headers)
        except Exception as error:
            raise AssertionError(f"request {seed}-{number}: {method} {path} {body[:2000]!r}") from error
        check(f"request {seed}-{number}: {method} {path}", body, response, secrets)
        found[response.status] = found.get(response.status, 0) + 1

    for start in range(0, count, AT_ONCE):
        await asyncio.gather(*(one(number) for number in range(start, min(start + AT_ONCE, count))))
    return found


async def is_well(server: InProcess) -> None:
    """What must hold after any attack: answers come, nothing is left."""
    response = await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})
    assert response.status == 200
    assert server.services.client.dead_reason is None
    assert server.services.client.num_outstanding == 0
    reply = await server.services.client.send_command("check_integrity")
    assert reply.ok, reply.error


@pytest.mark.slow
async def test_every_endpoint() -> None:
    async with serving() as server:
        found = await attack(server, 1, 1500)
        await is_well(server)
    assert found.get(200, 0) > 50 and found.get(400, 0) > 200, found  # both what is right and what is wrong was reached


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
async def test_every_endpoint_for_long(seed: int) -> None:
    async with serving() as server:
        print(seed, await attack(server, seed, 20_000))
        await is_well(server)


async def attack_operators(seed: int, count: int) -> dict[int, int]:
    async with serving({"server": {"admin_key": ADMIN_KEY.decode()}}) as server:
        public, server.app = server.app, App(server.services, is_admin=True)
        found = await attack(server, seed, count, OPERATORS, ADMIN_KEY)
        response = await server.post("/continue_generation", {}, x_api_key=ADMIN_KEY.decode())
        assert response.status in (200, 409)  # 409: it is not paused
        server.app = public
        await is_well(server)
    return found


async def test_every_operators_endpoint() -> None:
    found = await attack_operators(1, 500)
    assert found.get(200, 0) > 50 and found.get(400, 0) > 10 and found.get(401, 0) > 10, found


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
async def test_every_operators_endpoint_for_long(seed: int) -> None:
    print(seed, await attack_operators(seed, 20_000))

"""The most expensive bodies that each route accepts: the event loop stays responsive and memory is
freed.

Bodies are built from the request types of the application's routes, so new routes and fields are
tested without a change here. A new required field without a value in `MINIMUM`, or a route that
reads a body without a type, fails the test.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import msgspec
import psutil
import pytest
from pydantic import TypeAdapter, ValidationError

from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.limits import EngineDeadError
from frame.entrypoints.http.app import body_limits
from frame.entrypoints.http.errors import ApiError
from frame.entrypoints.http.extensions import CORE_ROUTES
from frame.entrypoints.http.openai.completions_schema import ChatRequest
from frame.entrypoints.http.protocol.api_route import ApiRoute
from frame.entrypoints.http.protocol.bodies import MAX_LEVELS, MAX_NODES, MAX_VALUES
from tests.entrypoints.inprocess import JSON_TYPE, InProcess, serving
from tests.entrypoints.published import ROUTES

STALL, REPLY = 0.05, 0.1  # seconds, on an idle machine
NOMINAL = 0.004  # seconds that `yardstick` takes there
MEMORY = 200 << 20
TRIES = 6  # the best counts, because other programs run on the machine
POOLED = ("/v1/embeddings", "rerank", "score", "classify", "/pooling", "/embed")
READ_BY_OTHERS = {"/invocations": ChatRequest}  # a route that forwards its body
NO_BODY = (
    *("/ping", "/cancel", "/flush_cache", "/reset_prefix_cache", "/check_integrity"),
    *("/pause_generation", "/continue_generation", "/stop_profile", "/get_weight_version"),
    *("/pause", "/resume", "/sleep", "/wake_up", "/get_world_size", "/cancel_weight_update"),
)
CONTEXT = 8192
SPARSE, LESS_SPARSE = 90, 30  # of so many bodies one is sent, in short runs

# required field -> a valid value
MINIMUM: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "model": "", "max_tokens": 1, "query": "hi",
    "documents": ["hi"], "tokens": [5], "input_file_id": "file-1", "endpoint": "/v1/completions", "metadata": {}, "items": [],
    "tools": [], "inputs": "hi", "text": "hi", "text_1": "hi", "text_2": "hi", "sampling_params": {"max_new_tokens": 1},
    "lora_name": "a", "lora_path": "/a", "model_path": "/a", "names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "step": "begin",
    "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 2, "init_info": {}, "update_info": {},
    "capacity_of_str_len": 100, "session_id": "s",
}  # fmt: skip
# For routes that need one of several fields.
ALSO = {"/generate": ("text", "sampling_params"), "tokenize": ("text",), "score": ("text_1", "text_2")}


def yardstick() -> float:
    """Seconds that the interpreter takes for a fixed amount of work."""
    started = time.perf_counter()
    sum(i % 7 for i in range(60_000))
    return time.perf_counter() - started


# bodies -------------------------------------------------------------------------------------------


@cache
def many_keys() -> dict[str, int]:
    return {str(i): 1 for i in range(MAX_NODES - 200)}


@cache
def wide_schema() -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(MAX_NODES // 3 - 200)}}


def values(field: str, maximum: int) -> Iterator[tuple[str, Any]]:
    """(name, value) of the most expensive values of a field: as large, or of as many parts, as
    allowed.
    """
    room = maximum - 1000
    yield "spaces", " " * room
    yield "words", "hello world " * (room // 12)
    yield "one letter", "x" * room
    yield "escapes", "\u0001" * (room // 6)
    yield "empty texts", [""] * (MAX_VALUES - 10)
    yield "texts", ["hello world " * 300] * (room // 3610)
    yield "ids", [2047] * (MAX_VALUES - 10)
    yield "one id", 10**18
    yield "lists of ids", [[5]] * (MAX_NODES - 200)
    yield "keys", many_keys()
    yield "texts by key", {str(i): "x" * (room // 200) for i in range(190)}
    yield "empty objects", [{}] * (MAX_NODES - 200)
    yield "levels", json.loads("[" * (MAX_LEVELS - 8) + "]" * (MAX_LEVELS - 8))
    deep: dict[str, Any] = {}
    for _ in range(MAX_LEVELS // 2 - 8):
        deep = {"type": "object", "properties": {"a": deep}}
    yield "deep schema", deep
    yield "wide schema", wide_schema()
    yield "json_schema", {"type": "json_schema", "json_schema": {"name": "x", "schema": wide_schema()}}
    yield "odd type", {"type": [[]] * (MAX_NODES - 200)}
    yield from MORE.get(field, list)()


def conversations() -> list[tuple[str, Any]]:
    part = {"type": "text", "text": ""}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[" + "[]," * 15_000 + "1]"}}
    return [
        ("messages", [{"role": "user", "content": ""}] * 4096),
        ("too many messages", [{"role": "user", "content": ""}] * (MAX_NODES // 3 - 100)),
        ("parts", [{"role": "user", "content": [part] * (MAX_NODES // 3 - 100)}]),
        ("calls", [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]),
        ("long message", [{"role": "user", "content": "hello world " * 340_000}]),
        ("escaped message", [{"role": "user", "content": "\u0001" * 690_000}]),
        ("odd role", [{"role": [[]] * (MAX_NODES - 200), "content": ""}]),
    ]


def tools() -> list[tuple[str, Any]]:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string", "description": "x" * 40} for i in range(8000)}}
    return [
        ("wide tool", [{"type": "function", "function": {"name": "f", "parameters": wide}, "name": "f", "input_schema": wide}]),
        ("tools", [{"type": "function", "function": {"name": f"f{i}", "description": "x" * 7000}} for i in range(128)]),
        ("too many tools", [{"type": "function", "function": {"name": f"f{i}"}} for i in range(6000)]),
    ]


def samplings() -> list[tuple[str, Any]]:
    return [
        ("bad words", {"bad_words": ["hello world " * 20] * 256, "max_new_tokens": 1}),
        ("biases", {"logit_bias": {str(i): 1 for i in range(2048)}, "max_new_tokens": 1}),
        ("parameters", [{"max_new_tokens": 1}] * 10_000),
    ]


MORE = {
    "messages": conversations,
    "input": lambda: [*conversations(), ("inputs", ["hello world " * 160] * 2048)],
    "items": conversations,
    "tools": tools,
    "sampling_params": samplings,
    "bad_words": lambda: [("bad words", ["hello world " * 20] * 256)],
    "stop": lambda: [("stops", ["x" * 1024] * 16)],
    "logit_bias": lambda: [("biases", {str(i): 1 for i in range(2048)})],
    "prompt": lambda: [("prompts", ["hello world"] * 2048), ("prompts of ids", [[5, 6, 7]] * 2048)],
    "input_ids": lambda: [("prompts of ids", [[5, 6, 7]] * 2048)],
    "text": lambda: [("prompts", ["hello world"] * 2048)],
    "documents": lambda: [("documents", ["hello world " * 160] * 2047)],
}


def raw(maximum: int) -> Iterator[tuple[str, bytes]]:
    """Bodies that fit no request type, or are not JSON."""
    yield "spaces", b" " * maximum
    yield "brackets", b"[" * maximum
    yield "lists", b"[" + b"[]," * (maximum // 3 - 1)
    yield "unknown lists", b'{"unknown_field":[' + b"[]," * (MAX_NODES - 200) + b"1]}"
    yield "unknown keys", b"{" + b",".join(b'"k%d":1' % i for i in range(MAX_NODES - 200)) + b"}"
    yield "one key", b'{"' + b"k" * (maximum - 10) + b'":1}'
    yield "backslashes", b'"' + b"\\" * (maximum - 3) + b'"'
    yield "not UTF-8", b'{"a":"' + b"\xff" * (maximum - 10) + b'"}'
    yield "brackets in a text", b'{"a":"' + b"[{" * (maximum // 2 - 10) + b'"}'


def forms(maximum: int) -> Iterator[tuple[str, bytes]]:
    """Uploads."""
    yield "boundaries", b"--b\r\n" * (maximum // 5)
    yield "empty parts", b"--b\r\n\r\n\r\n" * (maximum // 9)
    head = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    yield "headers", head + b"--b\r\n" + b"x: y\r\n" * (maximum // 6 - 100) + b"\r\n\r\n--b--"
    file = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    yield "a file", head + file + b"{}\n" * (maximum // 3 - 100) + b"\r\n--b--"
    yield "one line", b"x" * maximum


def bodies_of(operation: ApiRoute, maximum: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """(name, function that encodes the body), since a short run sends few of them."""
    for kind, body in raw(min(maximum, 8 << 20)):
        yield kind, partial(bytes, body)
    model = READ_BY_OTHERS.get(operation.path, operation.body_model)
    if model is None:
        return
    fields = model.model_fields
    minimum = {name: MINIMUM[name] for name, field in fields.items() if field.is_required()}
    for end, names in ALSO.items():
        if operation.path.endswith(end):
            minimum |= {name: MINIMUM[name] for name in names}
    minimum |= {name: 1 for name in ("max_tokens", "max_output_tokens") if name in fields}
    for name, field in fields.items():
        takes = TypeAdapter(field.annotation)
        for kind, value in values(name, maximum):
            if not fits(kind, value, takes):
                continue
            others = {key: given for key, given in minimum.items() if not (name == "input_ids" and key == "text")}
            if name == "messages" and operation.path.endswith("tokenize"):
                others.pop("text")
            yield f"{name}: {kind}", partial(msgspec.json.encode, {**others, name: value})


def fits(kind: str, value: Any, takes: TypeAdapter[Any]) -> bool:
    """Whether the field accepts such a value.

    Other values are refused on decoding, like those of `raw`.
    """
    small = (
        value[:1] if isinstance(value, list | str) else value if kind not in ("keys", "texts by key") else dict(islice(value.items(), 1))
    )
    with suppress(ValidationError, ApiError):
        takes.validate_python(small)
        return True
    return False


# measuring ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cost:
    """The cost of one request: longest stall of the loop and of /health in seconds, peak memory in
    bytes.

    `slowness`: how much slower the machine was meanwhile than an idle one.
    """

    stall: float = 0.0
    health: float = 0.0
    memory: int = 0
    slowness: float = 1.0

    @property
    def is_fine(self) -> bool:
        return self.stall <= STALL * self.slowness and self.health <= REPLY * self.slowness and self.memory <= MEMORY


async def cost_of(server: InProcess, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Cost:
    cost, process = Cost(), psutil.Process()
    before = process.memory_info().rss
    done = asyncio.Event()

    async def beat() -> None:
        count, last = 0, time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            cost.stall, last, count = max(cost.stall, now - last), now, count + 1
            if count % 5 == 0:
                cost.memory = max(cost.memory, process.memory_info().rss - before)

    async def ask() -> None:
        while not done.is_set():
            started = time.perf_counter()
            assert (await server.request("GET", "/health")).status == 200
            cost.health = max(cost.health, time.perf_counter() - started)
            await asyncio.sleep(0.005)

    first = yardstick()
    beside = [asyncio.create_task(beat()), asyncio.create_task(ask())]
    await asyncio.sleep(0)
    reply = await server.request("POST", path, body, headers)
    assert reply.status < 500 or reply.status == 503, (path, reply.body[:300])
    assert len(reply.body) < 64 << 20
    done.set()
    await asyncio.gather(*beside)
    cost.slowness = max(1.0, first / NOMINAL, yardstick() / NOMINAL)
    return cost


@asynccontextmanager
async def made(is_pooled: bool, folder: Any) -> AsyncIterator[InProcess]:
    model = {"max_context": CONTEXT, **({"task": "embed"} if is_pooled else {})}
    sections = {"model": model, "cache": {"max_total_tokens": 4 * CONTEXT}, "batches": {"folder": str(folder)}}
    async with serving(sections) as server:
        gc.collect()
        gc.freeze()  # as the server does once it is ready
        try:
            yield server
        finally:
            gc.unfreeze()


def typed() -> list[ApiRoute]:
    """The operations with a body, each once."""
    posted = {"POST", "PUT", "PATCH"}
    found = {operation.path: operation for operation in (*ROUTES, *CORE_ROUTES) if operation.methods & posted}
    return [*found.values()]


def is_pooled(operation: ApiRoute) -> bool:
    return operation.path.endswith(POOLED)


def test_every_route_has_worst_bodies() -> None:
    for operation in typed():
        if operation.body_model is None and operation.path not in READ_BY_OTHERS:
            assert operation.body_kind == "file" or operation.path.endswith(NO_BODY), f"{operation.path} names no type of its body"
        else:
            assert next(iter(bodies_of(operation, 4096)))


async def tried(server: InProcess, operation: ApiRoute, start: int, step: int) -> dict[str, Cost]:
    """The bodies that cost too much, by name."""
    wrong: dict[str, Cost] = {}
    maximum = body_limits(server.services)[operation.body_kind]
    headers, bodies = (JSON_TYPE,), bodies_of(operation, maximum)
    if operation.body_kind == "file":
        headers = ((b"content-type", b"multipart/form-data; boundary=b"),)
        bodies = ((kind, partial(bytes, body)) for kind, body in forms(maximum))
    path = operation.path.replace("{name}", "none")
    for kind, encode in islice(bodies, start, None, step):
        body = encode()
        assert len(body) <= maximum + 10, kind
        cost = await cost_of(server, path, body, headers)
        for _ in range(TRIES):
            if cost.is_fine:
                break
            cost = await cost_of(server, path, body, headers)
        if not cost.is_fine:
            wrong[f"{path} {kind}"] = cost
    return wrong


def refuse(*arguments: Any, **options: Any) -> Any:
    raise EngineDeadError("this test has no engine for vectors")


@pytest.mark.slow
@pytest.mark.parametrize("pooled", [False, True], ids=["generating", "pooling"])
@pytest.mark.parametrize(
    "step",
    [SPARSE, pytest.param(LESS_SPARSE, marks=pytest.mark.exhaustive), pytest.param(1, marks=pytest.mark.soak)],
    ids=["few", "some", "all"],
)
async def test_worst_bodies(pooled: bool, step: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In short runs, each route gets other bodies than the route before."""
    if pooled:  # up to the engine; the fake engine returns no vectors
        monkeypatch.setattr(EngineClient, "prepare_request", refuse)
    wrong: dict[str, Cost] = {}
    async with made(pooled, tmp_path) as server:
        for number, operation in enumerate(typed()):
            if is_pooled(operation) == pooled:
                start = number % step % 5 if operation.body_kind == "file" else number % step
                wrong |= await tried(server, operation, start, step)
    assert wrong == {}

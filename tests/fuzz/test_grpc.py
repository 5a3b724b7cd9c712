"""Random messages and bytes to every method of the gRPC service, over real sockets: each call ends,
none by a failure of the server."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from frame.entrypoints.grpc.schema import SERVICE, Schema
from tests.entrypoints.grpc.test_service import KINDS, listening, until_empty
from tests.entrypoints.inprocess import TIMEOUT, InProcess
from tests.fuzz.mutations import NUMBERS, TEXTS, spoiled

Code = grpc.StatusCode
S = Schema()
AT_ONCE = 8
FIRST, ROUNDS = int(os.environ.get("FRAME_FUZZ_FIRST", "2")), int(os.environ.get("FRAME_FUZZ_ROUNDS", "10"))  # 10,000 each
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # of HTTP/2, with empty settings
REFUSALS = {
    Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.PERMISSION_DENIED, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED,
    Code.UNIMPLEMENTED, Code.CANCELLED,
}  # fmt: skip
PROMPT = {"token_ids": {"ids": [5, 6, 7]}}
ALL_SORTS: dict[str, Any] = {
    "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["a"], "logit_bias": {5: 1.0}, "logprobs": 1,
    "prompt_logprobs": 1, "custom": {"a": "b"}, "bad_words": ["x"], "stop_token_ids": [7],
}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "x"}]}
SEEDS: dict[str, list[dict[str, Any]]] = {
    "Generate": [
        {**PROMPT, "sampling_params": {"max_tokens": 2}},
        {"text": "x", "id": "r", "priority": 1, "cache_salt": "s", "sampling_params": ALL_SORTS},
        {"chat": CHAT, "sampling_params": {"max_tokens": 2, "regex": "a+"}},
    ],
    "GenerateStream": [{"generate": {**PROMPT, "id": "r", "sampling_params": {"max_tokens": 3}}}, {"abort": {"ids": ["r"]}}],
    "Embed": [{"texts": ["x"], "options": {"id": "r", "truncate_prompt_tokens": 2}}, {"token_ids": [{"ids": [5, 6]}]}],
    "Rerank": [{"query": "x", "documents": ["y", "z"], "top_n": 1}],
    "Score": [{"queries": ["x"], "items": ["y"]}],
    "Classify": [{"texts": ["x"]}],
    "Moderate": [{"texts": ["x", "y"]}],
    "Abort": [{"ids": ["r"]}],
    "Tokenize": [{"text": "x", "add_special_tokens": False}, {"chat": CHAT}],
    "Detokenize": [{"token_ids": [5, 6], "skip_special_tokens": True}],
    "ServerInfo": [{}],
    "Nothing": [{}],
}


def scalar(rng: random.Random, field: Any) -> Any:
    """A value that the field's type can hold, often one that it should not."""
    if field.type == field.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 40)))
    if field.cpp_type == field.CPPTYPE_STRING:
        return rng.choice(TEXTS).encode("utf-8", "replace").decode()
    if field.cpp_type == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == field.CPPTYPE_DOUBLE:
        return float(rng.choice((*NUMBERS, "nan", "inf", "-inf")))
    bits = 31 if field.cpp_type == field.CPPTYPE_INT32 else 63
    return rng.choice([number for number in NUMBERS if isinstance(number, int) and -(2**bits) <= number < 2**bits])


def change(rng: random.Random, message: Any) -> None:
    """Change one thing in it: cleared, set, added, doubled, or the same further inside."""
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    present = getattr(message, field.name)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.message_type is None:
        if field.is_repeated:
            present.extend([scalar(rng, field) for _ in range(rng.choice((1, 2, 40)))])
        else:
            setattr(message, field.name, scalar(rng, field))
    elif field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        present[scalar(rng, key)] = scalar(rng, value)
    else:
        change(rng, present.add() if field.is_repeated else present)


def bytes_of(rng: random.Random, name: str) -> bytes:
    """One message for the method, some of them none any more."""
    if name not in S.methods:
        return rng.randbytes(rng.randrange(20))
    message = S[S.methods[name].input_type.name](**rng.choice(SEEDS[name]))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        change(rng, message)
    data: bytes = message.SerializeToString()
    return spoiled(rng, data) if rng.random() < 0.3 else data


def metadata_of(rng: random.Random) -> list[tuple[str, str | bytes]]:
    found: list[tuple[str, str | bytes]] = []
    while rng.random() < 0.2:
        text = rng.choice((rng.choice(TEXTS).encode("ascii", "ignore").decode(), "Bearer x", "1"))
        plain = "".join(char for char in text[:200] if char.isprintable())
        found.append((rng.choice(("authorization", "x-request-id", "traceparent", "x-api-key")), plain))
    if rng.random() < 0.05:
        found.append(("x-any-bin", rng.randbytes(8)))
    return found


async def call(channel: Any, rng: random.Random) -> Any:
    """One random call, read to its end. -> its status."""
    name = rng.choice(list(SEEDS))
    make = getattr(channel, KINDS.get(name, "unary_unary"))(f"/{SERVICE}/{name}")
    sent = [bytes_of(rng, name) for _ in range(rng.randrange(5) if name == "GenerateStream" else 1)]
    timeout = rng.choice((0.01, TIMEOUT)) if rng.random() < 0.1 else TIMEOUT

    async def each() -> AsyncIterator[bytes]:
        for data in sent:
            yield data

    try:
        if name in KINDS:
            started = make(each() if name == "GenerateStream" else sent[0], metadata=metadata_of(rng), timeout=timeout)
            async for reply in started:
                check(S["GenerateReply"].FromString(reply).finish.error, "")
                if rng.random() < 0.02:
                    started.cancel()
        else:
            await make(sent[0], metadata=metadata_of(rng), timeout=timeout)
    except grpc.aio.AioRpcError as error:
        if "SendMessageOperation" in (error.debug_error_string() or ""):  # the client, which still sent when the call was ended
            return Code.CANCELLED
        assert error.code() in REFUSALS, (name, sent, error.code(), error.details())
        assert error.code() != Code.DEADLINE_EXCEEDED or timeout < TIMEOUT, (name, sent)
        check(error.details(), sent)
        return error.code()
    except asyncio.CancelledError:
        return Code.CANCELLED
    return Code.OK


def check(sentence: str, sent: Any) -> None:
    assert "Traceback" not in sentence and "object at" not in sentence and "<class" not in sentence, (sentence, sent)


async def send_invalid_bytes(address: str, rng: random.Random, count: int) -> None:
    """Send bytes to the port that are not gRPC calls."""
    host, _, port = address.rpartition(":")
    for _ in range(count):
        _, writer = await asyncio.open_connection(host, int(port))
        frame = rng.randrange(64).to_bytes(3, "big") + rng.randbytes(6) + rng.randbytes(rng.randrange(64))
        pieces = (PREFACE, frame, PREFACE + frame, spoiled(rng, PREFACE), rng.randbytes(200), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01")
        try:
            writer.write(rng.choice(pieces) + rng.choice((b"", frame)))
            await writer.drain()
        except ConnectionError:
            continue  # the server closed the connection
        finally:
            writer.close()


async def attack(server: InProcess, address: str, seed: int, count: int) -> dict[Any, int]:
    """Make `count` calls, some at once, and a tenth as many connections with invalid bytes. ->
    calls by status."""
    found: dict[Any, int] = {}

    async with grpc.aio.insecure_channel(address) as channel:

        async def one(number: int) -> None:
            rng = random.Random(f"{seed}-{number}")
            try:
                code = await call(channel, rng)
            except Exception as error:
                raise AssertionError(f"call {seed}-{number}") from error
            found[code] = found.get(code, 0) + 1
            if number % 10 == 0:
                await send_invalid_bytes(address, rng, 1)

        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*(one(number) for number in range(start, min(start + AT_ONCE, count))))
        await until_empty(server)
        info = await channel.unary_unary(f"/{SERVICE}/ServerInfo")(b"", timeout=TIMEOUT)
        assert S["ServerInfoReply"].FromString(info).ready
    return found


async def test_every_method() -> None:
    async with listening() as (server, address):
        found = await attack(server, address, 1, 300)
    assert found.get(Code.OK, 0) > 30 and found.get(Code.INVALID_ARGUMENT, 0) > 30, found  # what is right and what is wrong


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + ROUNDS))
async def test_every_method_for_long(seed: int) -> None:
    async with listening() as (server, address):
        print(seed, await attack(server, address, seed, 10_000))

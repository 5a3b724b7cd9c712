"""The attacks of hostile_neighbours.py, each of which runs until it is killed, and the requests
that they and the ordinary clients send."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
import wave
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

ORDINARY, HOSTILE = "sk-ordinary", "sk-hostile"

Address = tuple[str, int]


# ---- one HTTP request over a raw socket ----------------------------------------------------------


def encode_request(path: str, body: bytes, key: str, kind: str = "application/json", method: str = "POST") -> bytes:
    auth = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{auth}Connection: close\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def send(address: Address, data: bytes, seconds: float = 120.0) -> tuple[int, bytes]:
    """The status and the raw body, chunk sizes included."""
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(*address, limit=2**20)
        try:
            writer.write(data)
            received = bytearray()
            while block := await reader.read(2**18):
                received += block
        finally:
            writer.transport.abort()
    head, _, body = bytes(received).partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]) if head else 0, body


def encode_json(path: str, body: Any, key: str = HOSTILE) -> bytes:
    return encode_request(path, json.dumps(body).encode(), key)


def encode_file(path: str, fields: dict[str, str], content: bytes, key: str, name: str = "file") -> bytes:
    parts = [f'--x\r\nContent-Disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode() for field, value in fields.items()]
    parts.append(f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode() + content + b"\r\n--x--\r\n")
    return encode_request(path, b"".join(parts), key, "multipart/form-data; boundary=x")


def encode_sound(seconds: float) -> bytes:
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(os.urandom(int(seconds * 16_000) * 2))
    return target.getvalue()


# ---- attacks: each runs until it is killed -------------------------------------------------------


async def write_forever(address: Address, head: bytes, block: bytes, rate: float) -> None:
    """Send `block` again and again at `rate` bytes a second; reconnect when the server closes."""
    while True:
        writer = None
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(*address)
            drain = asyncio.create_task(discard(reader))
            writer.write(head)
            began, sent = time.monotonic(), 0
            while not drain.done() and not writer.is_closing():
                writer.write(block)
                sent += len(block)
                async with asyncio.timeout(30):
                    await writer.drain()
                await asyncio.sleep(max(0.0, began + sent / rate - time.monotonic()))
            drain.cancel()
        if writer is not None:
            writer.transport.abort()
        await asyncio.sleep(0.05)


async def discard(reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while await reader.read(2**18):
            pass


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


async def attack_chunks(target: Targets, connections: int = 1, rate: float = 10e6) -> None:
    block = b"1\r\nx\r\n" * 10_000
    await asyncio.gather(*(write_forever(target.http, CHUNKED, block, rate / connections) for _ in range(connections)))


async def attack_many_chunks(target: Targets) -> None:
    await attack_chunks(target, 20, 20e6)


async def attack_extensions(target: Targets) -> None:
    await write_forever(target.http, CHUNKED, b"1;a=b\r\nx\r\n" * 6_000, 10e6)


async def attack_pipeline(target: Targets, connections: int = 1) -> None:
    block = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 500
    await asyncio.gather(*(write_forever(target.http, b"", block, 1.6e6) for _ in range(connections)))


async def attack_many_pipelines(target: Targets) -> None:
    await attack_pipeline(target, 20)


async def attack_connections(target: Targets) -> None:
    """Connections that open, send half a request and close, 500 a second."""

    async def one() -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(*target.http)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-a: ")
            await asyncio.sleep(0.2)
            writer.transport.abort()

    tasks: set[asyncio.Task[None]] = set()
    while True:
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(0.002)


async def attack_batches(target: Targets) -> None:
    """24 batches over one file of 33 MB of newlines."""
    while True:
        with suppress(OSError, TimeoutError, ValueError, KeyError):
            _, body = await send(target.http, encode_file("/v1/files", {"purpose": "batch"}, b"\n" * 33_000_000, HOSTILE))
            identifier = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])["id"]
            batch = {"input_file_id": identifier, "endpoint": "/v1/completions", "completion_window": "24h"}
            await asyncio.gather(*(send(target.http, encode_json("/v1/batches", batch)) for _ in range(24)))
            await send(target.http, encode_request(f"/v1/files/{identifier}", b"", HOSTILE, method="DELETE"))
        await asyncio.sleep(0.5)


async def attack_bodies(target: Targets) -> None:
    """128 bodies of 4.19 MB without their last byte."""
    whole = encode_request("/v1/completions", b" " * 4_190_000, HOSTILE)

    async def one() -> None:
        while True:
            with suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(*target.http)
                writer.write(whole[:-1])
                await discard(reader)
                writer.transport.abort()
            await asyncio.sleep(1.0)

    await asyncio.gather(*(one() for _ in range(128)))


def encode_field(number: int, content: bytes) -> bytes:
    """A length-delimited protobuf field."""
    size, length = len(content), bytearray()
    while size >= 128:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes([*length, size]) + content


async def call_grpc(target: Targets, messages: list[bytes], key: str, together: int) -> None:
    import grpc.aio

    metadata = [("authorization", f"Bearer {key}")] if key else []
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]

    async def one(message: bytes) -> None:
        async with grpc.aio.insecure_channel(f"{target.grpc[0]}:{target.grpc[1]}", options) as channel:
            while True:
                with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                    call = channel.unary_stream("/frame.v1.Frame/Generate")(message, metadata=metadata, timeout=60)
                    async for _ in call:
                        pass
                await asyncio.sleep(0.25)

    await asyncio.gather(*(one(messages[index % len(messages)]) for index in range(together)))


async def attack_grpc_bodies(target: Targets) -> None:
    await call_grpc(target, [encode_field(2, b"x" * 30_000_000)], HOSTILE, 40)


async def attack_grpc_lists(target: Targets) -> None:
    messages = encode_field(4, b"\x0a\x00" * 3_000_000)
    stops = encode_field(2, b"hi") + encode_field(5, b"\x62\x00" * 6_000_000)
    await call_grpc(target, [messages, stops], HOSTILE, 2)


async def attack_grpc_connections(target: Targets) -> None:
    """Connections without a key that stay idle, as many as this process may open, at most 6,000."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 7000), hard))
    kept = []
    for _ in range(min(6000, min(hard, 7000) - 100)):
        with suppress(OSError):
            kept.append(await asyncio.open_connection(*target.grpc))
    await asyncio.sleep(3600)


async def attack_responses(target: Targets) -> None:
    """The largest responses: many sequences with alternatives, and log-probabilities of prompts."""
    many = {"prompt": [5, 6, 7], "n": 64, "max_tokens": 1500, "logprobs": 20, "ignore_eos": True}
    prompt = {"input_ids": list(range(10, 260)) * 7, "sampling_params": {"max_new_tokens": 1, "prompt_logprobs": 20}}

    async def repeat(data: bytes) -> None:
        while True:
            with suppress(OSError, TimeoutError):
                await send(target.http, data, 600)
            await asyncio.sleep(0.2)

    await asyncio.gather(repeat(encode_json("/v1/completions", many)), *(repeat(encode_json("/generate", prompt)) for _ in range(12)))


async def attack_schemas(target: Targets) -> None:
    """96 different schemas at a time."""

    async def one(index: int) -> None:
        number = index
        while True:
            names = [f"f{number}x{field}" for field in range(40)]
            fields = {name: {"type": "string", "pattern": "[a-z]{1,50}", "maxLength": 60} for name in names}
            schema = {"type": "object", "properties": fields, "required": names, "additionalProperties": False}
            body = {"text": "a", "sampling_params": {"json_schema": json.dumps(schema), "max_new_tokens": 4}}
            with suppress(OSError, TimeoutError):
                await send(target.http, encode_json("/generate", body))
            number += 96
            await asyncio.sleep(0.1)

    await asyncio.gather(*(one(index) for index in range(96)))


async def attack_sounds(target: Targets) -> None:
    """12 files of 29 minutes at a time, and 12 of four hours in a megabyte."""
    import numpy
    import soundfile

    files = []
    for minutes in (29, 240):
        buffer = io.BytesIO()
        soundfile.write(buffer, numpy.zeros(minutes * 60 * 16_000, numpy.int16), 16_000, format="FLAC")
        files.append(encode_file("/v1/audio/transcriptions", {"model": "frame"}, buffer.getvalue(), HOSTILE, "a.flac"))

    async def one(data: bytes) -> None:
        while True:
            with suppress(OSError, TimeoutError):
                await send(target.http, data)
            await asyncio.sleep(0.2)

    await asyncio.gather(*(one(files[index % 2]) for index in range(24)))


class Targets:
    """The addresses of a server; `http` may be a router's."""

    def __init__(self, http: str, grpc: str) -> None:
        self.http = parse_address(http)
        self.grpc = parse_address(grpc)


def parse_address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return host, int(port)


ATTACKS: dict[str, Callable[[Targets], Awaitable[None]]] = {
    "chunks": attack_chunks, "many_chunks": attack_many_chunks, "extensions": attack_extensions, "pipeline": attack_pipeline,
    "many_pipelines": attack_many_pipelines, "connections": attack_connections, "batches": attack_batches, "bodies": attack_bodies,
    "grpc_bodies": attack_grpc_bodies, "grpc_lists": attack_grpc_lists, "grpc_connections": attack_grpc_connections,
    "responses": attack_responses, "schemas": attack_schemas, "sounds": attack_sounds,
}  # fmt: skip

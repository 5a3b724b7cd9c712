"""The open-loop client against servers of one connection each, which answer as told; and reports of
what it found."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from frame.core.errors import ConfigError
from frame.entrypoints.tools.bench.load import Target, run
from frame.entrypoints.tools.bench.report import comparison, figure, read, report, table
from frame.entrypoints.tools.bench.workload import Job

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JOB = Job([11, 12, 13], 2, 0.0, 0.0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TOKEN = event(choices=[{"index": 0, "text": "x"}])
USAGE = event(choices=[], usage={"completion_tokens": 2})


@asynccontextmanager
async def answering(*parts: bytes) -> AsyncIterator[Target]:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        yield Target(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "m")


@pytest.mark.parametrize("split", [lambda data: [data], lambda data: [data[i : i + 1] for i in range(len(data))]], ids=["whole", "bytes"])
async def test_tokens_are_timed_however_they_arrive(split: Callable[[bytes], list[bytes]]) -> None:
    stream = HEAD + chunk(TOKEN) + chunk(TOKEN + USAGE) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    async with answering(*split(stream)) as target:
        (timing,) = await run(target, [JOB])
    assert timing.error == ""
    assert (len(timing.events), timing.tokens) == (2, 2)
    assert timing.due <= timing.sent <= timing.events[0] <= timing.events[1]


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull", "503: full"),
        (HEAD + chunk(TOKEN), "the connection was closed before the response ended"),
        (HEAD + chunk(event(error={"message": "it broke"})) + b"0\r\n\r\n", "it broke"),
        (HEAD + chunk(TOKEN) + b"0\r\n\r\n", "the response has no usage, so its number of tokens is unknown"),
        (b"nonsense\r\n\r\n", "the response is not HTTP"),
    ],
)
async def test_what_goes_wrong_is_said(reply: bytes, sentence: str) -> None:
    async with answering(reply) as target:
        (timing,) = await run(target, [JOB])
    assert timing.error.startswith(sentence)


async def test_a_server_that_is_not_there() -> None:
    async with answering() as target:
        pass
    (timing,) = await run(target, [JOB])
    assert timing.error.startswith("cannot connect")


def test_reports_that_cannot_be_read(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    for text, sentence in (("{", "is not JSON"), ("{}", "is not a report")):
        wrong.write_text(text)
        with pytest.raises(ConfigError, match=sentence):
            read(wrong)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.json")
    first, second = report("serve", {"a": {"seconds": 1.0}}), report("serve", {"b": {"seconds": 1.0}})
    with pytest.raises(ConfigError, match="no row in common"):
        comparison(first, second)
    assert table(first).row_count == 1
    assert figure({"a": {"b": 2.0}}, "a.b") == 2.0

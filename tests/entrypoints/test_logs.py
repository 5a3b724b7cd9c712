"""Log lines of every process: as text and as JSON, with the id of the request that they concern."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.entrypoints.logs import (
    ACCESS,
    MAX_QUEUED,
    REQUEST_ID,
    JsonFormatter,
    LogHandler,
    LogWriter,
    TextFormatter,
    _add_request_id,
    request_id_of,
)
from tests.entrypoints.inprocess import serving
from tests.entrypoints.serving import RunningServer, wait_until


def record(message: str, *values: Any, **more: Any) -> logging.LogRecord:
    made = logging.LogRecord("frame.x", logging.WARNING, __file__, 1, message, values, more.pop("exc_info", None))
    made.__dict__.update(more)
    _add_request_id(made)
    return made


def test_text_lines_cannot_be_forged() -> None:
    REQUEST_ID.set("r1")
    line = TextFormatter("main").format(record("GET %s", "/a\nfake line\x1b[31m"))
    assert line.endswith(r"WARNING main: GET /a\nfake line\x1b[31m [r1]")
    REQUEST_ID.set("")


def test_json_lines() -> None:
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    entry = json.loads(JsonFormatter("engine").format(record("a %d\n\ud800", 5, fields={"status": 200}, request_id="r2", exc_info=info)))
    assert entry["exception"].endswith("ValueError: no")
    assert {k: entry[k] for k in ("level", "process", "logger", "message", "status", "request_id")} == {
        "level": "warning", "process": "engine", "logger": "frame.x", "message": "a 5\n?", "status": 200, "request_id": "r2",
    }  # fmt: skip
    assert entry["time"].endswith("+00:00")


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 129, b"a\nb", "ü".encode(), b'"'])
def test_ids_that_are_none_are_replaced(given: bytes) -> None:
    made = request_id_of([(b"x-request-id", given)])
    assert len(made) == 16
    assert request_id_of([(b"x-request-id", b"Trace-1.2_3")]) == "Trace-1.2_3"


async def test_every_response_has_the_id(caplog: pytest.LogCaptureFixture) -> None:
    ids = {"x_request_id": "mine"}
    caplog.handler.addFilter(_add_request_id)
    async with serving() as server:
        with caplog.at_level(logging.INFO, ACCESS.name):
            whole = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, **ids)
            stream = await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}, **ids)
            wrong = await server.post("/v1/completions", {"prompt": 5}, **ids)
            none = await server.post("/nowhere", {}, **ids)
        assert [r.headers["x-request-id"] for r in (whole, stream, wrong, none)] == ["mine"] * 4
        assert [r.status for r in (whole, stream, wrong, none)] == [200, 200, 400, 404]
        assert len((await server.request("GET", "/health")).headers["x-request-id"]) == 16
    lines = [entry for entry in caplog.records if entry.name == ACCESS.name]
    assert [entry.fields["status"] for entry in lines] == [200, 200, 400, 404]  # type: ignore[attr-defined]
    assert {entry.request_id for entry in lines} == {"mine"}  # type: ignore[attr-defined]


def test_every_process_writes_json(checkpoint: Path) -> None:
    flags = ("--log-format", "json", "--access-log", "--max-model-len", "512", "--max-total-tokens", "1024")
    with RunningServer(checkpoint, *flags, env={"FRAME_FAKE_FAIL": "3"}) as server:
        body = {"prompt": [5, 6], "max_tokens": 9}
        assert httpx.post(server.url + "/v1/completions", json=body, headers={"x-request-id": "doomed"}).status_code == 500
        wait_until(lambda: any('"frame.access"' in line for line in server.lines))
        server.stop()
        server._reader.join(10)
        entries = [json.loads(line) for line in server.lines]  # each line is an object
    assert any("ready on http" in entry["message"] for entry in entries if entry["process"] == "main")
    failed = next(entry for entry in entries if entry["process"] == "engine")
    assert "step 3 failed" in failed["message"]
    assert "doomed-" in failed["message"]
    assert "told to fail" in failed["exception"]
    access = next(entry for entry in entries if entry["logger"] == "frame.access")
    assert (access["path"], access["status"], access["request_id"]) == ("/v1/completions", 500, "doomed")


def full_pipe() -> tuple[int, int]:
    """(read, write) of a pipe that takes not a byte more."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"." * 4096)
    os.set_blocking(write, True)
    return read, write


def test_unread_lines_are_dropped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = full_pipe()
    writer = LogWriter(write)
    monkeypatch.setattr("sys.stderr", writer)
    monkeypatch.setattr(logging.getLogger(), "handlers", [LogHandler(writer)])
    own_read, own_write = os.pipe()
    relay = writer.relay(os.fdopen(own_read, "rb"))
    os.write(own_write, b"a child's line\n" * 3)
    os.close(own_write)
    relay.join(10)
    for number in range(MAX_QUEUED + 100):
        logging.getLogger("frame.x").warning("line %d", number)
    assert 100 <= writer.num_dropped <= 103  # the writer may hold one in its hand
    writer.drain(0.0)  # does not wait for a reader
    with os.fdopen(read, "rb") as log:
        said = b""
        while b"log lines were dropped" not in said:
            said += log.read1(65536)
    assert b"a child's line\n" * 3 in said
    assert f"{writer.num_dropped} log lines were dropped".encode() in said
    print("one that cannot be written", file=writer)  # the reader is gone
    writer.drain(10)
    assert writer.num_dropped >= 101


def test_a_reader_that_stops_reading_stops_nothing(checkpoint: Path) -> None:
    """Standard error is a full pipe: requests and probes are answered, and SIGTERM ends the
    server."""
    flags = ("--access-log", "--max-model-len", "512", "--max-total-tokens", "1024", "--log-level", "debug")
    server = RunningServer(checkpoint, *flags, env={"FRAME_FAKE_NAN": "9"}, reads_log=False)
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for _ in range(100):  # 150 kB of lines; a pipe holds 64
                assert client.get("/" + "x" * 1500).status_code == 404
            for _ in range(10):  # the model fails on these, and the engine says so
                client.post("/v1/completions", json={"prompt": [9, 6], "max_tokens": 2})
            assert client.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2}).status_code == 200
            assert "frame_log_lines_dropped_total" in client.get("/metrics").text
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
    finally:
        server.process.kill()

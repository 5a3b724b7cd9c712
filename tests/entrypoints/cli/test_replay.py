"""`log.request_dump` of a server, and `frame replay` of what it has written: the tokens are equal,
and the record says nothing that it should not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from frame.entrypoints.cli.main import cli
from frame.entrypoints.tools.bench.dump import read_dump
from tests.entrypoints.inprocess import serving
from tests.entrypoints.serving import RunningServer

FLAGS = ("--max-model-len", "512", "--max-total-tokens", "4096", "--reasoning-parser", "think-tags", "--tool-call-parser", "hermes")
SECRET = "tangerine"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}}}
CHAT = {"messages": [{"role": "user", "content": f"Say {SECRET} twice."}], "max_tokens": 12}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT | {"temperature": 0}),
    ("/v1/chat/completions", CHAT | {"n": 4, "seed": 5, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "max_tokens": 20}),
    ("/v1/completions", {"prompt": f"{SECRET} " * 40, "max_tokens": 9, "top_k": 7, "stop": [SECRET, "e"], "user": SECRET}),
    ("/v1/completions", {"prompt": [11, 12, 13], "max_tokens": 9, "guided_choice": ["yes", SECRET], "cache_salt": SECRET}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 9, "logit_bias": {"20": 5.0}, "frequency_penalty": 0.5, "min_tokens": 4}),
    ("/v1/messages", {"model": "tiny-llama", "max_tokens": 9, "messages": CHAT["messages"], "system": SECRET}),
    ("/generate", {"text": SECRET, "rid": SECRET, "sampling_params": {"max_new_tokens": 9, "temperature": 3.0, "bad_words": ["e"]}}),
    ("/generate", {"input_ids": [20, 21], "sampling_params": {"max_new_tokens": 9, "bad_words_ids": [[30]]}}),
    ("/generate", {"input_ids": [22, 23, 24], "sampling_params": {"max_new_tokens": 9, "regex": f"({SECRET}|[a-z]{{9}})"}}),
)  # fmt: skip
HEADERS = {"authorization": f"Bearer key-{SECRET}", "x-request-id": f"id-{SECRET}", "x-other": f"other-{SECRET}"}


@contextmanager
def recording(checkpoint: Path, folder: Path, *flags: str, fake: bool = False, **more: Any) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, *FLAGS, "--request-dump", str(folder), *flags, fake=fake, **more) as running:
        yield running


def send_all(server: RunningServer) -> int:
    """The number of sequences."""
    for path, body in BODIES:
        reply = httpx.post(server.url + path, json=body, headers=HEADERS, timeout=60)
        assert reply.status_code == 200, reply.text
    with (
        suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST",
            server.url + "/v1/completions",
            json={"prompt": "b", "max_tokens": 400, "ignore_eos": True, "stream": True},
            headers=HEADERS,
        ) as stream,
    ):
        next(stream.iter_lines())  # and leave
    return len(BODIES) + 3 + 1


@pytest.mark.slow
def test_tokens_are_repeated(checkpoint: Path, server: RunningServer, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    with recording(checkpoint, folder, "--api-key", f"key-{SECRET}") as running:
        count = send_all(running)
    recorded = read_dump(folder)
    assert len(recorded) == count
    assert {each.line.finish for each in recorded} >= {"length", "stop", "abort"}
    (file,) = folder.iterdir()
    assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)
    text = file.read_text()
    assert f"key-{SECRET}" not in text and f"other-{SECRET}" not in text and SECRET in text
    report = tmp_path / "report.json"
    done = CliRunner().invoke(cli, ["replay", str(folder), "--url", server.url, "--require-equal", "--speed", "20", "--json", str(report)])
    assert done.exit_code == 0, done.output
    assert "recorded" in done.output and "replayed" in done.output
    rows = json.loads(report.read_text())["rows"]
    usable = sum(each.line.num_output > 0 for each in recorded)
    assert (rows["replayed"]["equal"], rows["replayed"]["different"], rows["replayed"]["failed"]) == (usable, 0, 0)
    assert rows["recorded"]["requests"] == rows["replayed"]["requests"] == usable
    assert rows["recorded"]["output_tokens"] == sum(each.line.num_output for each in recorded)
    assert rows["replayed"]["arrival_error_ms"]["p50"] < 100
    first = file.read_text().splitlines()
    line = json.loads(first[1])
    line["output"][1] += 1
    (tmp_path / "changed.jsonl").write_text("\n".join([first[0], json.dumps(line)]) + "\n")
    done = CliRunner().invoke(cli, ["replay", str(tmp_path / "changed.jsonl"), "--url", server.url, "--require-equal", "--speed", "max"])
    assert done.exit_code == 1 and "from output token 1 on" in done.output and "1 outputs differ from the record" in done.output


async def test_shapes_hold_no_content(server: RunningServer, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir(mode=0o700)
    bodies = [(path, body) for path, body in BODIES if "tools" not in body]
    async with serving({"log": {"request_dump": str(folder), "request_dump_content": "shapes"}}) as served:
        given = {name.replace("-", "_"): value for name, value in HEADERS.items()}
        for path, body in bodies:
            body = {**body, "model": "frame-tiny"} if "model" in body else body
            reply = await served.post(path, body, **given)
            assert reply.status == 200, reply.body
        tokens = (await served.post("/tokenize", {"prompt": f"{SECRET} {SECRET}"})).json()["tokens"]
    (file,) = folder.iterdir()
    text = file.read_text()
    assert SECRET not in text
    assert not any(f'"{field}":' in text for field in ("prompt", "output", "stop", "seed", "regex", "choice", "tools", "logit_bias"))
    assert json.dumps(tokens[-3:], separators=(",", ":"))[1:-1] not in text
    assert '"grammar":"json_object"' in text
    assert len(read_dump(folder)) == len(bodies) + 3
    target = ("--url", server.url, "--speed", "max", "--vocabulary", "300")
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["replay", str(folder), *target])
    assert done.exit_code == 0, done.output
    bench = ["bench", "serve", "--dump", str(folder)]
    options = ("--base-url", server.url, "--rate", "200", "--vocabulary", "300")
    done = await asyncio.to_thread(CliRunner().invoke, cli, [*bench, *options])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, [*bench, "--requests", "5"])
    assert done.exit_code == 2 and "leave out --workload" in done.output


@pytest.mark.slow
def test_a_crash_writes_what_the_share_left_out(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    env = {"FRAME_FAKE_STEP": "0.02"}
    with recording(checkpoint, folder, "--request-dump-share", "0", fake=True, env=env) as running:
        running.post("/generate", {"input_ids": [20, 21], "rid": "before", "sampling_params": {"max_new_tokens": 3}})
        assert list(folder.iterdir()) == []
        with ThreadPoolExecutor(1) as pool:
            body = {"input_ids": [30, 31], "rid": "during", "sampling_params": {"max_new_tokens": 100, "ignore_eos": True}}
            going = pool.submit(running.post, "/generate", body)
            time.sleep(0.6)
            os.kill(running.children()["scheduler"].pid, signal.SIGKILL)
            assert going.result().status_code == 200
        deadline = time.monotonic() + 10
        while not list(folder.glob("crash-*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        recorded = read_dump(folder)
    assert [(each.line.id, each.line.finish) for each in recorded] == [("before", "length"), ("during", "running")]
    assert 0 < recorded[1].line.num_output < 100


def test_folders_that_cannot_be_used(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").write_text("")
    for name, sentence in (("open", "is open to other users; run chmod 700"), ("file", "cannot be made (File exists)")):
        arguments = ["config", "check", "--model", str(checkpoint), "--request-dump", str(tmp_path / name), "--port", "0"]
        done = CliRunner().invoke(cli, arguments)
        assert sentence in done.output, done.output


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("x")
    done = CliRunner().invoke(cli, ["replay", str(tmp_path / "d")])
    assert (done.exit_code, "is no request dump" in done.output) == (78, True)

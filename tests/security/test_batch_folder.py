"""Files and batches of several keys over HTTP: folder lock, metadata limits, streaming, quotas of
lines.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from frame.entrypoints.http.batch.folder import LOCK
from frame.testing.checkpoints import make_checkpoint
from tests.entrypoints.fork_server import run_forked
from tests.entrypoints.serving import RunningServer, wait_until

KEYS = {"a": "sk-a", "b": "sk-b", "admin": "sk-admin"}
MB = 1024 * 1024
SIZE = 24 * MB  # of a large file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("batches")
    (made / f"file-{'0' * 32}.jsonl").write_text("somebody's")
    return made


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEYS['a']}\n{KEYS['b']}\n")
    model = make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("model"))
    flags = (
        "--batch-folder",
        str(folder),
        "--api-keys",
        str(keys),
        "--max-requests-per-key",
        "4",
        "--admin-key",
        KEYS["admin"],
        "--client-timeout",
        "120",
    )
    with RunningServer(model, *flags, env={"FRAME_FAKE_STEP": "0.005", "MALLOC_ARENA_MAX": "2"}) as running:
        yield running


def ask(server: RunningServer, method: str, path: str, key: str = "a", **more: Any) -> httpx.Response:
    return httpx.request(method, server.url + path, headers={"authorization": f"Bearer {KEYS[key]}"}, timeout=60, **more)


def upload(server: RunningServer, content: bytes, key: str = "a") -> httpx.Response:
    return ask(server, "POST", "/v1/files", key, files={"file": ("a.jsonl", content)}, data={"purpose": "batch"})


def resident(server: RunningServer) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss)


def connect(server: RunningServer, head: str, body: bytes = b"") -> socket.socket:
    parts = urlsplit(server.url)
    made = socket.create_connection((parts.hostname, parts.port), timeout=60)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.sendall(f"{head}\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS['a']}\r\n".encode() + body)
    return made


def test_folder_of_an_older_server_is_refused_and_foreign_files_stay(server: RunningServer, folder: Path, tmp_path: Path) -> None:
    kept = upload(server, b"kept").json()["id"]
    with (tmp_path / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "frame", "serve", "--port", "0", "--batch-folder", str(tmp_path)]
        second = run_forked(command)
    assert (second.returncode, "is in use by a server of an older version; choose another" in second.stderr) == (78, True), second.stderr
    assert second.stderr.count("\n") == 1
    assert (folder / f"file-{'0' * 32}.jsonl").read_text() == "somebody's"
    assert ask(server, "GET", f"/v1/files/{kept}/content").content == b"kept"
    assert ask(server, "GET", f"/v1/files/{kept}/content", "b").status_code == 404


METADATA = {
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "model": ""},
}


@pytest.mark.parametrize("path", METADATA)
def test_metadata_size_is_limited(server: RunningServer, path: str) -> None:
    maximum = {f"{i:064}": "v" * 512 for i in range(16)}
    error = ask(server, "POST", path, json=METADATA[path] | {"metadata": maximum}).json().get("error")
    assert error is None or "metadata" not in error["message"]
    for bad in (maximum | {"k": ""}, {"k" * 65: ""}, {"k": "v" * 513}):
        reply = ask(server, "POST", path, json=METADATA[path] | {"metadata": bad})
        assert (reply.status_code, "metadata" in reply.json()["error"]["message"]) == (400, True), reply.text
        assert len(reply.text) < 1000


def test_files_are_streamed(server: RunningServer) -> None:
    content = os.urandom(SIZE)
    boundary = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    boundary += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    upload(server, content[:MB])
    before = resident(server)
    head = f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(boundary) + SIZE + 10}\r\n\r\n".encode()
    # Never completed
    writers = [connect(server, "POST /v1/files HTTP/1.1", head + boundary + content) for _ in range(3)]
    assert resident(server) - before < SIZE, "uploads are held in memory"
    for writer in writers:
        writer.close()
    wait_until(lambda: upload(server, b"").status_code == 200)
    made = upload(server, content).json()
    assert made["bytes"] == SIZE
    assert ask(server, "GET", f"/v1/files/{made['id']}/content").content == content
    readers = [connect(server, f"GET /v1/files/{made['id']}/content HTTP/1.1", b"\r\n") for _ in range(3)]
    for reader in readers:
        assert reader.recv(12) == b"HTTP/1.1 200"
    assert resident(server) - before < SIZE, "contents are held in memory"
    for reader in readers:
        reader.close()
    wait_until(lambda: ask(server, "DELETE", f"/v1/files/{made['id']}").status_code == 200)


def test_lines_of_a_batch_count_for_their_key(server: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    wait_until(lambda: upload(server, b"").status_code == 200)
    name = upload(server, b"".join(json.dumps({**line, "custom_id": f"{n}"}).encode() + b"\n" for n in range(12))).json()["id"]
    made = ask(server, "POST", "/v1/batches", json={"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"})
    seen = set()

    def is_over() -> bool:
        seen.add(ask(server, "GET", "/server_info", "admin").json()["outstanding"])
        return ask(server, "GET", f"/v1/batches/{made.json()['id']}").json().get("status") == "completed"

    wait_until(is_over, 60)
    assert max(seen) <= 4
    assert max(seen) > 0


def test_batches_of_empty_lines_do_not_delay_another_key(server: RunningServer) -> None:
    wait_until(lambda: upload(server, b"").status_code == 200)
    name = upload(server, b"\n" * SIZE).json()["id"]
    made = {"input_file_id": name, "endpoint": "/v1/completions", "completion_window": "24h"}
    batches = [ask(server, "POST", "/v1/batches", json=made).json()["id"] for _ in range(24)]
    began = time.monotonic()
    assert upload(server, b"x" * MB, "b").status_code == 200
    assert time.monotonic() - began < 8
    wait_until(lambda: all(ask(server, "GET", f"/v1/batches/{each}").json()["status"] == "failed" for each in batches[::8]))
    assert "empty lines" in ask(server, "GET", f"/v1/batches/{batches[0]}").text
    ask(server, "DELETE", f"/v1/files/{name}")

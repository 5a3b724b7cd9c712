"""What happens when clients leave, processes die and signals come, over a fake model that checks
every page it reads."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.entrypoints.fork_server import run_forked
from tests.entrypoints.serving import RunningServer, wait_until

FAKE = {"FRAME_FAKE_STEP": "0.002"}
LONG = {"prompt": [5] * 20, "max_tokens": 400, "ignore_eos": True}


def body_of(number: int) -> bytes:
    """A request of some kind: long or short prompt, streaming or not, several choices, stop
    strings."""
    r = random.Random(number)
    shared = [7] * 40 if r.random() < 0.3 else []
    body: dict[str, Any] = {
        "prompt": shared + [r.randrange(3, 300) for _ in range(r.choice((3, 30, 200)))],
        "max_tokens": r.choice((1, 5, 50, 200)),
        "ignore_eos": True,
        "stream": r.random() < 0.6,
        "n": r.choice((1, 1, 1, 3)),
    }
    if r.random() < 0.2:
        body |= {"prompt": "The quick brown fox " * r.choice((1, 60)), "stop": ["zq", "e"]}
    if r.random() < 0.2:
        body["seed"] = number
    return json.dumps(body).encode()


def finishes(server: RunningServer) -> dict[str, float]:
    """How many sequences ended, by reason."""
    families = text_string_to_metric_families(httpx.get(server.url + "/metrics").text)
    return {s.labels["reason"]: s.value for family in families for s in family.samples if s.name == "frame_requests_finished_total"}


async def cut(host: str, port: int, number: int, gate: asyncio.Semaphore) -> None:
    """Send a request and leave at a random moment: before the answer, in the middle of it, or
    never."""
    async with gate:
        body = body_of(number)
        reader, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        moment = random.Random(-number)
        written = len(body) if moment.random() < 0.95 else moment.randrange(len(body))
        writer.write(head.encode() + body[:written])
        patience = moment.choice((0.0, 0.01, 0.05, 0.2, 0.5, 1.0))
        try:
            async with asyncio.timeout(patience):
                while await reader.read(200):
                    pass
        except TimeoutError:
            pass
        if moment.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()


@pytest.mark.slow
def test_a_thousand_requests_cut_at_random_moments(fake_server: RunningServer) -> None:
    fake_server.post("/flush_cache", {})
    before, finished = fake_server.get("/server_info"), finishes(fake_server)
    url = httpx.URL(fake_server.url)

    async def storm() -> None:
        gate = asyncio.Semaphore(96)
        await asyncio.gather(*(cut(url.host, url.port or 0, number, gate) for number in range(1000)))

    asyncio.run(storm())
    wait_until(lambda: fake_server.get("/server_info")["outstanding"] == 0)
    wait_until(lambda: fake_server.get("/server_info")["running"] + fake_server.get("/server_info")["waiting"] == 0)
    assert fake_server.post("/check_integrity", {}).status_code == 200
    ended = {reason: count - finished.get(reason, 0) for reason, count in finishes(fake_server).items()}
    assert ended["abort"] > 300  # the storm was one
    assert ended["length"] > 100
    assert fake_server.post("/flush_cache", {}).status_code == 200
    after = fake_server.get("/server_info")
    for name in ("used_pages", "evictable_pages", "total_pages", "running", "waiting"):
        assert after[name] == before[name], name
    assert after["used_pages"] == 0
    assert fake_server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
    assert not any("ERROR" in line or "Traceback" in line for line in fake_server.lines)


@pytest.mark.parametrize("stream", [False, True])
def test_a_hang_up_ends_the_request_within_moments(fake_server: RunningServer, stream: bool) -> None:
    with httpx.Client(base_url=fake_server.url) as client, pytest.raises(httpx.ReadTimeout):
        request = client.build_request("POST", "/v1/completions", json={**LONG, "stream": stream, "n": 2}, timeout=0.2)
        response = client.send(request, stream=True)
        for _ in response.iter_lines():
            if not stream:
                break
            raise httpx.ReadTimeout("seen enough")
    wait_until(lambda: fake_server.get("/server_info")["running"] == 0, 2.0)  # 400 tokens would take longer


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_dead_child_ends_answers_and_server(checkpoint: Path, role: str) -> None:
    server = RunningServer(checkpoint, "--max-model-len", "512", "--detokenizer-workers", "1", "--max-restarts", "0", env=FAKE)
    found: list[str] = []
    whole: list[httpx.Response] = []

    def read() -> None:
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=30) as response:
            found.extend(line for line in response.iter_lines() if line)

    def ask() -> None:
        whole.append(httpx.post(server.url + "/v1/completions", json=LONG, timeout=30))

    threads = [threading.Thread(target=read), threading.Thread(target=ask)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(found) > 5 and server.get("/server_info")["running"] == 2)
    others = [child for name, child in server.children().items() if name != role]
    server.children()[role].send_signal(signal.SIGKILL)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    error = json.loads(found[-2].removeprefix("data: "))["error"]
    assert "killed by signal 9" in error["message"]
    assert found[-1] == "data: [DONE]"
    assert (whole[0].status_code, whole[0].json()["error"]["message"]) == (500, error["message"])
    assert server.wait() == 1
    wait_until(lambda: not any(child.is_running() for child in others))


def test_no_child_outlives_a_killed_server(checkpoint: Path) -> None:
    server = RunningServer(checkpoint, "--detokenizer-workers", "1", env=FAKE)
    children = server.children()
    assert set(children) == {"scheduler", "detokenizer"}
    server.process.kill()
    psutil.wait_procs(list(children.values()), timeout=120)
    assert not any(child.is_running() for child in children.values())


def test_sigterm_drains(checkpoint: Path) -> None:
    server = RunningServer(checkpoint, "--max-model-len", "512", env={"FRAME_FAKE_STEP": "0.01"})
    replies: list[httpx.Response] = []
    body = {**LONG, "max_tokens": 100}
    thread = threading.Thread(target=lambda: replies.append(httpx.post(server.url + "/v1/completions", json=body, timeout=30)))
    thread.start()
    wait_until(lambda: server.get("/server_info")["running"] == 1)
    children = list(server.children().values())
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(server.url + "/health").status_code == 503)
    assert httpx.get(server.url + "/health/live").status_code == 200
    refused = server.post("/v1/completions", {"prompt": "x"})
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    thread.join(20)
    assert replies[0].json()["usage"]["completion_tokens"] == 100
    assert server.wait() == 0
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_drain_ends(checkpoint: Path, how: str) -> None:
    flags = ("--drain-timeout", "0.3" if how == "timeout" else "60")
    server = RunningServer(checkpoint, "--max-model-len", "512", *flags, env={"FRAME_FAKE_STEP": "0.05"})
    found: list[str] = []

    def read() -> None:
        with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=30) as response:
            found.extend(line for line in response.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    wait_until(lambda: len(found) > 1)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    if how == "second signal":
        wait_until(lambda: any("stopping" in line for line in server.lines))
        server.process.send_signal(signal.SIGINT)
    assert server.wait() == 0
    assert time.monotonic() - started < 20  # the whole answer would have taken longer
    thread.join(5)
    assert json.loads(found[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"


def test_requests_without_a_response_get_503_at_the_end_of_the_drain(checkpoint: Path) -> None:
    """A router then repeats them, streams and whole responses."""
    flags = ("--max-running-requests", "2", "--drain-timeout", "0.5")
    server = RunningServer(checkpoint, "--max-model-len", "512", *flags, env={"FRAME_FAKE_STEP": "0.05"})
    replies: dict[str, httpx.Response] = {}
    bodies = {"begun": {"stream": True}, "whole": {}, "waiting": {"stream": True}, "waiting, whole": {}}
    threads = []
    for count, (name, fields) in enumerate(bodies.items(), 1):

        def post(name: str, fields: dict[str, Any]) -> None:
            replies[name] = httpx.post(server.url + "/v1/completions", json=LONG | fields, timeout=30)

        threads.append(threading.Thread(target=post, args=(name, fields)))
        threads[-1].start()
        wait_until(lambda count=count: server.get("/server_info")["outstanding"] == count)  # type: ignore[misc]
    wait_until(lambda: server.metric("frame_requests_running") == 2)
    server.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(20)
    assert server.wait() == 0
    assert '"finish_reason":"abort"' in replies.pop("begun").text
    for name, reply in replies.items():
        assert reply.status_code == 503, (name, reply.text)
        assert "shutting down" in reply.json()["error"]["message"]


def test_a_failing_step_is_an_error_of_its_requests(checkpoint: Path) -> None:
    with RunningServer(checkpoint, env={"FRAME_FAKE_FAIL": "3"}) as server:
        reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 10, "ignore_eos": True})
        assert reply.status_code == 500
        assert "told to fail" in reply.json()["error"]["message"]
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 10, "ignore_eos": True}).status_code == 200
        assert server.post("/check_integrity", {}).status_code == 200


@pytest.mark.parametrize("workers", [("0", "0"), ("2", "1")], ids=["all in the main process", "two tokenizers"])
def test_text_processes_are_configuration(checkpoint: Path, workers: tuple[str, str], fake_server: RunningServer) -> None:
    body = {"prompt": "The quick brown fox", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stop": ["\x00never"]}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
    flags = ("--tokenizer-workers", workers[0], "--detokenizer-workers", workers[1])
    with RunningServer(checkpoint, *flags) as server:
        assert len(server.children()) == 1 + (workers[1] == "1") + (workers[0] == "2")  # roles; both tokenizers are one
        for path, each in (("/v1/completions", body), ("/v1/chat/completions", chat)):
            ours, theirs = server.post(path, each).json(), fake_server.post(path, each).json()
            assert ours["choices"][0].get("text") == theirs["choices"][0].get("text")
            assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]


@pytest.mark.slow
def test_sigterm_during_the_start_leaves_nothing(checkpoint: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="start-", dir="/tmp") as folder:  # pytest's folder may be too long for sockets
        stop_while_starting(checkpoint, folder)
        assert not list(Path(folder).glob("frame-*"))


def stop_while_starting(checkpoint: Path, folder: str) -> None:
    command = [sys.executable, "-m", "frame", "serve", "--port", "0", "--detokenizer-workers", "1", "--model", str(checkpoint)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": folder})
    try:
        main = psutil.Process(process.pid)
        wait_until(lambda: len(main.children()) == 2)
        children = main.children()
        process.terminate()
        process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0
    psutil.wait_procs(children, timeout=120)
    assert not any(child.is_running() for child in children)


def test_a_start_without_a_model_is_one_sentence(tmp_path: Path) -> None:
    """`test_refusals.py` has the starts that damaged files end."""
    command = [sys.executable, "-m", "frame", "serve", "--port", "0", "--model", str(tmp_path / "none")]
    done = run_forked(command)
    assert done.returncode == 78, done.stderr
    assert "is no folder" in done.stderr
    assert "Traceback" not in done.stderr

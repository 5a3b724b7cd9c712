"""`frame router` as a process in front of servers that are processes, one of which is killed under
load and comes back."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.checkpoint.model_config import find_model
from tests.entrypoints.serving import RunningRouter, RunningServer, wait_until

FLAGS = ("--max-model-len", "512", "--max-total-tokens", "8192", "--skip-tokenizer-init")
STEP = {"FRAME_FAKE_STEP": "0.02", "FRAME_FAKE_PLAIN": "1"}
PATIENCE = 60.0  # seconds


def send(url: str, number: int, is_stream: bool) -> list[str] | int:
    """The status of a whole response, or the data of a stream's events."""
    body: dict[str, Any] = {"input_ids": [5, 6, number], "stream": is_stream, "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    if not is_stream:
        return httpx.post(url + "/generate", json=body, timeout=PATIENCE).status_code
    with httpx.stream("POST", url + "/generate", json=body, timeout=PATIENCE) as reply:
        assert reply.status_code == 200
        return [line.removeprefix("data: ") for line in reply.iter_lines() if line]


@pytest.mark.slow
def test_a_replica_that_is_killed_under_load(tmp_path: Path) -> None:
    """Requests without a byte of a response are repeated on the other one, streams that have begun
    end with an error event, none hangs, and the router uses the replica when it is back."""
    folder = Path(find_model("frame-tiny"))
    with (
        RunningServer(folder, *FLAGS, env=STEP) as first,
        RunningServer(folder, *FLAGS, env=STEP) as second,
        RunningRouter(first.url, second.url) as router,
        ThreadPoolExecutor(32) as pool,
    ):
        load: list[Future[list[str] | int]] = [pool.submit(send, router.url, number, number % 4 < 2) for number in range(32)]
        wait_until(lambda: all(each.get("/server_info")["outstanding"] >= 8 for each in (first, second)))
        first.kill()
        results = [task.result(PATIENCE) for task in load]
        assert [result for result in results if isinstance(result, int)] == [200] * 16
        streams = [result for result in results if isinstance(result, list)]
        broken = [events for events in streams if events[-1] != "[DONE]"]
        for events in broken:
            assert json.loads(events[-1])["error"]["code"] == 502
            assert first.url in json.loads(events[-1])["error"]["message"]
        assert 0 < len(broken) < 16
        port = first.url.rpartition(":")[2]
        assert httpx.get(router.url + "/health", timeout=PATIENCE).json()["replicas"][first.url] == "unhealthy"
        assert not [line for line in router.lines if "ERROR" in line or "Traceback" in line]
        cut = [line.strip() for line in router.lines if "breaks off" in line]
        assert cut and all(re.fullmatch(r"\S+ \S+ WARNING router: .* \[[0-9a-f]{16}\]", line) for line in cut), cut
        with RunningServer(folder, *FLAGS, "--port", port, env=STEP):
            wait_until(lambda: httpx.get(router.url + "/health", timeout=PATIENCE).json()["replicas"][first.url] == "ok")
            assert [send(router.url, number, False) for number in range(12)] == [200] * 12
        os.kill(router.process.pid, signal.SIGTERM)
        assert router.wait() == 0

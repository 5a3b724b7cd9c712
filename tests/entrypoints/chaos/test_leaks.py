"""Something in the engine that keeps what it takes, step by step: the process is replaced in time,
and clients see a pause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.entrypoints.chaos.storm import Storm, restarts
from tests.entrypoints.serving import RunningServer

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells what a process holds")
FLAGS = ("--max-model-len", "512", "--max-total-tokens", "4096", "--max-running-requests", "32", "--max-restarts", "1000")
LIMITS = {
    "memory": ("max_process_memory", 700_000_000, "memory", "frame_process_memory_bytes"),
    "threads": ("max_process_threads", 100, "threads", "frame_process_threads"),
    "files": ("max_process_files", 200, "open files", "frame_process_open_files"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["memory", *(pytest.param(what, marks=pytest.mark.soak) for what in ("threads", "files"))])
def test_a_plugin_that_leaks(checkpoint: Path, fake_server: RunningServer, what: str) -> None:
    setting, limit, words, metric = LIMITS[what]
    storm = Storm(12, 200)
    for body in storm.bodies:
        body["n"] = 1
    calm = storm(fake_server)
    limits = {"FRAME_FAKE_LEAK": what, "FRAME_FAKE_STEP": "0.02", f"FRAME_SERVER__{setting.upper()}": str(limit)}
    with RunningServer(checkpoint, *FLAGS, env=limits) as server:
        assert 0 < server.metric(metric) < limit
        assert storm(server) == calm
        assert restarts(server) >= 1
        assert server.metric("frame_requests_recovered_total") > 0
        told = [line for line in server.lines if "the engine process holds" in line]
        assert any(words in line and "more than server." + setting in line and "engine is restarted" in line for line in told)

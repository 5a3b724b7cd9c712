"""locust, a public load generator, unmodified, against the embedded model: every request is
answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import KEY
from tests.entrypoints.serving import RunningServer

USERS, REQUESTS = 8, 60


@pytest.mark.slow
def test_every_request_of_many_users_is_answered(clients_server: RunningServer) -> None:
    script = Path(__file__).with_name("locust_user.py")
    users = ["--headless", "-u", str(USERS), "-r", str(USERS), "-t", "100s"]
    environment = {**os.environ, "KEY": KEY, "REQUESTS": str(REQUESTS)}
    command = [sys.executable, "-m", "locust", "-f", str(script), *users, "--host", clients_server.url, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(done.stdout)
    assert sum(row["num_requests"] for row in rows) >= REQUESTS
    assert sum(row["num_failures"] for row in rows) == 0
    assert {row["name"] for row in rows} == {"/v1/chat/completions", "/v1/completions"}

"""`python -m frame.plugins.check`: one JSON line about one plugin, whatever becomes of it."""

from __future__ import annotations

import json
import subprocess
import sys

from frame.plugins.check import check


def test_a_plugin_that_loads() -> None:
    expected = {"ok": True, "error": None, "class": "frame.plugins.scheduling_policies.fcfs.Fcfs"}
    assert check("scheduling_policy", "fcfs") == expected
    command = [sys.executable, "-m", "frame.plugins.check", "scheduling_policy", "fcfs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == expected


def test_a_plugin_that_is_not_there() -> None:
    result = check("scheduling_policy", "nobody")
    assert result["ok"] is False
    assert "Unknown scheduling_policy 'nobody'" in str(result["error"])

"""`python -m frame.plugins.check` prints one JSON line about one plugin."""

from __future__ import annotations

import json
import subprocess
import sys

from frame.plugins.check import check


def test_a_plugin_that_loads() -> None:
    expected = {"ok": True, "error": None, "class": "frame.plugins.scheduling_policies.fcfs.Fcfs"}
    assert check("scheduling_policy", "fcfs") == expected
    command = [sys.executable, "-m", "frame.plugins.check", "scheduling_policy", "fcfs"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    assert json.loads(done.stdout) == expected


def test_an_unknown_plugin() -> None:
    result = check("scheduling_policy", "unknown")
    assert result["ok"] is False
    assert "Unknown scheduling_policy 'unknown'" in str(result["error"])

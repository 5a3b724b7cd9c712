"""benchmarks/deepseek_full.py on a CPU, with a DeepSeek of two narrow layers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.two_card_parts import NARROW_DEEPSEEK
from frame.entrypoints.tools.plan.planner import PUBLISHED
from tests.entrypoints.fork_server import run_forked

ROOT = Path(__file__).parents[2]


def run(folder: Path, part: int, tp: int, *flags: str) -> dict[str, Any]:
    config = json.loads((PUBLISHED / "DeepSeek-V3.1/config.json").read_text()) | NARROW_DEEPSEEK
    (folder / "config.json").write_text(json.dumps(config))
    small = ("--rates", "8", "--seconds", "1", "--shrink", "64", "--kill-after", "0.1", "--always", "cache.max_total_tokens=8192")
    paths = ("--config", str(folder), "--home", str(folder / "home"), "--json", str(folder / "report.json"))
    command = [sys.executable, str(ROOT / "benchmarks/deepseek_full.py"), "--part", str(part), "--tp", str(tp), *small, *paths, *flags]
    done = run_forked(command, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())["rows"]
    return found


@pytest.mark.slow
def test_part_1(tmp_path: Path) -> None:
    rows = run(tmp_path, 1, 1)
    assert rows["memory"]["planned_tokens"] == rows["memory"]["tokens"] == 8192
    for name in ("single", "batch8", "prefill", "prefix", "longctx", "mixed256"):
        assert rows[name]["failed"] == 0
        assert rows[name]["tokens_per_s"] > 0
    assert rows["latency at 8/s"]["first_token_ms"]["p99"] > 0


@pytest.mark.soak
def test_part_2(tmp_path: Path) -> None:
    rows = run(tmp_path, 2, 2, "--set", "scheduler.policy=fcfs")
    for number in (1, 2):
        after = rows[f"texts after SIGKILL {number}"]
        assert after["complete"] == after["of"] == 16
    assert rows["other settings: single"]["failed"] == 0

"""benchmarks/two_cards.py: its arguments, its report, and what becomes of a part that is late."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.fork_server import run_forked

ROOT = Path(__file__).parents[2]


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("two_cards")


def run(out: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks/two_cards.py"), "--tiny", "--device", "cpu", "--out", str(out), *flags]
    done = run_forked(command, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def test_an_unknown_part_is_named(two_cards: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        two_cards.parse(["--parts", "tp,tq"])
    assert "--parts tq: there are tp, tp-moe" in capsys.readouterr().err


def test_parts_run_in_the_order_of_their_value(two_cards: Any) -> None:
    assert list(two_cards.PARTS)[:3] == ["tp", "tp-moe", "ep"]
    assert two_cards.parse([]).parts.split(",") == list(two_cards.PARTS)


def test_ratios_have_both_rows(two_cards: Any) -> None:
    def rates(**figures: float) -> dict[str, Any]:
        return {"rows": {name: {"tokens_per_s": figure} for name, figure in figures.items()}}

    rows = {"llama tp1": rates(single=200.0, batch8=100.0), "llama tp2": rates(single=300.0), "media tp1": {"requests_per_s": 2.0}}
    rows |= {f"pd {kind} at 8/s": {"between_events_ms": {"p99": time}} for kind, time in (("divided", 30.0), ("replicas", 60.0))}
    assert two_cards.ratios(rows) == [
        {"row": "llama tp2", "workload": "single", "over": "llama tp1", "ratio": 1.5, "goal": 1.62},
        {"row": "pd at 8/s", "workload": "between_events_ms p99", "ratio": 0.5, "goal": 0.7},
    ]


def test_counters_of_transfers_are_read(two_cards: Any) -> None:
    late, lost = 'frame_kv_tier_failed_loads_total{reason="late"}', 'frame_router_prefills_total{outcome="lost"}'
    page = f"# TYPE frame_kv_transfers_total counter\nframe_kv_transfers_total 5\n{late} 2\n{lost} 1\nframe_steps_total 9\n"
    assert importlib.import_module("two_card_parts").read_counters(page) == {"frame_kv_transfers_total": 5.0, late: 2.0, lost: 1.0}


@pytest.mark.slow
def test_a_late_part_is_stored_as_late(tmp_path: Path) -> None:
    report = run(tmp_path / "out.json", "--parts", "tp", "--part-seconds", "1")
    assert report["parts"]["tp"]["status"] == "late"
    assert report["kind"] == "two-cards" and report["rows"] == {} and report["ratios"] == []


def test_parts_beyond_the_budget_are_not_begun(tmp_path: Path) -> None:
    report = run(tmp_path / "out.json", "--parts", "pp,tp", "--budget", "1")
    assert {name: part["status"] for name, part in report["parts"].items()} == {"tp": "not begun", "pp": "not begun"}


def test_entry_points_without_an_installation(two_cards: Any, tmp_path: Path) -> None:
    importlib.import_module("with_wheels").write_metadata(tmp_path)
    (found,) = distributions(path=[str(tmp_path)])
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert found.name == "frame-serve"
    assert {(each.group, each.name, each.value) for each in found.entry_points} == {
        (group, name, value) for group, names in named.items() for name, value in names.items()
    }

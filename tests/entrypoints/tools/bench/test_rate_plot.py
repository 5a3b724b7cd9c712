"""Plots of `frame bench serve` over the request rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frame.core.errors import ConfigError
from frame.entrypoints.tools.bench.rate_plot import draw_rates, find_points


def make_report(scale: float) -> dict[str, Any]:
    rows = {
        f"mixed at {rate}/s": {
            "workload": "mixed",
            "rate": rate,
            "output_tokens_per_s": rate * 64,
            "first_token_ms": {"p50": scale * rate, "p99": 3 * scale * rate},
            "between_tokens_ms": {"p50": scale, "p99": 2 * scale},
        }
        for rate in (4, 1, 2)
    }
    failed = {"workload": "mixed", "rate": 8, "requests": 3, "failed": 3}
    return {"kind": "serve", "model": "tiny", "machine": {"accelerators": []}, "rows": {**rows, "mixed at 8/s": failed}}


def test_points_are_in_the_order_of_their_rates() -> None:
    points = find_points(make_report(1.0))
    assert [rate for rate, _ in points["mixed"]] == [1, 2, 4, 8]
    with pytest.raises(ConfigError, match="no rows over a request rate"):
        find_points({"kind": "serve", "rows": {"mixed": {"requests": 3}}})
    with pytest.raises(ConfigError, match="no rows over a request rate"):
        find_points({**make_report(1.0), "kind": "offline"})


def test_a_picture_beside_an_earlier_run(tmp_path: Path) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # texts stay texts
        draw_rates(make_report(1.0), tmp_path / "new.svg")
        draw_rates(make_report(1.0), tmp_path / "both.svg", make_report(2.0))
    alone, both = (tmp_path / "new.svg").read_text(), (tmp_path / "both.svg").read_text()
    for title in ("time to first token, ms", "inter-token latency, ms", "throughput, output tokens/s", "mixed p99"):
        assert title in alone, title
    assert "mixed p99 before" in both
    assert "before" not in alone

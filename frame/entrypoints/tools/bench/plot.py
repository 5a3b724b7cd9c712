"""Plots a kernel report: a group of bars per batch, a bar per plugin; its height is the ratio of
floor to time. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from frame.core.errors import ConfigError

FORMATS = (".png", ".svg")


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot to `path`. Raises ConfigError."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} has no supported file type; use {' or '.join(FORMATS)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("Plots need matplotlib; install it: pip install 'frame-serve[bench]'.") from None
    rows = [row for row in found["rows"].values() if "share_of_floor" in row]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    names = list(dict.fromkeys(row["plugin"] for row in rows))
    figure = Figure(figsize=(max(6.0, 0.5 * len(batches) * max(1, len(names))), 4.5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        bars = [(batches.index(row["batch"]) + number * width, row) for row in rows if row["plugin"] == name]
        drawn = axes.bar([at for at, _ in bars], [row["share_of_floor"] for _, row in bars], width, label=name, align="edge")
        axes.bar_label(drawn, [_label(row["microseconds"]) for _, row in bars], fontsize=7, rotation=90, padding=2)
    axes.set_xticks([at + 0.4 for at in range(len(batches))], batches, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("share of the floor (labels: µs)")
    axes.set_ylim(0, 1.25)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_title(f"{found['kind']} on {', '.join(found['machine']['accelerators']) or 'CPU'}, {found['settings']['dtype']}")
    axes.legend(fontsize=8, loc="upper left", ncols=max(1, len(names)))
    figure.savefig(path)


def _label(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"

"""Plots reports of `frame bench serve` over the request rate: TTFT, ITL and throughput, beside an
earlier report. Needs matplotlib. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from frame.core.errors import ConfigError
from frame.entrypoints.tools.bench.report import figure

Points = dict[str, list[tuple[float, Mapping[str, Any]]]]  # by workload: (requests per second, row), ascending
# of a panel: title, and the lines by label, each the path of a value in a row
_PANELS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("time to first token, ms", {"p50": "first_token_ms.p50", "p99": "first_token_ms.p99"}),
    ("inter-token latency, ms", {"p50": "between_tokens_ms.p50", "p99": "between_tokens_ms.p99"}),
    ("throughput, output tokens/s", {"": "output_tokens_per_s"}),
)
_MARKS = {"p50": "o", "p99": "^", "": "s"}


def find_points(results: Mapping[str, Any]) -> Points:
    """The rows of a report that were measured at a rate. Raises ConfigError if it has none."""
    points: Points = {}
    for name, row in results["rows"].items():
        if row.get("rate") is not None:
            points.setdefault(row.get("workload", name), []).append((row["rate"], row))
    if results.get("kind") != "serve" or not points:
        raise ConfigError("The report has no rows over a request rate; pass one that `frame bench serve --rate A,B,… --json FILE` wrote.")
    return {name: sorted(rows, key=lambda pair: pair[0]) for name, rows in points.items()}


def draw_rates(results: Mapping[str, Any], path: Path, baseline: Mapping[str, Any] | None = None) -> None:
    """Write the plot of a report to `path`; dashed lines are those of `baseline`."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(14.0, 4.5), layout="constrained")
    for axes, (title, lines) in zip(drawn.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for label, style, rates, values, mark in _list_lines(results, baseline, lines):
            axes.plot(rates, values, style, marker=mark, label=label)
        axes.set_xlabel("requests/s")
        axes.set_title(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    cards = ", ".join(results["machine"]["accelerators"]) or "CPU"
    drawn.suptitle(f"{results['model']}, measured from {cards}" + ("; dashed: the earlier run" if baseline is not None else ""))
    drawn.savefig(path)


def _list_lines(
    results: Mapping[str, Any], baseline: Mapping[str, Any] | None, lines: Mapping[str, str]
) -> Iterator[tuple[str, str, list[float], list[float], str]]:
    """(label, style, rates, values, mark) of each line of a panel."""
    for report, style, suffix in ((results, "-", ""), (baseline, "--", " before")):
        for workload, rows in ({} if report is None else find_points(report)).items():
            for name, place in lines.items():
                pairs = [(rate, value) for rate, row in rows if (value := figure(row, place)) is not None]
                label = " ".join(filter(None, (workload, name))) + suffix
                yield label, style, [rate for rate, _ in pairs], [value for _, value in pairs], _MARKS[name]

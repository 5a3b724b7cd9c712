"""Benchmark reports: JSON with a description of the machine, tables, plots, and comparisons of two
reports. Measures nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.table import Table

from frame.core.errors import ConfigError
from frame.entrypoints.configuration.hardware_probe import probe
from frame.plugins.loader import load_registry

OWN = "frame-serve"
# Values of a table: path in a row -> title
FIGURES: Mapping[str, str] = {
    "requests": "requests",
    "failed": "failed",
    "equal": "with equal tokens",
    "different": "with different tokens",
    "arrival_error_ms.p99": "arrival error p99, ms",
    "seconds": "seconds",
    "output_tokens_per_s": "output tokens/s",
    "prompt_tokens_per_s": "prompt tokens/s",
    "first_token_ms.p50": "TTFT p50, ms",
    "first_token_ms.p99": "TTFT p99, ms",
    "between_tokens_ms.p50": "ITL p50, ms",
    "between_tokens_ms.p99": "ITL p99, ms",
    "end_to_end_ms.p99": "E2E p99, ms",
    "goodput_per_s": "goodput, requests/s",
    "hit_rate": "prompt tokens from the cache, share",
    "preempted": "preemptions",
    "memory_share": "memory of a device, share",
    "replicas": "replicas",
    "floor_seconds": "floor, seconds",
    "share_of_floor": "share of the floor",
}
FORMAT = 1
KERNELS = ("attention", "moe")  # report kinds with a row per plugin and batch


def report(kind: str, rows: Mapping[str, dict[str, Any]], **about: Any) -> dict[str, Any]:
    """The report of one `frame bench` run."""
    return {"format": FORMAT, "kind": kind, "machine": machine(), **about, "rows": dict(rows)}


def machine() -> dict[str, Any]:
    """The description of machine and software."""
    hardware = probe(load_registry().records("platform"))
    return {
        "system": platform.platform(),
        "cores": hardware.cpu_cores,
        "cpu_features": sorted(hardware.cpu_features),
        "accelerators": [accelerator.name for accelerator in hardware.accelerators],
        "load_before": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def _versions() -> Iterator[tuple[str, str]]:
    """The versions of frame and its installed dependencies."""
    try:
        names = sorted({OWN, *(Requirement(line).name for line in requires(OWN) or ())})
    except PackageNotFoundError:  # frame is not installed
        return
    for name in names:
        with suppress(PackageNotFoundError):
            yield name, version(name)


def table(results: Mapping[str, Any]) -> Table:
    """The report as a table: a column per row of the report, a line per value. Kernels: a line per
    batch, a column per plugin. Start: a line per phase."""
    rows = results["rows"]
    if results["kind"] in KERNELS:
        return _kernels(results["kind"], rows)
    if results["kind"] == "startup":
        drawn = _empty("frame bench startup", ["seconds"])
        for name, row in rows.items():
            drawn.add_row(name, _shown(row["seconds"]))
        return drawn
    drawn = _empty(f"frame {'' if results['kind'] in ('simulate', 'replay') else 'bench '}{results['kind']}", rows)
    for path, title in FIGURES.items():
        figures = [figure(row, path) for row in rows.values()]
        if any(value is not None for value in figures):
            drawn.add_row(title, *map(_shown, figures))
    return drawn


def _kernels(kind: str, rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """Microseconds, and the ratio of floor to time."""
    names = list(dict.fromkeys(row["plugin"] for row in rows.values()))
    drawn = _empty(f"frame bench {kind}: µs (share of the floor)", ["floor, µs", *names])
    for batch in dict.fromkeys(row["batch"] for row in rows.values()):
        by_plugin = {row["plugin"]: row for row in rows.values() if row["batch"] == batch}
        floor = next((row["floor_microseconds"] for row in by_plugin.values() if "floor_microseconds" in row), None)
        drawn.add_row(batch, _shown(floor), *(_kernel_cell(by_plugin.get(name, {})) for name in names))
    for name, sentence in {row["plugin"]: row["refused"] for row in rows.values() if "refused" in row}.items():
        drawn.caption = f"{drawn.caption or ''}{name}: {sentence}\n"
    return drawn


def _kernel_cell(row: Mapping[str, Any]) -> str:
    return f"{_shown(row['microseconds'])} ({row['share_of_floor']:.2f})" if "microseconds" in row else "–"


def _comparison_by_line(first: Mapping[str, Any], second: Mapping[str, Any], names: Iterable[str], figure_name: str) -> Table:
    drawn = _empty(figure_name, ["the first", "the second", "ratio"])
    for name in names:
        before, after = figure(first["rows"][name], figure_name), figure(second["rows"][name], figure_name)
        if before is not None and after is not None:
            drawn.add_row(name, _shown(before), _shown(after), f"{after / before:.2f}×" if before else "")
    return drawn


def comparison(first: Mapping[str, Any], second: Mapping[str, Any]) -> Table:
    """Compare the rows that both reports have: values of the second, and their ratios to the first.
    Raises ConfigError if there is no such row."""
    names = [name for name in first["rows"] if name in second["rows"]]
    if not names:
        raise ConfigError("The two reports have no row in common; compare runs of the same workloads.")
    if (kind := second.get("kind")) in KERNELS or kind == "startup":
        return _comparison_by_line(first, second, names, "microseconds" if kind in KERNELS else "seconds")
    drawn = _empty("the second, and its ratio to the first", names)
    for path, title in FIGURES.items():
        pairs = [(figure(first["rows"][name], path), figure(second["rows"][name], path)) for name in names]
        if any(after is not None for _, after in pairs):
            drawn.add_row(title, *(f"{_shown(b)} ({b / a:.2f}×)" if a and b else _shown(b) for a, b in pairs))
    return drawn


def _empty(title: str, columns: Iterable[str]) -> Table:
    drawn = Table(title=title, title_justify="left")
    drawn.add_column("")
    for name in columns:
        drawn.add_column(name, justify="right")
    return drawn


def read(path: Path) -> dict[str, Any]:
    """Read a report. Raises ConfigError."""
    try:
        results = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError:
        raise ConfigError(f"{path} is not JSON; pass a file that `frame bench … --json FILE` wrote.") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a report of this version of `frame bench`.")
    return results


def figure(row: Mapping[str, Any], path: str) -> float | None:
    """The value at a dotted path; None if the row has none."""
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _shown(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.2f}"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Plot a kernel report: a group of bars per batch, a bar per plugin; its height is the ratio of
    floor to time. Needs matplotlib."""
    from matplotlib.figure import Figure

    rows = [row for row in results["rows"].values() if "share_of_floor" in row]
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
    axes.set_title(f"{results['kind']} on {', '.join(results['machine']['accelerators']) or 'CPU'}, {results['settings']['dtype']}")
    axes.legend(fontsize=8, loc="upper left", ncols=max(1, len(names)))
    figure.savefig(path)


def _label(microseconds: float) -> str:
    return f"{microseconds:,.0f}" if microseconds >= 100 else f"{microseconds:.1f}"

"""The error of `frame simulate` against stored measurements: `python benchmarks/simulation.py
CONFIGS` prints a table in Markdown.

CONFIGS: a folder with llama-3.1-8b/config.json and, if there, qwen3-14b and qwen3-30b-a3b. Runs no
model and needs no device.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

from frame.config.schema import FrameConfig
from frame.entrypoints.tools.bench.report import figure
from frame.entrypoints.tools.bench.workload import reference_workloads
from frame.entrypoints.tools.simulate.simulation import Simulation, parse_cluster
from frame.entrypoints.tools.simulate.workload import Arrival, Distribution

RESULTS = Path(__file__).parent / "results"
Cell = tuple[str, float, float]  # name, measured, simulated
TABLES = (  # report, model, parallel ranks
    ("2026-11-21-h200-table-7", "llama-3.1-8b", {}),
    ("2026-11-21-h200-table-7", "qwen3-14b", {}),
    ("2026-11-21-h200-table-7", "qwen3-30b-a3b", {}),
    ("2026-11-23-llama-3.1-8b-tp2-h200-x2", "llama-3.1-8b", {"tp": 2}),
    ("2026-11-22-llama-3.1-8b-pp2-h200-x2", "llama-3.1-8b", {"pp": 2}),
    ("2026-11-22-qwen3-30b-a3b-tp2-p2p-h200-x2", "qwen3-30b-a3b", {"tp": 2}),
    ("2026-11-23-qwen3-30b-a3b-tp2-ep2-p2p-h200-x2", "qwen3-30b-a3b", {"tp": 2, "ep": 2}),
)
ONLINE = (
    "output_tokens_per_s",
    "first_token_ms.p50",
    "first_token_ms.p99",
    "between_tokens_ms.p50",
    "between_events_ms.p50",
    "between_events_ms.p99",
)


def build(folder: Path, parallel: dict[str, int]) -> Simulation:
    config = {"model": {"path": str(folder), "skip_tokenizer_init": True}, "parallel": parallel}
    return Simulation.build(
        FrameConfig.model_validate(config), parse_cluster(f"{math.prod(parallel.values()) if 'ep' not in parallel else 2}xh200")
    )


def compare_workloads(folder: Path, report: str, model: str, parallel: dict[str, int]) -> Iterator[Cell]:
    """Tokens/s of the reference workloads in a stored report."""
    simulation, workloads = build(folder, parallel), reference_workloads()
    rows = json.loads((RESULTS / f"{report}.json").read_text())["rows"][model]["rows"]
    for name, measured in rows.items():
        jobs = workloads[name].jobs(simulation.plan.resolved.model.vocab_size, 0)
        row = simulation.run(Arrival(0.0, job.prompt, job.output) for job in jobs)
        ranks = ", ".join(f"{key} {value}" for key, value in parallel.items()) or "one card"
        yield f"{model}, {ranks}, {name}, tokens/s", measured["tokens_per_s"], row[f"{measured['counts']}_tokens_per_s"]


def compare_arrivals(folder: Path) -> Iterator[Cell]:
    """Latencies of a server at three rates, and with all requests at once."""
    simulation = build(folder, {})
    runs = [
        run
        for run in json.loads((RESULTS / "2026-11-24-arrivals-llama-3.1-8b-h200.json").read_text())["runs"]
        if run["date"] == "2026-11-24"
    ]
    at_once = json.loads((RESULTS / "2026-11-22-saturation-llama-3.1-8b-h200.json").read_text())["new_prompts"]["512"][0]
    for run in [*runs, {**at_once, "rate": 1e6}]:
        drawn = Distribution(run["rate"], run["requests"] / run["rate"], (512, 1536), (96, 288))
        row = simulation.run(drawn.draw(simulation.plan.resolved.model.vocab_size, 0))
        for path in ONLINE:
            measured, simulated = figure(run, path), figure(row, path)
            if measured is not None and simulated is not None:
                yield f"{run['rate']:g} requests/s, {path}" if run["rate"] < 1e6 else f"400 at once, {path}", measured, simulated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path)
    configs = parser.parse_args().configs
    print("| cell | measured | simulated | error |\n| --- | --- | --- | --- |")
    cells = [
        cell
        for report, model, parallel in TABLES
        if (configs / model).is_dir()
        for cell in compare_workloads(configs / model, report, model, parallel)
    ]
    for name, measured, simulated in [*cells, *compare_arrivals(configs / "llama-3.1-8b")]:
        print(f"| {name} | {measured:,.1f} | {simulated:,.1f} | {simulated / measured - 1:+.0%} |")


if __name__ == "__main__":
    main()

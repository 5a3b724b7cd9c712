"""Times gate, up and their activation in one kernel, and in the one that fetches with a warp of its
own, beside PyTorch's product and the activation's kernel. A GPU of compute capability 9.0, no
model.

Large products take all the power that the chip may have, and its clock follows what ran before. So
the order is drawn anew for each round, and each form runs for as long before it is timed as while
it is.

python benchmarks/gated_linear.py --out benchmarks/results/gated-linear.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from frame.kernels.elementwise.activation import silu_mul
from frame.kernels.launch import count_tma_processors
from frame.kernels.linear.gated_linear import gated_linear, is_faster
from frame.kernels.linear.gated_prefill import BATCHES, gated_prefill

DEVICE = torch.device("cuda")
SHAPES = {"0.6B": (1024, 3072), "1.7B": (2048, 6144), "8B": (4096, 14336), "14B": (5120, 17408)}
ROWS = (128, 256, 512, 1024, 2048, 4096, 8192)
ROUNDS = 5
MILLISECONDS = 30  # that a form runs before it is timed, and then again


def captured(step: Callable[[int], object], calls: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(calls):
                step(index)
    return graph


def timed(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Milliseconds of them all."""
    launch_dependents, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    launch_dependents.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return launch_dependents.elapsed_time(end)


def by_turns(steps: dict[str, Callable[[int], object]], calls: int) -> dict[str, list[float]]:
    """Microseconds a call, of each round."""
    graphs = {name: captured(step, calls) for name, step in steps.items()}
    replays = {name: 1 + int(MILLISECONDS / timed(graph, 1)) for name, graph in graphs.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for name in order.sample(list(steps), len(steps)):
            timed(graphs[name], replays[name])
            times[name].append(timed(graphs[name], replays[name]) * 1e3 / calls / replays[name])
    return times


def measured(model: str, rows: int, inputs: int, inner: int) -> dict[str, object]:
    x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
    sets = max(3, min(8, (150 << 20) // (4 * inputs * inner) + 1))
    weights = [torch.randn(2 * inner, inputs, device=DEVICE, dtype=torch.bfloat16) / inputs**0.5 for _ in range(sets)]
    programs = count_tma_processors(DEVICE)
    steps: dict[str, Callable[[int], object]] = {
        "product": lambda index: F.linear(x, weights[index % sets]),
        "apart": lambda index: silu_mul(F.linear(x, weights[index % sets])),
        "together": lambda index: gated_linear(x, weights[index % sets], programs),
        "fetched": lambda index: gated_prefill(x, weights[index % sets], programs),
    }
    times = by_turns(steps, sets)
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {
        "model": model,
        "rows": rows,
        **{f"{name}_us": round(median, 1) for name, median in medians.items()},
        "tflops": {name: round(4 * rows * inputs * inner / median / 1e6) for name, median in medians.items()},
        "chosen": is_faster(rows, inner, programs, BATCHES),
        "rounds_us": {name: [round(time, 1) for time in each] for name, each in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    out: Path | None = parser.parse_args().out
    results = []
    for rows in reversed(ROWS):
        for model, (inputs, inner) in SHAPES.items():
            results.append(measured(model, rows, inputs, inner))
            print(json.dumps(results[-1]), flush=True)
            if out is not None:
                report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
                out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

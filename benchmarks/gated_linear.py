"""Times gate, up and their activation in one kernel beside PyTorch's product and the activation's kernel, turn by turn. A GPU, no model.

python benchmarks/gated_linear.py --out benchmarks/results/gated-linear.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from frame.kernels.activation import silu_mul
from frame.kernels.gated_linear import gated_linear, is_faster, processors

DEVICE = torch.device("cuda")
SHAPES = {"0.6B": (1024, 3072), "1.7B": (2048, 6144), "8B": (4096, 14336), "14B": (5120, 17408)}
ROWS = (128, 256, 384, 512, 1024, 2048, 4096, 8192)
ROUNDS = 7


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


def by_turns(steps: tuple[Callable[[int], object], ...], calls: int) -> list[float]:
    """Microseconds a call: large products heat the chip, which slows what comes later."""
    graphs = [captured(step, calls) for step in steps]
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for graph, found in zip(graphs, times, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) * 1e3 / calls)
    return [statistics.median(found) for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    out: Path | None = parser.parse_args().out
    programs = processors(DEVICE)
    results = []
    for name, (inputs, inner) in SHAPES.items():
        for rows in ROWS:
            x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
            sets = max(1, min(8, (150 << 20) // (4 * inputs * inner) + 1))
            weights = [torch.randn(2 * inner, inputs, device=DEVICE, dtype=torch.bfloat16) / inputs**0.5 for _ in range(sets)]

            def apart(index: int, x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> object:
                return silu_mul(F.linear(x, weights[index % len(weights)]))

            def together(index: int, x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> object:
                return gated_linear(x, weights[index % len(weights)], programs)

            first, second = by_turns((apart, together), 8 if rows * inputs * inner < 1 << 36 else 3)
            results.append(
                {
                    "model": name,
                    "rows": rows,
                    "apart_us": round(first, 1),
                    "together_us": round(second, 1),
                    "tflops": round(4 * rows * inputs * inner / second / 1e6),
                    "chosen": is_faster(rows, inner, programs),
                }
            )
            print(json.dumps(results[-1]), flush=True)
    if out is not None:
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

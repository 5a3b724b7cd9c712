"""Times the ways in which the `torch_native` MoE runner multiplies experts, on this CPU: microseconds a layer, best of five.

Run it with `python benchmarks/moe_cpu.py`; the thresholds in `frame/plugins/moe_runners/torch_native.py` follow its table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from frame.core.interfaces.moe import Dispatched
from frame.plugins.moe_runners.torch_native import prefers_dense, run_dense, run_each, run_grouped

WAYS = {"dense": run_dense, "grouped": run_grouped, "each": run_each}
SHAPES = ((8, 2, 256, 128), (32, 4, 256, 64), (64, 8, 1024, 256), (8, 2, 1024, 2048))  # experts, top k, hidden, inner
TOKENS = (1, 8, 32, 64, 256, 2048)
MOST_DENSE = 1 << 25  # numbers in the widest intermediate that is tried


def best(act: Callable[[], object], seconds: float) -> float:
    """Microseconds of one call."""
    act()
    start = time.perf_counter()
    act()
    repeats = max(1, int(seconds / 5 / max(time.perf_counter() - start, 1e-6)))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            act()
        times.append((time.perf_counter() - start) / repeats)
    return min(times) * 1e6


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.2, help="for one number of the table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{'type':9} {'experts':>7} {'top k':>5} {'hidden':>6} {'inner':>5} {'tokens':>6} " + " ".join(f"{way:>9}" for way in WAYS) + "  taken")
    for dtype in (torch.bfloat16, torch.float32):
        for experts, top, hidden, inner in SHAPES:
            gate_up = torch.randn(experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
            down = (torch.randn(hidden, experts, inner, dtype=dtype) * inner**-0.5).transpose(0, 1)
            for count in TOKENS:
                weights, ids = torch.rand(count, experts).softmax(-1).topk(top)
                tokens = Dispatched(torch.randn(count, hidden, dtype=dtype), ids, weights)
                row = []
                for name, run in WAYS.items():
                    skip = name == "dense" and count * experts * inner * 2 > MOST_DENSE
                    row.append("-" if skip else f"{best(lambda run=run, tokens=tokens: run(tokens, gate_up, down), arguments.seconds):.0f}")
                taken = "dense" if prefers_dense(tokens, down) else "grouped"
                cells = " ".join(f"{cell:>9}" for cell in row)
                print(f"{str(dtype)[6:]:9} {experts:7} {top:5} {hidden:6} {inner:5} {count:6} {cells}  {taken}", flush=True)


if __name__ == "__main__":
    main()

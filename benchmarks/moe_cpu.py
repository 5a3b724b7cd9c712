"""Times the ways in which the `torch_native` MoE runner multiplies experts, on this CPU:
microseconds a layer, best of five.

Run it with `python benchmarks/moe_cpu.py`; the thresholds in
`frame/plugins/moe_runners/torch_native.py` follow its table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from frame.core.interfaces.moe import DispatchOutput
from frame.models.layers.weights.expert_weights import pack_small_experts
from frame.plugins.moe_runners.torch_native import prefers_dense, run_dense, run_each, run_grouped

WAYS = {"dense": run_dense, "grouped": run_grouped, "each": run_each}  # dense: packed weights, in bfloat16 alone
SHAPES = ((8, 2, 256, 128), (32, 4, 256, 64), (64, 8, 1024, 256), (8, 2, 1024, 2048))  # experts, top k, hidden, inner
TOKENS = (1, 8, 32, 64, 256, 2048)


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
    ways = " ".join(f"{way:>9}" for way in WAYS)
    print(f"{'type':9} {'experts':>7} {'top k':>5} {'hidden':>6} {'inner':>5} {'tokens':>6} {ways}  taken")
    for dtype in (torch.bfloat16, torch.float32):
        for experts, top, hidden, inner in SHAPES:
            gate_up = torch.randn(experts, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
            down = torch.randn(experts, hidden, inner, dtype=dtype) * inner**-0.5
            layer = nn.Module()
            layer.gate_up, layer.down = gate_up, down
            pack_small_experts(layer, gate_up, down)
            for count in TOKENS:
                weights, ids = torch.rand(count, experts).softmax(-1).topk(top)
                tokens = DispatchOutput(torch.randn(count, hidden, dtype=dtype), ids, weights)
                row = []
                for name, run in WAYS.items():
                    packed = getattr(layer, "packed_down", None)
                    if name == "dense":
                        act = None if packed is None else partial(run, tokens, layer.packed_gate_up, packed, experts)
                    else:
                        act = partial(run, tokens, gate_up, down)
                    row.append("-" if act is None else f"{best(act, arguments.seconds):.0f}")
                taken = "dense" if packed is not None and prefers_dense(tokens, experts) else "grouped"
                cells = " ".join(f"{cell:>9}" for cell in row)
                print(f"{str(dtype)[6:]:9} {experts:7} {top:5} {hidden:6} {inner:5} {count:6} {cells}  {taken}", flush=True)


if __name__ == "__main__":
    main()

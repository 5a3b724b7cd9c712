"""Times a mixture-of-experts layer on a GPU: routing, and each runner, against what the card could do at best; writes JSON.

Tokens are routed at random; a step's floor is the time to read the experts that it meets once, or that of their multiplications,
whichever is longer, at the rates given. Launches are timed as CUDA graphs of several draws in a row, so that no weights stay in the cache.

    python benchmarks/moe.py
    python benchmarks/moe.py --shape deepseek-v3-share --runners triton --tokens 1,64 --out benchmarks/results/moe.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from frame.core.interfaces.moe import Dispatched, MoERunner
from frame.models.layers.router import Router, RoutingRule
from frame.plugins.loader import load_registry
from frame.testing.attention_batch import build_context


@dataclass(frozen=True)
class Shape:
    """One layer in bfloat16. `experts` may be those that one of several GPUs holds."""

    experts: int
    top: int
    hidden: int
    inner: int

    def numbers(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.inner


SHAPES = {
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v3-share": Shape(32, 8, 7168, 2048),
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096, 8192)


def layer(shape: Shape) -> nn.Module:
    experts = nn.Module()
    experts.gate_up = torch.empty(shape.experts, 2 * shape.inner, shape.hidden, dtype=torch.bfloat16, device="cuda").normal_()
    experts.down = torch.empty(shape.experts, shape.hidden, shape.inner, dtype=torch.bfloat16, device="cuda").normal_()
    experts.gate_up.mul_(shape.hidden**-0.5)
    experts.down.mul_(shape.inner**-0.5)
    return experts


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Of one call: the median over replays of a graph of them all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[1:])


def measure(shape: Shape, runners: dict[str, MoERunner], counts: Sequence[int], rates: tuple[float, float]) -> list[dict[str, float | str]]:
    """A row for each number of tokens and runner; `rates` are bytes and operations a second."""
    context, experts = build_context("cuda", torch.bfloat16, 16), layer(shape)
    router = Router(context, "gate", shape.experts, shape.hidden, RoutingRule(shape.top, renormalize=True)).cuda()
    router.weight.data.normal_(std=shape.hidden**-0.5)
    found: list[dict[str, float | str]] = []
    for count in counts:
        draws = 12 if count <= 16 else 6 if count <= 64 else 3
        xs = [torch.randn(count, shape.hidden, dtype=torch.bfloat16, device="cuda") for _ in range(draws)]
        routed = [Dispatched(x, *router(x)) for x in xs]
        in_use = statistics.mean(len(tokens.ids.unique()) for tokens in routed)
        floor = max(2 * in_use * shape.numbers() / rates[0], 2 * count * shape.top * shape.numbers() / rates[1])
        routing = microseconds([lambda x=x: router(x) for x in xs])  # type: ignore[misc]
        for name, runner in runners.items():
            took = microseconds([lambda tokens=tokens, runner=runner: runner.run(tokens, experts) for tokens in routed])  # type: ignore[misc]
            row: dict[str, float | str] = {"tokens": count, "runner": name, "us": took, "routing_us": routing, "floor_us": floor * 1e6}
            row |= {"TB/s": 2 * in_use * shape.numbers() / took / 1e6, "TFLOP/s": 2 * count * shape.top * shape.numbers() / took / 1e6}
            found.append(row)
            print(f"{count:6} {name:14}" + "".join(f"{value:11.1f}" for value in list(row.values())[2:]), flush=True)
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--runners", default="triton,torch_grouped", help="with commas between them")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--terabytes", type=float, default=4.39, help="that the card reads a second")
    parser.add_argument("--teraflops", type=float, default=780.0, help="that it multiplies a second, in bfloat16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    registry, context = load_registry(installed=False), build_context("cuda", torch.bfloat16, 16)
    runners = {name: registry.load(registry.get("moe_runner", name))(context) for name in arguments.runners.split(",")}
    counts = [int(count) for count in arguments.tokens.split(",")]
    print(f"{'tokens':>6} {'runner':14}" + "".join(f"{name:>11}" for name in ("µs", "routing", "floor", "TB/s", "TFLOP/s")))
    rows = measure(SHAPES[arguments.shape], runners, counts, (arguments.terabytes * 1e12, arguments.teraflops * 1e12))
    if arguments.out is not None:
        shape = {"name": arguments.shape, **asdict(SHAPES[arguments.shape])}
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": shape, "rows": rows}
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

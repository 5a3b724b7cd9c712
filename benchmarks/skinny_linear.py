"""Times products of few rows against PyTorch's and against reading the weight once, on a GPU, and
writes JSON.

Each time is that of one launch among many in a CUDA graph, over as many copies of the weight as do
not fit the L2 cache. Two parts:
`products` tries every plan that fits, shape by shape; `layers` runs the four products of each layer
of a model, one after the other, as a decode step does, with the plans that frame picks.
FRAME_NO_PDL=1 shows what launches that overlap are worth.

    python benchmarks/skinny_linear.py --rows 1 2 4 8 16 --out benchmarks/results/skinny-linear.json
    python benchmarks/skinny_linear.py --only 0.6B --part layers
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import seconds

from frame.kernels.linear.linear import skinny_linear
from frame.kernels.linear.linear_plan import Plan, choose_plan
from frame.kernels.linear.linear_stream import stream_linear

Call = Callable[[], torch.Tensor]
# model -> layers, and (outputs, inputs) of each product of a layer and of the head
MODELS: dict[str, tuple[int, dict[str, tuple[int, int]]]] = {
    "Qwen3-0.6B": (28, {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072), "head": (151936, 1024)}),
    "Llama-3.1-8B": (32, {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336), "head": (128256, 4096)}),
    "Qwen3-14B": (40, {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408), "head": (151936, 5120)}),
    "Qwen3-30B-A3B": (48, {"qkv": (5120, 2048), "o": (2048, 4096), "router": (128, 2048), "head": (151936, 2048)}),
}
WEIGHTS = 256 << 20  # bytes that a graph rotates over: several times the L2 cache
LAUNCHES = 64


def candidates(rows: int, outputs: int) -> Iterator[Plan]:
    """Plans worth trying."""
    share = outputs // 128
    for chunks, depth in itertools.product((2, 4, 8), (3, 4, 5, 6, 8, 11)):
        if outputs % (128 * 8) == 0 and share <= 136 and 90 << 10 < depth * chunks * 64 * (share + max(8, rows)) <= 200 << 10:
            yield Plan("stream", 4, depth, share, chunks)
    if rows <= 2:
        for each, warps, depth in itertools.product((2, 4, 8), (2, 4, 8), (1, 2, 3)):
            yield Plan("vector", warps, depth, outputs=each)
    for chunks, warps, depth in itertools.product((1, 2, 4), (2, 4, 8), (1, 2, 3)):
        if chunks * depth <= 8:
            yield Plan("fragment", warps, depth, chunks=chunks)


def microseconds(calls: Sequence[Call], repeats: int = 7) -> float:
    """Of one call, all of them in a CUDA graph; median over replays."""
    return seconds(lambda number: calls[number](), len(calls), len(calls), repeats) * 1e6


def multiply(x: torch.Tensor, weight: torch.Tensor, some: Plan | None) -> torch.Tensor:
    if some is None:
        return F.linear(x, weight)
    return stream_linear(x, weight, None, some) if some.kernel == "stream" else skinny_linear(x, weight, None, some)


def copies(memory: torch.Tensor, outputs: int, inputs: int) -> list[torch.Tensor]:
    """Weights of one shape, side by side in `memory`, as many as a graph rotates over."""
    size = outputs * inputs
    count = max(1, min(memory.numel() // size, WEIGHTS // (2 * size)))
    return list(memory[: count * size].view(count, outputs, inputs))


def product(memory: torch.Tensor, rows: int, outputs: int, inputs: int, trial: bool) -> dict[str, Any]:
    """One shape and number of rows: PyTorch, frame's pick, and every candidate when `trial`."""
    weights = copies(memory, outputs, inputs)
    rotated = [weights[index % len(weights)] for index in range(max(len(weights), LAUNCHES if len(weights) > 1 else 4))]
    x = torch.randn(rows, inputs, device="cuda", dtype=memory.dtype)

    def time(chosen: Plan | None) -> float:
        return microseconds([lambda weight=weight: multiply(x, weight, chosen) for weight in rotated])

    picked = choose_plan(rows, outputs, inputs, streams=True)
    found = {"torch": round(time(None), 2), "picked": round(time(picked), 2), "plan": str(picked)}
    if trial:
        timed = sorted((round(time(some), 2), str(some)) for some in candidates(rows, outputs))
        found["best"] = timed[:5]
    bytes_read = 2 * outputs * inputs
    return {"rows": rows, "outputs": outputs, "inputs": inputs, "tb_per_second": round(bytes_read / found["picked"] / 1e6, 2), **found}


def layers(memory: torch.Tensor, rows: int, model: str) -> dict[str, Any]:
    """Milliseconds of a whole model's products, from as many layers as fit `memory`."""
    count, shapes = MODELS[model]
    head = shapes["head"]
    shapes = {name: shape for name, shape in shapes.items() if name != "head"}
    inputs = {size: torch.randn(rows, size, device="cuda", dtype=memory.dtype) for _, size in (*shapes.values(), head)}
    sizes = [a * b for a, b in shapes.values()]
    run = min(count, memory.numel() // sum(sizes))
    places = memory[: run * sum(sizes)].split(sizes * run)
    weights = [place.view(shape) for shape, place in zip([*shapes.values()] * run, places, strict=True)]

    def total(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        def step() -> torch.Tensor:
            for weight in weights:
                product(inputs[weight.shape[1]], weight)
            return weight

        last = memory[: head[0] * head[1]].view(head)
        return microseconds([step]) / run * count + microseconds([lambda: product(inputs[head[1]], last)] * 3)

    def picked(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return multiply(x, weight, choose_plan(rows, *weight.shape, streams=True))

    bytes_read = 2 * (count * sum(sizes) + head[0] * head[1])
    times = {"torch": total(F.linear), "frame": total(picked)}
    return {"model": model, "rows": rows, "bytes": bytes_read, **{name: round(time / 1e3, 4) for name, time in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--only", default="", help="models whose name holds this text")
    parser.add_argument("--part", choices=["products", "trials", "layers"], nargs="+", default=["products", "layers"])
    parser.add_argument("--out", type=Path, default=None, help="file for the JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    memory = torch.randn(1 << 30, device="cuda", dtype=torch.bfloat16) * 0.02
    found: list[dict[str, Any]] = []
    for model, (_, shapes) in MODELS.items():
        if arguments.only not in model:
            continue
        for rows in arguments.rows:
            if {"products", "trials"} & set(arguments.part):
                for name, shape in shapes.items():
                    found.append({"model": model, "product": name, **product(memory, rows, *shape, trial="trials" in arguments.part)})
                    print(json.dumps(found[-1]), flush=True)
            if "layers" in arguments.part:
                found.append(layers(memory, rows, model))
                print(json.dumps(found[-1]), flush=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "dtype": "bfloat16", "results": found}
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Times the linear layers of decoder layers (Llama-3.1-8B's shapes, bf16, PyTorch's products) with
and without low-rank deltas on a GPU, and prints a line of JSON for each case.

All runs are CUDA graphs. `ratio` is the speed that is left with the shrink on a side stream, as
layers run it, and `one_stream` without. `plan`, `shrink` and `expand` are microseconds: of one
plan, and of each layer's launch alone. `gated` is of gate and up in microseconds, without the
shrink: `base` without adapters, `separate` with product, `expand` and `silu_mul`, `fused` with
product and `expand_gated`, and the last three alone. Variants change the sizes that `choose_sizes`
picks, and the rows of a tile.

    python benchmarks/lora_kernels.py --out benchmarks/results/lora-kernels.json
    python benchmarks/lora_kernels.py --rank 64 --case 64 1 --variant default splits*2
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import seconds

from frame.adapters.deltas import LayerPages, RowPlan
from frame.adapters.triton_deltas import TiledPlan, TritonDeltas
from frame.interfaces.adapter import PAGE_RANKS
from frame.kernels.elementwise.activation import silu_mul
from frame.kernels.lora.products import ProductSizes, Tiles, choose_sizes
from frame.kernels.lora.row_tiles import group_rows
from frame.models.layers.plain_matmul import PlainMatmul

SHAPES = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336)), "down": (14336, (4096,))}
CASES = (1, 1), (8, 1), (8, 8), (64, 0), (64, 1), (64, 32), (256, 1), (256, 32), (4096, 1), (4096, 4)  # rows, adapters
DEPTH = 4  # decoder layers in a graph, whose weights do not fit the L2 cache
VARIANTS: dict[str, dict[str, float]] = {  # factors of fields of `ProductSizes`; `block`: the rows of a tile
    "default": {},
    "splits/2": {"splits": 0.5},
    "splits*2": {"splits": 2},
    "splits*4": {"splits": 4},
    "inputs/2": {"inputs": 0.5},
    "inputs*2": {"inputs": 2},
    "outputs/2": {"outputs": 0.5},
    "outputs*2": {"outputs": 2},
    "outputs*2 warps*2": {"outputs": 2, "expand_warps": 2},
    "outputs/2 warps/2": {"outputs": 0.5, "expand_warps": 0.5},
    "expand_warps/2": {"expand_warps": 0.5},
    "expand_warps*2": {"expand_warps": 2},
    "shrink_warps*2": {"shrink_warps": 2},
    "stages+1": {"stages": 4 / 3},
    "registers*2": {"registers": 2},
    "columns*2": {"columns": 2},
    "pages/2": {"pages": 0.5},
    "block1": {"block": 1},
    "block8": {"block": 8},
    "block16": {"block": 16},
    "block32": {"block": 32},
    "block64": {"block": 64},
    "block128": {"block": 128, "splits": 2, "inputs": 0.5, "shrink_warps": 2},
}


class Layers:
    """Weights and adapter pages of `DEPTH` decoder layers."""

    def __init__(self, places: int, rank: int) -> None:
        self.num_pages = -(-rank // PAGE_RANKS)
        self.places = places
        elements = sum(PAGE_RANKS * (len(splits) * inputs + sum(splits)) for inputs, splits in SHAPES.values())
        pool = torch.randn(places * self.num_pages, DEPTH * elements, device="cuda", dtype=torch.bfloat16) * 0.02
        numbers = torch.arange(places * self.num_pages, dtype=torch.int32, device="cuda")
        self.place_pages = numbers.view(places, self.num_pages)
        self.counts = torch.full((places,), self.num_pages, dtype=torch.int32, device="cuda")
        self.linears: list[tuple[str, torch.Tensor, LayerPages]] = []
        first = 0
        for _ in range(DEPTH):
            for name, (inputs, splits) in SHAPES.items():
                outputs, size = sum(splits), PAGE_RANKS * len(splits) * inputs
                a = pool[:, first : first + size].unflatten(1, (len(splits), PAGE_RANKS, inputs))
                b = pool[:, first + size : first + size + PAGE_RANKS * outputs].unflatten(1, (1, outputs, PAGE_RANKS))
                first += size + PAGE_RANKS * outputs
                scales = torch.ones(places, outputs, device="cuda")
                layer = LayerPages(a, b, splits, self.counts, scales, torch.zeros_like(self.counts))
                self.linears.append((name, torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02, layer))


def microseconds(call: Callable[[], object], repeats: int = 9) -> float:
    """Of `call` in a CUDA graph; median over replays."""
    return seconds(lambda _: call(), 1, 1, repeats) * 1e6


def make_operations(factors: dict[str, float]) -> TritonDeltas:
    def choose(
        block: int, inputs: int, splits: tuple[int, ...], max_pages: int, value_bytes: int, shared_memory: int
    ) -> ProductSizes:  # fmt: skip
        sizes = choose_sizes(block, inputs, splits, max_pages, value_bytes, shared_memory)
        chosen = {name: value for name in factors if name != "block" and (value := getattr(sizes, name)) is not None}
        return replace(sizes, **{name: max(1, int(value * factors[name])) for name, value in chosen.items()})

    return TritonDeltas(choose)


def make_plan(operations: TritonDeltas, plan: RowPlan, block: int | None) -> TiledPlan:
    if block is None:
        return operations.plan_rows(plan)
    rows = len(plan.places)
    if block == 1:
        return TiledPlan(plan.places, plan.place_pages, tiles=Tiles(plan.places, plan.places, block, rows, 0))
    keys, lanes, counters = group_rows(plan.places, None, len(plan.place_pages), 0, block)
    return TiledPlan(plan.places, plan.place_pages, tiles=Tiles(keys, lanes, block, rows, 0, counters=counters))


def measure(layers: Layers, rows: int, adapters: int, variant: str) -> dict[str, Any]:
    factors, side = VARIANTS[variant], torch.cuda.Stream()
    operations, block = make_operations(factors), factors.get("block")
    places = torch.arange(rows, dtype=torch.int32, device="cuda") % adapters if adapters else torch.full((rows,), -1, device="cuda").int()
    plan = RowPlan(places, layers.place_pages)
    xs = {inputs: torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16) for inputs, _ in SHAPES.values()}
    tiled = make_plan(operations, plan, None if block is None else int(block))

    def base() -> None:
        for _, weight, _ in layers.linears:
            F.linear(xs[weight.shape[1]], weight)

    def run(overlaps: bool) -> None:
        for _, weight, layer in layers.linears:
            x, main = xs[weight.shape[1]], torch.cuda.current_stream()
            if overlaps:
                side.wait_stream(main)
                with torch.cuda.stream(side):
                    shrunk = operations.shrink(x, layer, tiled)
            else:
                shrunk = operations.shrink(x, layer, tiled)
            out = F.linear(x, weight)
            if overlaps:
                main.wait_stream(side)
            operations.expand(out, shrunk, layer, tiled)

    without, beside, after = microseconds(base), microseconds(lambda: run(True)), microseconds(lambda: run(False))
    found = {
        "variant": variant, "rows": rows, "adapters": adapters, "tile": tiled.tiles.block, "tiles": len(tiled.tiles.keys),
        "ratio": round(without / beside, 4), "one_stream": round(without / after, 4), "base": round(without / DEPTH, 1),
        "plan": round(microseconds(lambda: make_plan(operations, plan, tiled.tiles.block)), 2),
    }  # fmt: skip
    for name in SHAPES:
        of_name = [(weight, layer) for each, weight, layer in layers.linears if each == name] * 4
        x, outputs = xs[of_name[0][0].shape[1]], of_name[0][0].shape[0]
        out, shrunk = torch.zeros(rows, outputs, device="cuda", dtype=torch.bfloat16), operations.shrink(x, of_name[0][1], tiled)
        shrinks = microseconds(lambda: [operations.shrink(x, layer, tiled) for _, layer in of_name])  # noqa: B023 - runs at once
        expands = microseconds(lambda: [operations.expand(out, shrunk, layer, tiled) for _, layer in of_name])  # noqa: B023
        found[name] = {"shrink": round(shrinks / len(of_name), 2), "expand": round(expands / len(of_name), 2)}
    found["gated"] = measure_gated(layers, operations, tiled, xs[4096])
    return found


def measure_gated(layers: Layers, operations: TritonDeltas, tiled: TiledPlan, x: torch.Tensor) -> dict[str, float]:
    linears = [(PlainMatmul(weight), weight, layer) for name, weight, layer in layers.linears if name == "gate_up"]
    shrunk, out = operations.shrink(x, linears[0][2], tiled), F.linear(x, linears[0][1])

    def base(matmul: PlainMatmul, weight: torch.Tensor, layer: LayerPages) -> None:
        if matmul.multiply_gated(x, weight) is None:
            silu_mul(matmul(x, weight))

    def separate(matmul: PlainMatmul, weight: torch.Tensor, layer: LayerPages) -> None:
        product = matmul(x, weight)
        operations.expand(product, shrunk, layer, tiled)
        silu_mul(product)

    def fused(matmul: PlainMatmul, weight: torch.Tensor, layer: LayerPages) -> None:
        operations.expand_gated(matmul(x, weight), shrunk, layer, tiled)

    parts: dict[str, Callable[[PlainMatmul, torch.Tensor, LayerPages], object]] = {
        "base": base, "separate": separate, "fused": fused,
        "expand": lambda *linear: operations.expand(out, shrunk, linear[2], tiled), "silu_mul": lambda *linear: silu_mul(out),
        "expand_gated": lambda *linear: operations.expand_gated(out, shrunk, linear[2], tiled),
    }  # fmt: skip
    found = {}
    for name, call in parts.items():
        found[name] = round(microseconds(lambda: [call(*linear) for linear in linears * 4]) / (4 * DEPTH), 2)  # noqa: B023 - runs at once
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--case", type=int, nargs=2, action="append", metavar=("ROWS", "ADAPTERS"), help="instead of all")
    parser.add_argument("--variant", choices=VARIANTS, nargs="+", default=["default"], help="sizes to compare")
    parser.add_argument("--all", action="store_true", help="every variant")
    parser.add_argument("--out", type=Path, default=None, help="file for the JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    layers, results = Layers(arguments.places, arguments.rank), []
    for rows, adapters in arguments.case or CASES:
        for variant in VARIANTS if arguments.all else arguments.variant:
            try:
                results.append(measure(layers, rows, adapters, variant))
            except Exception as error:  # noqa: BLE001 - a variant may need too much shared memory
                results.append({"variant": variant, "rows": rows, "adapters": adapters, "error": str(error)[:200]})
            print(json.dumps(results[-1]), flush=True)
    report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rank": arguments.rank, "results": results}
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

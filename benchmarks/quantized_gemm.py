"""Products with quantized weights beside bfloat16 ones: checked against float64, then timed, over
rows and the layers of Llama 3.1 8B and Qwen3 14B.

Each time is that of one launch in a CUDA graph of many, over weights that together exceed the L2
cache. `--tune` times several tile sizes for each number of rows and prints the fastest. Needs
PyTorch, Triton and this repository.

    python benchmarks/quantized_gemm.py --json benchmarks/results/quantized_gemm.json
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import seconds

from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.kernels.linear import weight_only
from frame.plugins.loader import load_registry
from frame.testing.weights.canonical_weights import make_weight

LAYERS = {  # outputs, inputs
    "llama qkv": (6144, 4096),
    "llama o": (4096, 4096),
    "llama gate_up": (28672, 4096),
    "llama down": (4096, 14336),
    "qwen qkv": (7168, 5120),
    "qwen o": (5120, 5120),
    "qwen gate_up": (34816, 5120),
    "qwen down": (5120, 17408),
    "qwen moe qkv": (5120, 2048),
    "qwen moe o": (2048, 4096),
}
FORMS = {
    "int4 g128": (WeightScheme("int4", (1, 128)), False),
    "int4 g64 zeros": (WeightScheme("int4", (1, 64), zeros=True), False),
    "int4 g32": (WeightScheme("int4", (1, 32)), False),
    "int8": (WeightScheme("int8", (1, 0)), False),
    "mxfp4": (WeightScheme("e2m1", (1, 32)), False),
    "nvfp4": (WeightScheme("e2m1", (1, 16)), True),
}
ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SPREAD = 150 << 20  # bytes of weights that launches go through, so that none is found in the L2 cache
LAUNCHES = 12
LINE = "{layer:14}{form:15}{kernel:12}{rows:6}{us:10} us  bf16 {bf16 us:10} us  x{ratio:5}{TB/s:7} TB/s{TFLOP/s:8} TFLOP/s  error {error}"
ALLOWED = 0.02  # error relative to the largest value


def make(scheme: WeightScheme, outer: bool, outputs: int, inputs: int, copies: int) -> list[CanonicalWeight]:
    """`copies` equal weights on the GPU."""
    weight = make_weight(scheme, outputs, inputs, outer=outer, dtype=torch.bfloat16)
    if scheme.quant_type == "e2m1" and outer and weight.scales is not None:
        weight.scales = (weight.scales.float() * inputs**0.5).to(torch.float8_e4m3fn)
    for name, tensor in weight.tensors.items():
        setattr(weight, name, tensor.cuda())
    weight.quantizes_inputs = scheme.quant_type == "int8"
    return [weight, *(replace(weight, quantized=weight.quantized.clone()) for _ in range(copies - 1))]


def check(product: Any, weight: CanonicalWeight, rows: int) -> float:
    """The largest error relative to the largest value of the float64 product."""
    x = torch.randn(rows, weight.inputs, device="cuda", dtype=torch.bfloat16)
    want = x.double() @ weight.dequantize(torch.float32).double().t()
    return float((product(x).double() - want).abs().max() / want.abs().max())


def count_launches(rows: int) -> int:
    return LAUNCHES if rows <= 1024 else 4


def load_kernel(name: str) -> Any:
    """The GEMM kernel of that name."""
    record = next(each for each in load_registry().records("gemm_kernel") if each.name == name)
    module, _, attribute = record.target.partition(":")
    return getattr(importlib.import_module(module), attribute)(build_context("cuda", torch.bfloat16, 16))


def measure(layer: str, form: str, kernel: str, rows_of: list[int], plain: dict[int, float]) -> list[dict[str, Any]]:
    outputs, inputs = LAYERS[layer]
    scheme, outer = FORMS[form]
    bits = 8 if scheme.quant_type == "int8" else 4
    weights = make(scheme, outer, outputs, inputs, max(2, min(LAUNCHES, -(-SPREAD // (outputs * inputs * bits // 8)))))
    made = load_kernel(kernel)
    if (obstacle := made.find_obstacle(weights[0])) is not None:
        print(f"{kernel}, {layer}, {form}: {obstacle}", flush=True)
        return []
    began = time.perf_counter()
    gemms = [made.prepare(weight) for weight in weights]
    errors = {rows: check(gemms[0], weights[0], rows) for rows in (1, 17, 100, 1100)}
    worst = max(errors.values())
    print(f"{kernel}, {layer}, {form}: prepared and checked in {time.perf_counter() - began:.1f} s", flush=True)
    found = []
    for rows in rows_of:
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        taken = seconds(lambda number, x=x: gemms[number](x), len(gemms), count_launches(rows))
        found.append(
            {
                "layer": layer, "form": form, "kernel": kernel, "rows": rows,
                "us": round(taken * 1e6, 2), "bf16 us": round(plain[rows] * 1e6, 2),
                "ratio": round(plain[rows] / taken, 2), "TB/s": round(outputs * inputs * bits / 8 / taken / 1e12, 2),
                "TFLOP/s": round(2 * rows * outputs * inputs / taken / 1e12, 1), "error": round(worst, 5), "correct": worst <= ALLOWED,
            }
        )  # fmt: skip
        print(LINE.format_map(found[-1]) + ("" if worst <= ALLOWED else "  WRONG"), flush=True)
    return found


def time_plain(layer: str, rows_of: list[int]) -> dict[int, float]:
    """Seconds of the bfloat16 product by rows."""
    outputs, inputs = LAYERS[layer]
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(max(2, SPREAD // (outputs * inputs * 2)))]
    found = {}
    for rows in rows_of:
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        found[rows] = seconds(lambda number, x=x: F.linear(x, weights[number]), len(weights), count_launches(rows))
    return found


def tune(layer: str, form: str, rows_of: list[int], plain: dict[int, float], until: float) -> list[dict[str, Any]]:
    """The fastest tile sizes by rows, until the clock is `until`."""
    outputs, inputs = LAYERS[layer]
    scheme, outer = FORMS[form]
    weights = make(scheme, outer, outputs, inputs, 4)
    counter = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
    found = []
    for rows in [rows for rows in rows_of if rows <= weight_only.MAX_FUSED_ROWS]:
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        tiles = [16] if rows <= 16 else [32, 64] if rows <= 64 else [64, 128, 256]
        best: tuple[float, weight_only.Plan] | None = None
        for bm, bn, bk, stages, split, warps in itertools.product(tiles, (32, 64, 128), (64, 128), (3, 5), (1, 2, 4, 8), (4, 8)):
            if time.monotonic() > until:
                break
            if (split > 1 and rows > 64) or split > inputs // bk // 2 or (warps == 8 and bn * bm < 4096):
                continue
            plan = weight_only.Plan(bm, bn, bk, stages, split, warps)
            try:
                taken = seconds(lambda number, x=x, p=plan: weight_only.multiply(x, weights[number], None, p, counter), 4, LAUNCHES, 1)
            except Exception as error:  # noqa: BLE001 - tiles that do not fit the device
                print(f"  {plan}: {type(error).__name__}", flush=True)
                continue
            if best is None or taken < best[0]:
                best = taken, plan
        if best is not None:
            found.append({"layer": layer, "form": form, "rows": rows, "us": round(best[0] * 1e6, 2), **asdict(best[1])})
            print(f"{layer:14}{form:15}{rows:6}{best[0] * 1e6:10.2f} us  x{plain[rows] / best[0]:.2f}  {best[1]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--forms", default="int4 g128,int4 g64 zeros,int8,mxfp4")
    parser.add_argument("--kernels", default="weight_only")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--tune", action="store_true", help="search tile sizes for the first form of each layer")
    parser.add_argument("--seconds", type=float, default=270, help="stop after so many")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    until = time.monotonic() + arguments.seconds
    rows = [int(number) for number in arguments.rows.split(",")]
    forms, found, left_out = arguments.forms.split(","), [], []
    for layer in arguments.layers.split(","):
        plain = time_plain(layer, rows)
        for form in forms[:1] if arguments.tune else forms:
            if time.monotonic() > until:
                left_out.append(f"{layer} {form}")
            elif arguments.tune:
                found += tune(layer, form, rows, plain, until)
            else:
                for kernel in arguments.kernels.split(","):
                    found += measure(layer, form, kernel, rows, plain)
    if left_out:
        print(f"no time for: {', '.join(left_out)}")
    if arguments.json:
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": found, "left_out": left_out}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

"""Products with fp8 weights beside bfloat16 ones: microseconds, bytes and operations a second, over
rows and layers.

Each in a CUDA graph of many launches over weights that together exceed the L2 cache; the fp8 ones
with the rounding of their rows.

    python benchmarks/fp8_linear.py --json benchmarks/results/fp8_linear.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_clock import seconds

from frame.quantization.fp8_weights import quantize_blocks, quantize_outputs
from frame.quantization.gemm.w8a8_matmul import W8A8Matmul

LAYERS = {  # outputs, inputs of Llama 3.1 8B and Qwen3 14B
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "14b qkv": (7168, 5120),
    "14b o": (5120, 5120),
    "14b gate_up": (34816, 5120),
    "14b down": (5120, 17408),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 8192)
SPREAD = 200 << 20  # bytes of weights that launches go through, so that none is found in the L2 cache
LAUNCHES = 24


def measure(name: str, rows_of: list[int], repeats: int) -> list[dict[str, object]]:
    outputs, inputs = LAYERS[name]
    copies = max(2, -(-SPREAD // (outputs * inputs)))
    plain = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(max(2, copies // 2))]
    forms: dict[str, tuple[Callable[[int, torch.Tensor], object], int, int]] = {
        "bfloat16": (lambda number, x: F.linear(x, plain[number]), len(plain), 2)
    }
    for form in ("output", "block"):
        numbers, values = (quantize_outputs if form == "output" else quantize_blocks)(plain[0])
        weights = [numbers.clone() for _ in range(copies)]
        product = W8A8Matmul(numbers, values, (1, 0) if form == "output" else (128, 128))
        forms[f"fp8 by {form}"] = (lambda number, x, w=weights, p=product: p(x, w[number], None), copies, 1)
    found: list[dict[str, object]] = []
    for rows in rows_of:
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        times = {
            form: seconds(lambda number, act=act, x=x: act(number, x), many, max(many, LAUNCHES), repeats)
            for form, (act, many, _) in forms.items()
        }
        for form, taken in times.items():
            read = outputs * inputs * forms[form][2] / taken / 1e12
            found.append(
                {
                    "layer": name, "rows": rows, "form": form, "us": round(taken * 1e6, 2), "TB/s": round(read, 2),
                    "TFLOP/s": round(2 * rows * outputs * inputs / taken / 1e12), "of bfloat16": round(times["bfloat16"] / taken, 2),
                }
            )  # fmt: skip
        for each in found[-len(forms) :]:
            print("{layer:8}{rows:6} {form:14}{us:10} us {TB/s:6} TB/s {TFLOP/s:6} TFLOP/s x{of bfloat16}".format_map(each), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [int(number) for number in arguments.rows.split(",")]
    found = [line for name in arguments.layers.split(",") for line in measure(name, rows, arguments.repeats)]
    if arguments.json:
        report = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": found}
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

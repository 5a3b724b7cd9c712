"""Times products with int8 and int4 weights on a CPU beside bfloat16 ones, in turn, over rows.

Each launch reads another weight, and all weights together exceed the caches, as in a model.

    OMP_NUM_THREADS=2 python benchmarks/cpu_products.py --json benchmarks/results/cpu-products.json

The kernels `amx`, `avx512` and `avx2` are timed where frame-x86 is installed; name the others where
the CPU has no AMX (`--kernels plain,cpu_int8,cpu_int4,avx512`). With
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 oneDNN does not use AMX; AVX2 and ATEN_CPU_CAPABILITY=avx2 stand
for a CPU without AVX-512. `--cpu-time`, with one thread, is for a machine that does other work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from frame.core.interfaces.gemm_kernel import GemmKernel
from frame.core.interfaces.weight_format import CanonicalWeight, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.plugins.loader import load_registry
from frame.plugins.registry import Registry
from frame.testing.weights.canonical_weights import make_weight

LAYERS = {"qwen3-0.6b gate_up": (6144, 1024), "qwen3-0.6b down": (1024, 3072)}  # outputs, inputs
SCHEMES = {"plain": WeightScheme("plain"), "int8": WeightScheme("int8"), "int4": WeightScheme("int4", (1, 64), zeros=True)}
KERNELS = {
    "plain": SCHEMES["plain"],
    "cpu_int8": SCHEMES["int8"],
    "cpu_int8, quantized inputs": SCHEMES["int8"],
    "cpu_int4": SCHEMES["int4"],
    **{f"{kernel}, {name}": scheme for kernel in ("amx", "avx512", "avx2") for name, scheme in SCHEMES.items()},
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
BYTES = 192 << 20  # of bfloat16 weights that the launches go through


def make_gemms(registry: Registry, name: str, outputs: int, inputs: int, copies: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    kernel: GemmKernel = registry.load(registry.get("gemm_kernel", name.partition(",")[0]))(build_context("cpu", torch.bfloat16, 16), None)
    found = []
    for _ in range(copies):
        weight: CanonicalWeight = make_weight(KERNELS[name], outputs, inputs, dtype=torch.bfloat16)
        weight.quantizes_inputs = "quantized inputs" in name
        found.append(kernel.prepare(weight))
    return found


@torch.inference_mode()
def measure(layer: str, kernels: list[str], rows_of: list[int], repeats: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    registry = load_registry()
    outputs, inputs = LAYERS[layer]
    copies = BYTES // (2 * outputs * inputs)
    known = {record.name for record in registry.records("gemm_kernel")}.intersection(kernels)
    names = [name for name in KERNELS if name.partition(",")[0] in known]
    products = {name: make_gemms(registry, name, outputs, inputs, copies) for name in names}
    found = []
    for rows in rows_of:
        x, best = torch.randn(rows, inputs).bfloat16(), dict.fromkeys(names, float("inf"))
        for _ in range(repeats):
            for name, made in products.items():
                if name == "cpu_int4" and rows > 16:
                    continue
                began = clock()
                for product in made:
                    product(x)
                best[name] = min(best[name], (clock() - began) / copies)
        times = {name: round(taken * 1e6) for name, taken in best.items() if taken < float("inf")}
        ratios = {name: round(times["plain"] / us, 2) for name, us in times.items()}
        found.append({"layer": layer, "rows": rows, "us": times, "ratio": ratios})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--kernels", default="plain,cpu_int8,cpu_int4,amx,avx512")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [int(count) for count in arguments.rows.split(",")]
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    results = [row for layer in LAYERS for row in measure(layer, arguments.kernels.split(","), rows, arguments.repeats, clock)]
    if arguments.json:
        about = {
            "time": "CPU" if arguments.cpu_time else "wall",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
        arguments.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Times an attention backend against what the hardware could do at best, and writes JSON.

For decodes the floor is the time to read the keys and values once, at the device's measured copy rate; for extends it is the
time of the multiplications, at its measured matrix rate. One layer a case; queries of all rows in one call.

    python benchmarks/attention.py --backend torch_native --device cpu --threads 2
    python benchmarks/attention.py --backend triton --device cuda --out benchmarks/results/attention.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame.plugins.loader import load_registry
from frame.testing.attention_batch import PlainKVCache, RandomProjections, Rows, build_context, forward_batch, lay_out, planned
from frame.testing.attention_cases import DTYPES, Case, needs
from frame.testing.conformance_attention import make_inputs

LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
DEEPSEEK: dict[str, Any] = {"rank": 512, "rope": 64, "head_dim": 192, "v_head_dim": 128}
SMALL_HEADS: dict[str, Any] = {"heads": 16, "kv_heads": 4, "head_dim": 64, "v_head_dim": 64}
SMALL_LATENT: dict[str, Any] = {"heads": 8, "rank": 64, "rope": 32, "head_dim": 64, "v_head_dim": 32}


def small_cases() -> dict[str, Case]:
    """What a laptop runs."""
    lengths = np.random.default_rng(0).integers(64, 129, 32).tolist()
    ragged = np.random.default_rng(1).integers(10, 2000, 64).tolist()
    found = {}
    for name, shape in (("heads 16/4x64", SMALL_HEADS), ("latent 8x64+32", SMALL_LATENT)):
        found[f"{name}, decode 32 x 64-128"] = Case(Rows.of(lengths), **shape)
        found[f"{name}, decode 64 x 10-2000"] = Case(Rows.of(ragged), **shape)
        found[f"{name}, decode 4 x 8000"] = Case(Rows.of([8000] * 4), **shape)
        found[f"{name}, extend 32 x 64-128"] = Case(Rows.of([], [(0, n) for n in lengths]), **shape)
        found[f"{name}, extend 32 x 16 after 64-128"] = Case(Rows.of([], [(n, 16) for n in lengths]), **shape)
        found[f"{name}, extend 1 x 2048"] = Case(Rows.of([], [(0, 2048)]), **shape)
        found[f"{name}, extend 1 x 512 after 3584"] = Case(Rows.of([], [(3584, 512)]), **shape)
    return found


def large_cases() -> dict[str, Case]:
    """What a GPU runs: an 8B model's heads, and a large latent model's heads on one of eight GPUs and on one."""
    ragged = np.random.default_rng(1).integers(100, 8000, 64).tolist()
    found = {}
    for name, shape in (
        ("heads 32/8x128", LLAMA),
        ("latent 16x512+64", {**DEEPSEEK, "heads": 16}),
        ("latent 128x512+64", {**DEEPSEEK, "heads": 128}),
    ):
        for rows, length in ((1, 8192), (1, 131072), (16, 4096), (64, 4096), (256, 1024)):
            found[f"{name}, decode {rows} x {length}"] = Case(Rows.of([length] * rows), **shape)
        found[f"{name}, decode 64 x 100-8000"] = Case(Rows.of(ragged), **shape)
        found[f"{name}, extend 1 x 4096"] = Case(Rows.of([], [(0, 4096)]), **shape)
        found[f"{name}, extend 2 x 2048 after 6144"] = Case(Rows.of([], [(6144, 2048)] * 2), **shape)
        found[f"{name}, extend 64 x 64 after 1024"] = Case(Rows.of([], [(1024, 64)] * 64), **shape)
    return found


class Clock:
    """Times calls on a device, and what that device can do at best."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self._is_cuda = device, device.startswith("cuda")
        size = (1 << 30) if self._is_cuda else (1 << 27)
        source, target = torch.zeros(size, dtype=torch.uint8, device=device), torch.zeros(size, dtype=torch.uint8, device=device)
        self.bytes_per_second = 2 * size / self.seconds(lambda: target.copy_(source))
        width = 8192 if self._is_cuda else 2048
        a, b = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
        self.flops_per_second = 2 * width**3 / self.seconds(lambda: a @ b)

    def seconds(self, call: Callable[[], Any], budget: float = 0.5) -> float:
        """Median over repeated calls; on a GPU between events, many calls in flight."""
        call()
        began = time.perf_counter()
        call()
        self._wait()
        repeats = int(min(50, max(5, budget / max(1e-6, time.perf_counter() - began))))
        if self._is_cuda:
            pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
            for first, second in pairs:
                first.record()
                call()
                second.record()
            self._wait()
            return statistics.median(first.elapsed_time(second) for first, second in pairs) / 1e3
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def device_seconds(self, call: Callable[[], Any]) -> float | None:
        """The same without the host: recorded once as a CUDA graph and replayed. None where there are no graphs."""
        if not self._is_cuda:
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return self.seconds(graph.replay)

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


def measure(target: type, case: Case, clock: Clock) -> dict[str, Any]:
    """One case: milliseconds of `run` with and without the host's part, of `plan`, and the share of the floor that the device reaches."""
    rng = np.random.default_rng(0)
    rows, device, dtype = case.rows, case.device, case.dtype
    pages = lay_out(rows, case.page_size, rng)
    shapes = [(case.rank + case.rope,)] if case.rank else [(case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim)]
    parts = [torch.randn(pages.num_pages, case.page_size, *shape, device=device, dtype=dtype) for shape in shapes]
    kv = PlainKVCache(case.page_size, parts)
    tokens = int(rows.starts[-1])
    q = torch.randn(tokens, case.heads, case.head_dim, device=device, dtype=dtype)
    own = [torch.randn(tokens, *shape, device=device, dtype=dtype) for shape in shapes]
    spec = make_inputs(Case(Rows.of([1]), **{name: getattr(case, name) for name in SHAPE}, device=device)).spec
    backend = target(build_context(device, dtype, case.page_size, rows=len(rows.queries)), None)
    batch = forward_batch(rows, pages, kv, device)
    if case.rank:
        nope = case.head_dim - case.rope
        weight = torch.randn(case.heads, nope + case.v_head_dim, case.rank, device=device, dtype=dtype) * case.rank**-0.5
        layer = RandomProjections(spec, case.rank, nope, case.rope, weight)
        q_nope, q_rope = q[..., :nope].contiguous(), q[..., nope:].contiguous()
        call = lambda: backend.run_mla(layer, q_nope, q_rope, own[0], batch)  # noqa: E731
    else:
        call = lambda: backend.run(spec, q, own[0], own[1], batch)  # noqa: E731
    batch = planned(backend, batch)
    call()
    began = time.perf_counter()
    batch = planned(backend, batch)
    plan = time.perf_counter() - began
    seconds = clock.seconds(call)
    device_seconds = clock.device_seconds(call) or seconds
    lengths, queries = rows.lengths, np.asarray(rows.queries)
    token_bytes = sum(part[0, 0].numel() * part.element_size() for part in parts)
    pairs = int((queries * (2 * lengths - queries + 1)).sum()) // 2
    memory = (int(lengths.sum()) * token_bytes + 2 * q.numel() * q.element_size()) / clock.bytes_per_second
    compute = 2 * pairs * case.heads * (case.head_dim + case.v_head_dim) / clock.flops_per_second
    return {
        "run_ms": round(seconds * 1e3, 4),
        "device_ms": round(device_seconds * 1e3, 4),
        "plan_ms": round(plan * 1e3, 4),
        "floor_ms": round(max(memory, compute) * 1e3, 4),
        "bound": "memory" if memory > compute else "compute",
        "share_of_floor": round(max(memory, compute) / device_seconds, 3),
    }


SHAPE = ("heads", "kv_heads", "head_dim", "v_head_dim", "rank", "rope")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, help="attention backend, by plugin name")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--threads", type=int, default=None, help="of the CPU")
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--out", type=Path, default=None, help="file for the JSON; standard output otherwise")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    registry = load_registry()
    record = registry.get("attention_backend", arguments.backend)
    target = registry.load(record)
    clock = Clock(arguments.device, DTYPES[arguments.dtype])
    results = {}
    for name, case in (large_cases() if arguments.device.startswith("cuda") else small_cases()).items():
        placed = Case(**{**case.__dict__, "device": arguments.device, "dtype": DTYPES[arguments.dtype], "page_size": arguments.page_size})
        if arguments.only in name and not record.capabilities.unsupported(needs(placed)):
            results[name] = measure(target, placed, clock)
            print(f"{name:44s} {json.dumps(results[name])}", flush=True)
    report = {
        "backend": arguments.backend,
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "page_size": arguments.page_size,
        "copy_gb_per_second": round(clock.bytes_per_second / 1e9, 1),
        "matrix_tflop_per_second": round(clock.flops_per_second / 1e12, 2),
        "cases": results,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Times the kernels between a layer's products: norm with its sum, gated activation, rotation with
its store. A GPU, no model.

A chain of launches is captured in a CUDA graph, so the host costs nothing; the chain goes through
more memory than the caches hold where a launch moves much. Each kernel is timed beside PyTorch's
operators, and as what a call costs the host.

    python benchmarks/elementwise.py --out benchmarks/results/elementwise.json
    FRAME_NO_PDL=1 python benchmarks/elementwise.py  # without programmatic dependent launches
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_clock import seconds

from frame import kernels
from frame.kernels.elementwise.activation import silu_mul
from frame.kernels.elementwise.norm import add_rms_norm
from frame.kernels.elementwise.rope import KVCacheTarget, QKVLayout, norm_rope_store

ROWS = (1, 8, 64, 256, 8192)
DEVICE = torch.device("cuda")
LARGE = 240 << 20  # bytes, several times what the second-level cache holds
EPS = 1e-6

Step = Callable[[int], Any]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def copies(num_bytes: int) -> int:
    """How many sets of tensors a chain goes through, when one launch moves `num_bytes`."""
    return 1 if num_bytes < 4 << 20 else max(2, LARGE // num_bytes + 1)


def norm_case(rows: int, hidden: int) -> tuple[Step, Step, int]:
    num_bytes = rows * hidden * 8
    sets = [(random(rows, hidden), random(rows, hidden)) for _ in range(copies(num_bytes))]
    weight = random(hidden)

    def plain(index: int) -> None:
        x, residual = sets[index % len(sets)]
        F.rms_norm(x + residual, (hidden,), weight, EPS)

    return lambda index: add_rms_norm(*sets[index % len(sets)], weight, EPS), plain, num_bytes


def activation_case(rows: int, inner: int) -> tuple[Step, Step, int]:
    num_bytes = rows * inner * 6
    sets = [random(rows, 2 * inner) for _ in range(copies(num_bytes))]

    def plain(index: int) -> None:
        gate, up = sets[index % len(sets)].chunk(2, -1)
        F.silu(gate).mul_(up)

    return lambda index: silu_mul(sets[index % len(sets)]), plain, num_bytes


def rotation_case(rows: int, heads: QKVLayout, normed: bool) -> tuple[Step, Step, int]:
    """Reads all heads; writes queries, keys twice (where they lie, and to the cache) and values."""
    dim, num_q, num_kv = heads.dim, heads.num_heads, heads.num_kv_heads
    num_bytes = rows * dim * 2 * (2 * num_q + 5 * num_kv)
    table, positions, weights = random(16384, 2, 1, dim), torch.randint(16000, (rows,), device=DEVICE), random(2, dim)
    slots = torch.arange(16, rows + 16, device=DEVICE)
    shape = (rows // 16 + 2, 16, num_kv, dim)
    sets = [
        (random(rows, (num_q + 2 * num_kv) * dim), KVCacheTarget(slots, random(*shape), random(*shape))) for _ in range(copies(num_bytes))
    ]
    by_head = torch.cat((weights[0].expand(num_q, -1), weights[1].expand(num_kv, -1)))
    cos, sin = table.index_select(0, positions).unbind(1)

    def plain(index: int) -> None:
        qkv, cache = sets[index % len(sets)]
        qk, v = qkv.unflatten(-1, (-1, dim)).split((num_q + num_kv, num_kv), 1)
        if normed:
            qk = F.rms_norm(qk, (dim,), None, EPS) * by_head
        qk = torch.addcmul(qk * cos, qk.roll(dim // 2, -1), sin)
        cache.k.view(-1, num_kv, dim).index_copy_(0, slots, qk[:, num_q:])
        cache.v.view(-1, num_kv, dim).index_copy_(0, slots, v)

    def fused(index: int) -> None:
        qkv, cache = sets[index % len(sets)]
        norm_rope_store(qkv, positions, table, heads, (weights, EPS) if normed else None, cache)

    return fused, plain, num_bytes


def microseconds(step: Step, launches: int) -> float:
    """Of one step, in a replayed graph of as many."""
    return seconds(step, launches, launches, repeats=6) * 1e6


def host_microseconds(step: Step, calls: int = 200) -> float:
    """Of one call on the host, the device keeping up; the best of five."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        launch_dependents = time.perf_counter()
        for index in range(calls):
            step(index)
        times.append((time.perf_counter() - launch_dependents) / calls * 1e6)
    return min(times)


def measure(name: str, rows: int, case: tuple[Step, Step, int]) -> dict[str, Any]:
    fused, plain, num_bytes = case
    launches = 100 if rows <= 256 else 2 * copies(num_bytes)
    found: dict[str, Any] = {"op": name, "rows": rows, "torch_us": round(microseconds(plain, launches), 2)}
    found["us"] = round(microseconds(fused, launches), 2)
    found["gb_s"] = round(num_bytes / found["us"] / 1e3)
    if rows == 8:
        found["host_us"] = round(host_microseconds(fused), 1)
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    out: Path | None = parser.parse_args().out
    results = []
    for rows in ROWS:
        results += [measure(f"add_rms_norm {hidden}", rows, norm_case(rows, hidden)) for hidden in (1024, 2048, 4096, 5120)]
        results += [measure(f"silu_mul {inner}", rows, activation_case(rows, inner)) for inner in (3072, 14336, 17408)]
        for num_heads, num_kv_heads, normed in ((16, 8, True), (32, 8, False), (40, 8, True)):
            heads, what = QKVLayout(num_heads, num_kv_heads, 128, 128), " with norm" if normed else ""
            results.append(measure(f"norm_rope_store {num_heads}/{num_kv_heads}x128{what}", rows, rotation_case(rows, heads, normed)))
    large = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(large)
    rate = round(2 * large.numel() / microseconds(lambda _: other.copy_(large), 4) / 1e3)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dependent_launches": kernels.supports_pdl(DEVICE),
        "copy_gb_s": rate,
        "results": results,
    }
    print(f"copy {rate} GB/s")
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

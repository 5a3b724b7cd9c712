"""Times all-reduce over the GPUs of one host in CUDA graphs: NCCL, PyTorch's kernels, and those of
the collective `p2p`, with and without residual addition and norm. Writes JSON: microseconds a call.
`--only-copies`: instead, outside of graphs, sums of large messages by copies, alone and behind
products.

Also the floors: of a small kernel in a graph, of PyTorch's barrier, and of one way of a ping-pong
between two GPUs. Run it with `python benchmarks/all_reduce.py --ranks 2 --out all_reduce.json`,
about 40 seconds. The defaults of `P2pOptions` follow its table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from gpu_clock import seconds

from frame.core.interfaces.collective import CollectiveContext
from frame.kernels.elementwise.norm import add_rms_norm
from frame.plugins.collectives import P2pOptions
from frame.plugins.collectives.nccl import Nccl
from frame.plugins.collectives.p2p import P2p
from frame.plugins.devices import open_platform

SIZES = tuple(kib << 10 for kib in (8, 32, 128, 512, 1024, 2048, 4096, 8192, 16384, 65536))  # bytes
ROWS = ((1, 2048), (1, 4096), (1, 7168), (8, 4096), (64, 4096), (256, 4096), (512, 4096))  # of bfloat16, for the fused kernel
LARGE = ((8192, 2048, 4096), (8192, 7168, 4096), (8192, 8192, 7168))  # rows, inputs and outputs of products
CALLS = 50  # in a graph
ROUNDS = 20
LARGEST = SIZES[-1]
TURNS = 2000  # of the ping-pong


@triton.jit
def ping_pong(own, other, FIRST: tl.constexpr, TURNS: tl.constexpr):
    """One program on each of two GPUs; they write each other's counter in turns."""
    for turn in range(TURNS):
        if FIRST:
            tl.store(other, turn + 1)
        while tl.load(own, volatile=True) <= turn:
            pass
        if not FIRST:
            tl.store(other, turn + 1)


def time_graph(act: Callable[[], Any]) -> float:
    """Microseconds of one call, the best of `ROUNDS` replays of a graph of `CALLS` calls."""
    return seconds(lambda _: act(), 1, CALLS, ROUNDS, average=min) * 1e6


def measure(rank: int, ranks: int, folder: Path, only_copies: bool) -> dict[str, Any]:
    """The times on this rank."""
    platform = open_platform(f"cuda:{rank}")
    platform.activate()

    def context(name: str) -> CollectiveContext:
        return CollectiveContext(rank, ranks, f"file://{folder / name}", platform, timeout=120.0)

    groups: dict[str, Any] = {"nccl": Nccl(context("nccl"))}
    if only_copies:
        return {"copies_us": measure_copies(groups["nccl"], P2p(context("copies"), P2pOptions(one_shot_bytes=16, copies=True)))}
    groups["one_shot"] = P2p(context("one"), P2pOptions(one_shot_bytes=LARGEST, two_shot_bytes=16))
    if ranks > 2:
        groups["two_shot"] = P2p(context("two"), P2pOptions(one_shot_bytes=0, two_shot_bytes=LARGEST))
    found: dict[str, Any] = {"ranks": ranks, "device": torch.cuda.get_device_name(rank), "torch": torch.__version__}
    found["floors_us"] = measure_floors(groups["one_shot"], groups["nccl"])
    print(f"rank {rank}: floors {found['floors_us']} us", flush=True)
    found["sums_us"] = {f"{size >> 10} KiB": measure_sums(groups, size) for size in SIZES}
    found["norms_us"] = {f"{rows} x {columns}": measure_norms(groups, rows, columns) for rows, columns in ROWS}
    return found


def measure_sums(groups: dict[str, Any], size: int) -> dict[str, float]:
    """Each group's time for a message of `size` bytes, after a check of its sum."""
    some = groups["nccl"]
    x = make_values(some, size // 2)
    expected = some.all_reduce(x.clone())
    zeros = torch.zeros_like(x)  # NCCL sums in place, and sums of sums would overflow
    row = {}
    for name, group in groups.items():
        for _ in range(3):  # both halves of the memory
            result = group.all_reduce(x.clone())
            if not torch.allclose(result.float(), expected.float(), atol=0.05, rtol=0.02):
                raise SystemExit(f"{name} gives a wrong sum of {size} bytes")
        row[name] = round(time_graph(lambda group=group: group.all_reduce(zeros)), 2)  # type: ignore[misc]
    if size <= 8 << 20:
        row |= measure_pytorch(groups["one_shot"], zeros)
    print(f"rank {some.rank}: {size >> 10} KiB {row} us", flush=True)
    return row


def measure_copies(nccl: Any, copies: Any) -> dict[str, dict[str, float]]:
    """Sums of large messages without graphs, and after the products of 8,192 rows that make them;
    `product`: without the sum."""
    found = {}
    for rows, inner, columns in LARGE:
        x, weight = make_values(nccl, rows * inner).view(rows, inner), make_values(nccl, inner * columns).view(inner, columns)

        def multiply(part: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
            return part @ weight

        out = multiply(x)
        expected = nccl.all_reduce(out.clone())
        for result in [copies.all_reduce(out) for _ in range(3)] + [copies.reduce_matmul(multiply, x, columns) for _ in range(3)]:
            if not torch.allclose(result.float(), expected.float(), atol=2.0, rtol=0.02):
                raise SystemExit(f"copies give a wrong sum of {rows} x {columns}")
        zeros = torch.zeros_like(out)
        acts: dict[str, Callable[[], Any]] = {
            "nccl": lambda zeros=zeros: nccl.all_reduce(zeros),
            "copies": lambda zeros=zeros: copies.all_reduce(zeros),
            "product": lambda x=x, multiply=multiply: multiply(x),
            "product_nccl": lambda x=x, multiply=multiply: nccl.all_reduce(multiply(x)),
            "product_copies": lambda x=x, multiply=multiply, columns=columns: copies.reduce_matmul(multiply, x, columns),
        }
        row = found[f"{rows} x {inner} x {columns}"] = {name: round(time_eager(act), 1) for name, act in acts.items()}
        print(f"rank {nccl.rank}: {rows} x {inner} x {columns} {row} us", flush=True)
    return found


def time_eager(act: Callable[[], Any]) -> float:
    """Microseconds of one call of several that are queued, the best of five rounds."""
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(20):
            act()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / 20)
    return min(times[1:])


def measure_pytorch(group: Any, x: torch.Tensor) -> dict[str, float]:
    """PyTorch's kernels on the memory of a `P2p`."""
    buffer, name, flat = group._shared[0][: x.numel() * 2].view(torch.bfloat16), group._name, x.view(-1)  # noqa: SLF001
    out = torch.empty_like(flat)
    kernels: dict[str, Callable[[], Any]] = {
        "pytorch_one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, flat, "sum", name),
        "pytorch_two_shot": lambda: (buffer.copy_(flat), torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", name, out)),
    }
    times = {kernel: round(time_graph(act), 2) for kernel, act in kernels.items()}
    torch.cuda.synchronize()
    group._kernels.clear(group._shared[0])  # noqa: SLF001 - the group's own kernel uses this memory again
    Nccl.all_reduce(group, torch.zeros(1, device=x.device))
    torch.cuda.synchronize()
    return times


def measure_norms(groups: dict[str, Any], rows: int, columns: int) -> dict[str, float]:
    """Sum, residual addition and norm: in two kernels and in one."""
    weight = torch.rand(columns, device=f"cuda:{groups['nccl'].rank}").to(torch.bfloat16)
    weight = groups["nccl"].broadcast(weight)
    x = make_values(groups["nccl"], rows * columns).view(rows, columns)
    residual = torch.ones(rows, columns, device=weight.device, dtype=torch.bfloat16)
    total = groups["nccl"].all_reduce(x.clone())
    right = add_rms_norm(total, residual.clone(), weight, 1e-5)
    row = {}
    for name, group in groups.items():

        def apart(group: Any = group) -> Any:
            return add_rms_norm(group.all_reduce(x), residual, weight, 1e-5)

        def fused(group: Any = group) -> Any:
            return group.reduce_add_norm(x, residual, weight, 1e-5)

        stream = residual.clone()
        result = group.reduce_add_norm(x, stream, weight, 1e-5)
        if result is not None:
            wrong = max(float((result - right[0]).abs().max()), float((stream - right[1]).abs().max()))
            if wrong > 0.1:
                raise SystemExit(f"the fused kernel is wrong by {wrong} at {rows} x {columns}")
            row[f"{name}_fused"] = round(time_graph(fused), 2)
        x.zero_()
        row[name] = round(time_graph(apart), 2)
        x.copy_(make_values(groups["nccl"], rows * columns).view(rows, columns))
    print(f"rank {groups['nccl'].rank}: {rows} x {columns} with norm {row} us", flush=True)
    return row


def measure_floors(group: Any, nccl: Any) -> dict[str, float]:
    """A small kernel in a graph, PyTorch's barrier, and one way of a ping-pong."""
    device = f"cuda:{group.rank}"
    small = torch.zeros(4096, device=device, dtype=torch.bfloat16)
    memory, handle = group._shared  # noqa: SLF001 - the floor is measured on the memory that the kernels use
    floors = {"kernel": round(time_graph(lambda: small.add_(0)), 2), "barrier": round(time_graph(lambda: handle.barrier(0)), 2)}
    if group.size == 2:
        counters = [handle.get_buffer(rank, (4,), torch.int32) for rank in (group.rank, 1 - group.rank)]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for timed in (False, True):
            counters[0].zero_()
            nccl.all_reduce(torch.zeros(1, device=device))
            start.record()
            ping_pong[(1,)](*counters, FIRST=group.rank == 0, TURNS=TURNS if timed else 8, num_warps=1)
            end.record()
            torch.cuda.synchronize()
            nccl.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize()
        floors["one_way"] = round(start.elapsed_time(end) * 1000 / (2 * TURNS), 2)
        group._kernels.clear(memory)  # noqa: SLF001
        nccl.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize()
    return floors


def make_values(group: Any, count: int) -> torch.Tensor:
    """bfloat16 values of this rank, the same at each call."""
    generator = torch.Generator(device=f"cuda:{group.rank}").manual_seed(group.rank)
    return torch.randn(count, generator=generator, device=f"cuda:{group.rank}").to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=None, help="set for the processes of the ranks")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--only-copies", action="store_true", help="of two ranks: large sums by copies, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("all_reduce.json"))
    options = parser.parse_args()
    if options.rank is not None:
        found = measure(options.rank, options.ranks, options.folder, options.only_copies)
        if options.rank == 0:
            options.out.write_text(json.dumps(found, indent=2) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(options.ranks), "--folder", folder, "--out", str(options.out)]
        if options.only_copies:
            command.append("--only-copies")
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}  # NCCL without multicast too
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(options.ranks)]
        deadline = time.monotonic() + 300
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    print(options.out.read_text())


if __name__ == "__main__":
    main()

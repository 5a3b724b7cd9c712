"""Times all-reduce over the GPUs of one host in CUDA graphs: NCCL, and both kernels of the
collective `p2p`. Writes JSON: microseconds a call by size, and of a barrier, the floor of the link.

Run it with `python benchmarks/all_reduce.py --ranks 2 --out all_reduce.json`. The defaults of
`P2pOptions` follow its table.
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

from frame.core.interfaces.collective import CollectiveContext
from frame.plugins.collectives import P2pOptions
from frame.plugins.collectives.nccl import Nccl
from frame.plugins.collectives.p2p import P2p
from frame.testing.devices import open_platform

SIZES = (8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20, 2 << 20, 8 << 20)  # bytes
CALLS = 50  # in a graph
ROUNDS = 20
LARGEST = 8 << 20


def time_graph(act: Callable[[], Any]) -> float:
    """Microseconds of one call, the best of `ROUNDS` replays of a graph of `CALLS` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            act()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                act()
        graph.replay()
        stream.synchronize()
        times = []
        for _ in range(ROUNDS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1000 / CALLS)
    return min(times)


def measure(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """The times on this rank."""
    platform = open_platform(f"cuda:{rank}")
    platform.activate()

    def context(name: str) -> CollectiveContext:
        return CollectiveContext(rank, ranks, f"file://{folder / name}", platform, timeout=120.0)

    groups: dict[str, Any] = {"nccl": Nccl(context("nccl"))}
    if ranks == 2:
        groups["one_shot"] = P2p(context("one"), P2pOptions(one_shot_bytes=LARGEST, two_shot_bytes=16))
    groups["two_shot"] = P2p(context("two"), P2pOptions(one_shot_bytes=0, two_shot_bytes=LARGEST))
    found: dict[str, Any] = {"ranks": ranks, "device": torch.cuda.get_device_name(rank), "torch": torch.__version__, "calls_us": {}}
    generator = torch.Generator(device=f"cuda:{rank}").manual_seed(rank)
    for size in SIZES:
        x = torch.randn(size // 2, generator=generator, device=f"cuda:{rank}").to(torch.bfloat16)
        expected = groups["nccl"].all_reduce(x.clone())
        zeros = torch.zeros_like(x)  # NCCL sums in place, and sums of sums would overflow
        row = {}
        for name, group in groups.items():
            result = group.all_reduce(x.clone())
            if not torch.allclose(result.float(), expected.float(), atol=0.05, rtol=0.02):
                raise SystemExit(f"{name} gives a wrong sum of {size} bytes")
            row[name] = round(time_graph(lambda group=group, zeros=zeros: group.all_reduce(zeros)), 2)  # type: ignore[misc]
        print(f"rank {rank}: {size} bytes {row} us", flush=True)
        found["calls_us"][str(size)] = row
    handle = groups["two_shot"]._handle  # noqa: SLF001 - the floor is measured on the memory that the kernels use
    found["barrier_us"] = round(time_graph(lambda: handle.barrier(0)), 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=None, help="set for the processes of the ranks")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("all_reduce.json"))
    options = parser.parse_args()
    if options.rank is not None:
        found = measure(options.rank, options.ranks, options.folder)
        if options.rank == 0:
            options.out.write_text(json.dumps(found, indent=2) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(options.ranks), "--folder", folder, "--out", str(options.out)]
        environment = {**os.environ, "NCCL_NVLS_ENABLE": "0"}  # NCCL without multicast too
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(options.ranks)]
        deadline = time.monotonic() + 300
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in processes]
    if any(codes):
        raise SystemExit(f"the ranks ended with {codes}")
    print(options.out.read_text())


if __name__ == "__main__":
    main()

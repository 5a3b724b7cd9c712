"""Attention backends against each other as a server runs them: decodes in captured graphs with a
new plan before every replay, extends without. One layer over a cache that is larger than the
device's own caches; microseconds a layer, of the host's plan a step, and the share of the work in
TB/s (keys and values read once) or TFLOP/s (products of seen pairs). Latent extends include the
projections.

    python benchmarks/attention_backends.py flashinfer triton --json out.json

`frame/attention_backends/measured.py` is written from such a report: of each backend and phase the
geometric mean over the shapes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from frame.entrypoints.tools.bench.paged_batches import RandomProjections, Rows, build_context, forward_batch, lay_out, planned
from frame.plugins.loader import load_registry

DTYPE = torch.bfloat16
CACHE_BYTES = 256 << 20  # more than the device's caches hold
ROUNDS = 9


@dataclass(frozen=True)
class Shape:
    """A layer: multi-head, or latent with `rank` 512 and rope 64."""

    heads: int
    kv_heads: int
    latent: bool = False

    @property
    def name(self) -> str:
        return f"latent {self.heads}" if self.latent else f"{self.heads}/{self.kv_heads} x 128"

    @property
    def cached(self) -> list[tuple[int, ...]]:
        return [(576,)] if self.latent else [(self.kv_heads, 128)] * 2


DECODES = [(1, 1024), (8, 1024), (64, 1024), (256, 1024), (256, 256), (8, 4096), (64, 4096), (256, 4096), (1, 16384), (8, 16384)]
MULTI_HEAD = [(1, 256), (8, 256), (4, 16000)]  # rows, context: besides those
FRESH = [(1, 4096), (2, 4096), (4, 4096), (16, 256)]  # rows, tokens
PREFIXED = [(64, 4096, 64), (16, 4096, 256), (1, 8192, 7808)]  # rows, cached, new
HEADS = [Shape(8, 8), Shape(16, 8), Shape(32, 8), Shape(40, 8), Shape(32, 4)]
LATENTS = [Shape(16, 1, latent=True), Shape(128, 1, latent=True)]


class Layers:
    """A cache of several layers over the same pages (`frame.core.interfaces.batch.KVCache`)."""

    def __init__(self, page_size: int, layers: list[tuple[torch.Tensor, ...]]) -> None:
        self.page_size = page_size
        self.layers = layers

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return self.layers[layer]


class Projected(RandomProjections):
    """Latent projections that cost nothing: of decodes, attention alone is timed."""

    absorbed: torch.Tensor

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        return self.absorbed[: q_nope.shape[0]]

    def unabsorb(self, out: torch.Tensor) -> torch.Tensor:
        return out


@dataclass
class Problem:
    """A batch over as many layers as it takes to go past the caches, and a layer's call."""

    shape: Shape
    batch: ForwardBatch
    specs: list[AttentionSpec]
    inputs: list[torch.Tensor]

    @classmethod
    def make(cls, shape: Shape, rows: Rows, page_size: int) -> Problem:
        pages = lay_out(rows, page_size, np.random.default_rng(0), spare_pages=1)
        size = pages.num_pages * page_size * sum(math.prod(part) for part in shape.cached) * DTYPE.itemsize
        count = max(1, min(64, math.ceil(CACHE_BYTES / size)))

        def normal(*size: int) -> torch.Tensor:
            return torch.empty(*size, dtype=DTYPE, device="cuda").normal_()

        layers = [tuple(normal(pages.num_pages, page_size, *part) for part in shape.cached) for _ in range(count)]
        width = 192 if shape.latent else 128
        specs = [AttentionSpec(i, shape.heads, 1 if shape.latent else shape.kv_heads, width, 128, width**-0.5) for i in range(count)]
        batch: Any = forward_batch(rows, pages, Layers(page_size, layers), "cuda")  # type: ignore[arg-type]
        sizes = [(shape.heads, 128), (shape.heads, 64), (576,)] if shape.latent else [(shape.heads, 128), (shape.kv_heads, 128)]
        return cls(shape, batch, specs, [normal(batch.num_tokens, *size) for size in sizes])

    def call(self, backend: AttentionBackend) -> Callable[[int, ForwardBatch], Any]:
        if not self.shape.latent:
            q, kv = self.inputs
            return lambda layer, batch: backend.run(self.specs[layer], q, kv, kv, batch)
        weight = torch.randn(self.shape.heads, 256, 512, device="cuda", dtype=DTYPE) * 512**-0.5
        nope, rope, latent = self.inputs
        absorbed = torch.randn(nope.shape[0], self.shape.heads, 512, device="cuda", dtype=DTYPE)
        kind = RandomProjections if self.batch.num_decodes == 0 else Projected
        layers = [kind(spec, 512, 128, 64, weight) for spec in self.specs]
        for layer in layers:
            layer.absorbed = absorbed  # type: ignore[attr-defined]
        return lambda layer, batch: backend.run_mla(layers[layer], nope, rope, latent, batch)


def microseconds(launch: Callable[[], Any], calls: int) -> float:
    """The device's time of one of `calls` that `launch` makes; the median over rounds."""
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def time_decodes(backend: AttentionBackend, problem: Problem) -> tuple[float, float]:
    """(microseconds a layer, of the host's plan of a replay)."""
    run, layers = problem.call(backend), len(problem.specs)
    calls = max(layers, 8)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = planned(backend, problem.batch)
        for layer in range(min(layers, 2)):
            run(layer, first)
        plan = backend.capture_plan(problem.batch)
        captured = replace(problem.batch, plan=plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in range(calls):
                run(call % layers, captured)
        backend.replay_plan(plan, captured)
        device = microseconds(graph.replay, calls)
        host = []
        for _ in range(ROUNDS):
            clock = time.perf_counter()
            backend.replay_plan(plan, captured)
            host.append(time.perf_counter() - clock)
            graph.replay()
        torch.cuda.synchronize()
    return device, statistics.median(host) * 1e6


def time_extends(backend: AttentionBackend, problem: Problem) -> tuple[float, float]:
    """(microseconds a layer, of the host's plan of a step)."""
    run, layers = problem.call(backend), len(problem.specs)
    run(0, planned(backend, problem.batch))
    torch.cuda.synchronize()
    clock = time.perf_counter()
    batch = planned(backend, problem.batch)
    host = time.perf_counter() - clock
    calls = 6
    for call in range(2):
        run(call % layers, batch)

    def launch() -> None:
        for call in range(calls):
            run(call % layers, batch)

    return microseconds(launch, calls), host * 1e6


def batches(shape: Shape) -> Iterator[tuple[str, str, Rows]]:
    """(phase, name, rows)."""
    for count, context in DECODES if shape.latent else DECODES + MULTI_HEAD:
        if not shape.latent or count * context <= 1 << 18:
            yield "decode", f"{count} x {context}", Rows.of([context] * count)
    if not shape.latent:
        yield "decode", "248 x 100-1300", Rows.of(np.random.default_rng(0).integers(100, 1300, 248).tolist())
    for count, new in FRESH:
        yield "extend", f"{count} x {new}", Rows.of([], [(0, new)] * count)
    for count, prefix, new in PREFIXED if not shape.latent else ():
        yield "extend", f"{count} x ({prefix} + {new})", Rows.of([], [(prefix, new)] * count)


def speed(shape: Shape, phase: str, rows: Rows, us: float) -> float:
    """TB/s of a decode, TFLOP/s of an extend."""
    if phase == "decode":
        return int(rows.lengths.sum()) * sum(math.prod(part) for part in shape.cached) * DTYPE.itemsize / us / 1e6
    pairs = sum(new * (2 * (prefix + new) - new + 1) // 2 for prefix, new in zip(rows.prefixes, rows.queries, strict=True))
    return pairs * shape.heads * 2 * (192 + 128 if shape.latent else 256) / us / 1e6


def measure(names: Sequence[str], phases: Sequence[str], page_size: int, budget: float, layers: str) -> list[dict[str, Any]]:
    """One row a backend, shape and batch, until the budget of seconds is spent."""
    registry = load_registry(installed=False)
    found: list[dict[str, Any]] = []
    deadline = time.perf_counter() + budget
    for shape in [shape for shape in (*HEADS, *LATENTS) if layers in shape.name]:
        for phase, name, rows in batches(shape):
            if phase not in phases:
                continue
            problem = Problem.make(shape, rows, page_size)
            for backend_name in names:
                if time.perf_counter() > deadline:
                    return found
                record = registry.get("attention_backend", backend_name)
                context = build_context("cuda", DTYPE, page_size, rows=512)
                backend = registry.load(record)(context, registry.options(record, {}))
                with torch.inference_mode():
                    timed = time_decodes(backend, problem) if phase == "decode" else time_extends(backend, problem)
                row = {"backend": backend_name, "phase": phase, "layer": asdict(shape), "batch": name, "us": timed[0], "plan_us": timed[1]}
                row["speed"] = speed(shape, phase, rows, timed[0])
                found.append(row)
                unit = "TB/s" if phase == "decode" else "TFLOP/s"
                print(f"{phase} {backend_name:10} {shape.name:12} {name:18} {timed[0]:8.1f} us {row['speed']:7.2f} {unit}", flush=True)
            del problem
            torch.cuda.empty_cache()
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """`backend kind phase` -> the geometric mean of its speeds over batches that all backends of
    the report ran."""
    names = {row["backend"] for row in rows}
    by_batch: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        kind = "mla" if row["layer"]["latent"] else "mha"
        by_batch.setdefault((kind, row["phase"], row["layer"]["heads"], row["batch"]), {})[row["backend"]] = row["speed"]
    logs: dict[str, list[float]] = {}
    for (kind, phase, *_), speeds in by_batch.items():
        if set(speeds) == names:
            for name, value in speeds.items():
                logs.setdefault(f"{name} {kind} {phase}", []).append(math.log(value))
    return {key: round(math.exp(statistics.fmean(found)), 2) for key, found in sorted(logs.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="+")
    parser.add_argument("--phase", choices=["decode", "extend"], action="append", help="both, if not given")
    parser.add_argument("--layers", help="shapes to take, by a part of their names: 40/8, latent")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(
        arguments.backends, arguments.phase or ["decode", "extend"], arguments.page_size, arguments.budget, arguments.layers or ""
    )
    report = {
        "device": torch.cuda.get_device_name(),
        "compute_capability": torch.cuda.get_device_capability(),
        "torch": torch.__version__,
        "page_size": arguments.page_size,
        "geometric_means": summary(rows),
        "rows": rows,
    }
    print(json.dumps(report["geometric_means"], indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

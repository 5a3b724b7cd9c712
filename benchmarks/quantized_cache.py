"""Times attention of the `triton` backend over bfloat16, fp8 and int8 caches: decodes by rows and
context, and chunks of prompts by prefix. Each result is compared with float32 arithmetic over the
same cache.

    python benchmarks/quantized_cache.py --out benchmarks/results/quantized-cache.json

Kernels are compiled beforehand, by one process for each type of cache.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame.attention_backends.triton import decode_launch
from frame.attention_backends.triton.backend import TritonBackend
from frame.core.interfaces.attention import AttentionSpec
from frame.entrypoints.tools.bench.clock import LARGER_THAN_CACHES, Clock
from frame.entrypoints.tools.bench.paged_batches import Pages, PlainKVCache, Rows, build_context, forward_batch, lay_out, planned
from frame.plugins.loader import load_registry

HEADS, KV_HEADS, WIDTH, PAGE = 32, 8, 128, 16  # a layer of Llama-3.1-8B
CACHES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DECODES = [(1, 1024), (1, 16384), (1, 65536), (8, 1024), (8, 16384), (8, 65536), (64, 1024), (64, 16384), (256, 1024), (256, 16384)]
# rows, prefix, new tokens
PROMPTS = [(1, 0, 8192), (1, 8192, 8192), (1, 24576, 8192), (1, 0, 2048), (1, 24576, 2048), (16, 0, 512), (64, 4096, 4)]
SMALL = [Rows.of([40]), Rows.of([40] * 8), Rows.of([], [(64, 300)]), Rows.of([], [(0, 300)]), Rows.of([], [(64, 4)])]
ALLOWED = 0.02  # greatest difference in the norm of a token's result


class Layers(PlainKVCache):
    """Caches of several layers, so that no layer is found in the device's own caches."""

    def __init__(self, cache: str, pages: Pages, device: str) -> None:
        slots = pages.num_pages * pages.page_size
        itemsize = CACHES[cache].itemsize
        self.count = 1 if device == "cpu" else max(1, min(32, math.ceil(LARGER_THAN_CACHES / (2 * slots * KV_HEADS * WIDTH * itemsize))))
        shape = (pages.num_pages, pages.page_size, KV_HEADS)
        self.tensors = [[_random((*shape, WIDTH), CACHES[cache], device) for _ in range(2)] for _ in range(self.count)]
        factors = [torch.empty(shape, dtype=torch.float16, device=device).uniform_(0.004, 0.012) for _ in range(2)]
        self.row_scales = factors if cache == "int8" else []
        super().__init__(pages.page_size, self.tensors[0], self.row_scales)

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(self.tensors[layer])

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(self.row_scales)

    def read(self, places: torch.Tensor) -> list[torch.Tensor]:
        """Keys and values of layer 0, float32 [tokens, heads, width]."""
        found = []
        for index, part in enumerate(self.tensors[0]):
            rows = (
                part.flatten(0, 1).view(torch.uint8 if part.dtype == torch.float8_e4m3fn else part.dtype)[places].view(part.dtype).float()
            )
            found.append(rows * self.row_scales[index].flatten(0, 1)[places].float().unsqueeze(-1) if self.row_scales else rows)
        return found


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    part = torch.empty(shape, dtype=dtype, device=device)
    flat = part.view(-1)
    for start in range(0, flat.numel(), 1 << 28):
        piece = flat[start : start + (1 << 28)]
        piece.copy_(torch.randn(piece.numel(), dtype=torch.bfloat16, device=device))
    return part


def check(q: torch.Tensor, out: torch.Tensor, rows: Rows, pages: Pages, kv: Layers) -> float:
    """The largest relative difference of some tokens of the first and the last row."""
    worst, starts = 0.0, rows.starts
    for row in {0, len(rows.queries) - 1}:
        places = torch.from_numpy(pages.places[row]).to(q.device)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in kv.read(places))
        for query in np.unique(np.linspace(0, rows.queries[row] - 1, 5).astype(int)):
            seen, token = rows.prefixes[row] + int(query) + 1, int(starts[row] + query)
            weights = torch.softmax(torch.einsum("hd,khd->hk", q[token].float(), k[:seen]) * WIDTH**-0.5, -1)
            want = torch.einsum("hk,khd->hd", weights, v[:seen])
            worst = max(worst, float((out[token].float() - want).norm() / want.norm()))
    return worst


@torch.inference_mode()
def measure(cache: str, rows: Rows, device: str, budget: float, programs: int | None = None) -> dict[str, float]:
    """Microseconds of a layer, and the largest relative difference."""
    registry = load_registry(installed=False)
    backend = registry.load(registry.get("attention_backend", "triton"))(build_context(device, torch.bfloat16, PAGE, rows=256))
    if programs is not None:
        choose = decode_launch.choose_decode
        registers = (1 << 16) // (128 * programs) // 8 * 8

        def chosen(*arguments: Any) -> Any:
            sizes = choose(*arguments)
            return replace(sizes, programs=programs, tile=replace(sizes.tile, registers=registers))

        decode_launch.choose_decode = chosen
    pages = lay_out(rows, PAGE, np.random.default_rng(0), spare_pages=1)
    kv = Layers(cache, pages, device)
    batch = planned(backend, forward_batch(rows, pages, kv, device))
    q, new = (torch.randn(batch.num_tokens, heads, WIDTH, dtype=torch.bfloat16, device=device) for heads in (HEADS, KV_HEADS))
    specs = [AttentionSpec(layer, HEADS, KV_HEADS, WIDTH, WIDTH, WIDTH**-0.5) for layer in range(kv.count)]
    own = [new, new]
    if cache == "bfloat16":  # its prompts read this step's keys and values
        own = [part.flatten(0, 1)[batch.kv_slots] for part in kv.layer(0)]
    try:
        difference = check(q, backend.run(specs[0], q, *own, batch), rows, pages, kv)
        calls = [partial(backend.run, spec, q, *own, batch) for spec in specs]
        graph = rows.num_decodes > 0
        calls *= max(1, 8 // len(calls)) if graph and device != "cpu" else 1
        timed = Clock(torch.device(device), budget).time(calls, graph)
    finally:
        if programs is not None:
            decode_launch.choose_decode = choose
    return {"us": round(timed.seconds * 1e6, 1), "difference": round(difference, 5)}


def measure_in_place(cache: str, rows: Rows, device: str, budget: float) -> dict[str, float]:
    """As `measure`, for prompts whose dequantized keys do not fit."""
    capabilities = TritonBackend.capabilities
    TritonBackend.capabilities = replace(capabilities, dequantized_bytes=0)
    try:
        return measure(cache, rows, device, budget)
    finally:
        TritonBackend.capabilities = capabilities


def compile_all(cache: str, device: str, programs: list[int]) -> None:
    """Runs every kernel variant once, in small."""
    for rows in SMALL:
        for number in [None, *programs] if rows.num_decodes else [None]:
            measure(cache, rows, device, 0.0, number)
        measure_in_place(cache, rows, device, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds of each measurement")
    parser.add_argument("--programs", type=int, nargs="*", default=[], help="further numbers of decode programs for each multiprocessor")
    parser.add_argument("--compile", choices=CACHES, help="only run each kernel of this cache once")
    arguments = parser.parse_args()
    device, programs = arguments.device, arguments.programs
    if arguments.compile:
        compile_all(arguments.compile, device, programs)
        return
    clock = time.perf_counter()
    if device == "cuda":
        command = [sys.executable, __file__, "--programs", *map(str, programs), "--compile"]
        for child in [subprocess.Popen([*command, cache], stdout=subprocess.DEVNULL) for cache in CACHES]:
            child.wait()
    print(f"compiled in {time.perf_counter() - clock:.1f} s", flush=True)
    named = [(f"decode {rows} x {context}", Rows.of([context] * rows)) for rows, context in DECODES]
    named += [(f"extend {rows} x ({prefix} + {new})", Rows.of([], [(prefix, new)] * rows)) for rows, prefix, new in PROMPTS]
    found: dict[str, dict[str, Any]] = {}
    for name, rows in named if device == "cuda" else [(str(number), rows) for number, rows in enumerate(SMALL)]:
        found[name] = {cache: measure(cache, rows, device, arguments.budget) for cache in CACHES}
        if rows.num_decodes:
            for number in programs:
                for cache in ("fp8", "int8"):
                    found[name][f"{cache}, {number} programs"] = measure(cache, rows, device, arguments.budget, number)
        elif rows.prefixes[0] >= 8192:  # as if the dequantized keys did not fit
            for cache in ("fp8", "int8"):
                found[name][f"{cache}, in place"] = measure_in_place(cache, rows, device, arguments.budget)
        base = found[name]["bfloat16"]["us"]
        shown = [f"{cache} {each['us']:,.1f} ({base / each['us']:.2f}x, {each['difference']:.4f})" for cache, each in found[name].items()]
        print(f"{name}: {'; '.join(shown)}", flush=True)
    wrong = [name for name, row in found.items() if any(each["difference"] > ALLOWED for each in row.values())]
    print(f"differences above {ALLOWED}: {wrong or 'none'}; {time.perf_counter() - clock:.1f} s")
    if arguments.out is not None:
        device_name = torch.cuda.get_device_name() if device == "cuda" else device
        arguments.out.write_text(json.dumps({"device": device_name, "torch": torch.__version__, "layers": found}, indent=1) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""Times the sampler on a GPU: its kernels, in CUDA graphs, and beside them PyTorch's operations,
launched one by one; writes JSON.

Logits are of three shapes: `peaked` (a few dozen tokens far above the rest, as a trained model's
mostly are), `power` (falling as a power of the rank) and `flat` (a wide normal distribution: with
top-p most of the vocabulary is kept). The floor is the time to read the logits once at the device's
measured copy rate. Each figure is the median of several replays of a graph of many calls.

    python benchmarks/sampling.py --out benchmarks/results/sampling.json
    python benchmarks/sampling.py --rows 1 64 --vocab 32000 --without-torch

To compare with an older commit (of 2026-11-21 or later), run the file on that commit's modules:

    git worktree add /tmp/before COMMIT
    PYTHONPATH=/tmp/before python benchmarks/sampling.py --without-torch --out before.json
    PYTHONPATH=. python benchmarks/sampling.py --without-torch --out after.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.core.sampling.sampling_metadata import PARAMETERS, DrawArrays, FilterArrays, SamplingArrays, SamplingPlan
from frame.kernels.sampling.logit_changes import apply_penalties, apply_token_mask
from frame.kernels.sampling.logprobs import compute_logprobs
from frame.kernels.sampling.operations import draw_filtered
from frame.kernels.sampling.sampling import sample_unfiltered

DEVICE = torch.device("cuda")
LN2 = math.log(2.0)
CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-p 0.95": {"top_p": 0.95},
    "temperature 0.6, top-k 20, top-p 0.95": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 3000": {"top_k": 3000},
}
Tensors = dict[str, torch.Tensor]


def make_logits(shape: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    logits = torch.randn(rows, vocab, device=DEVICE, generator=generator) * 2
    if shape == "peaked":
        at = torch.randint(0, vocab, (rows, 50), device=DEVICE, generator=generator)
        logits.scatter_(1, at, torch.rand(rows, 50, device=DEVICE, generator=generator) * 10 + 10)
    if shape == "power":
        ranks = torch.rand(rows, vocab, device=DEVICE, generator=generator) * vocab + 1
        logits = 18 - 1.5 * ranks.log() + 0.01 * logits
    return logits.bfloat16()


def make_params(rows: int, case: dict[str, float]) -> Tensors:
    one = torch.ones(rows, device=DEVICE)
    params = {
        "temperature": one * case.get("temperature", 1.0) * LN2,
        "key": torch.randint(2**62, (rows,), device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(0)),
    }
    if "uniform" in PARAMETERS:  # commits before the Gumbel race
        params["uniform"] = params.pop("key").double() * 2.0**-62
    if case.keys() - {"temperature"}:
        params["top_k"] = one.int() * int(case.get("top_k", 0))
        params["top_p"] = one * case.get("top_p", 1.0)
        params["log_min_p"] = one * (math.log2(case["min_p"]) if "min_p" in case else -math.inf)
    return params


def seconds(call: Callable[[torch.Tensor], Any], sets: list[torch.Tensor], calls: int, *, in_graph: bool = True) -> float:
    """Of one call, which gets the sets of logits in turn."""

    def every() -> None:
        for index in range(calls):
            call(sets[index % len(sets)])

    for each in sets:
        call(each)
    torch.cuda.synchronize()
    run = every
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            every()
        run = graph.replay
        run()
    times = []
    for _ in range(7 if in_graph else 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def use_triton(params: Tensors) -> Callable[[torch.Tensor], Any]:
    if "top_k" in params:
        return lambda logits: draw_filtered(logits, params)
    return lambda logits: sample_unfiltered(logits, params["temperature"], params["key"])


def by_torch(rows: int, case: dict[str, float], params: Tensors) -> Callable[[torch.Tensor], Any]:
    """The same step by the sampler without kernels."""
    is_drawn, has_k, has_p = case.get("temperature", 1.0) > 0, "top_k" in case, "top_p" in case
    plan = SamplingPlan(
        slots=np.arange(rows),
        positions=np.arange(rows),
        num_drawn=rows if is_drawn else 0,
        num_filtered=rows if has_k or has_p else 0,
        max_top_k=int(case.get("top_k", 0)),
        has_unlimited=has_p and not has_k,
        has_min_p="min_p" in case,
        num_top_logprobs=0,
        by_row=False,
        arrays=SamplingArrays(),
    )
    draw = DrawArrays(params["temperature"], params["key"]) if is_drawn else None
    tensors: SamplingArrays[torch.Tensor] = SamplingArrays(draw=draw)
    if draw is not None and "top_k" in params:
        if has_k or has_p:
            tensors.filters = FilterArrays(params["top_k"].long(), params["top_p"].double())
        draw.log_min_p = params["log_min_p"] if "min_p" in case else None
    sampler = Sampler(Processors((), rows), TORCH)
    return lambda logits: sampler.sample(logits, plan, None, tensors)


def others(rows: int, vocab: int) -> dict[str, Callable[[torch.Tensor], Any]]:
    """What some steps do besides drawing."""
    places = torch.arange(rows, device=DEVICE)
    mask = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), dtype=torch.int32, device=DEVICE)
    counts = (torch.rand(rows, vocab, device=DEVICE) < 0.005).int()
    factors = (torch.full((rows,), 0.1, device=DEVICE), torch.full((rows,), 0.1, device=DEVICE), torch.full((rows,), 1.1, device=DEVICE))
    scores = torch.randn(rows, vocab, device=DEVICE)
    return {
        "log-probabilities": lambda logits: compute_logprobs(logits, places, 0),
        "log-probabilities, top 20": lambda logits: compute_logprobs(logits, places, 20),
        "grammar masks of half the vocabulary": lambda logits: apply_token_mask(logits, places, mask),
        "penalties of 0.5 % of the vocabulary": lambda logits: apply_penalties(scores, places, counts, places, factors, (1 << 30) - 1),
    }


def host_seconds(call: Callable[[torch.Tensor], Any], logits: torch.Tensor) -> float:
    """What the launches of one call cost the host."""
    for _ in range(20):
        call(logits)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        call(logits)
    spent = (time.perf_counter() - start) / 100
    torch.cuda.synchronize()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--without-torch", action="store_true", help="time the kernels alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    size = 1 << 30
    memory = torch.zeros(2, size // 8, dtype=torch.int64, device=DEVICE)
    rate = 2 * size / seconds(lambda source: torch.neg(source, out=memory[0]), [memory[1]], 5)
    found: list[dict[str, Any]] = []

    def note(shape: str, name: str, rows: int, kernels: float, torch_seconds: float | None) -> None:
        floor = rows * args.vocab * 2 / rate
        found.append({"logits": shape, "case": name, "rows": rows, "kernels": kernels, "torch": torch_seconds, "floor": floor})
        beside = f"{torch_seconds * 1e6:9.1f}" if torch_seconds is not None else f"{'':9}"
        print(f"{shape:7} {name:38} {rows:4} rows {kernels * 1e6:8.1f} us, torch {beside}, floor {floor * 1e6:6.1f}", flush=True)

    for shape in ("peaked", "power", "flat"):
        for rows in args.rows:
            sets = [make_logits(shape, rows, args.vocab, seed) for seed in range(2 if rows > 16 else 8)]
            for name, case in CASES.items():
                params = make_params(rows, case)
                kernels = seconds(use_triton(params), sets, 20)
                slow = None if args.without_torch or shape != "peaked" else seconds(by_torch(rows, case, params), sets, 3, in_graph=False)
                note(shape, name, rows, kernels, slow)
            for name, call in others(rows, args.vocab).items() if shape == "peaked" else ():
                note(shape, name, rows, seconds(call, [each.clone() for each in sets], 20), None)
    logits = make_logits("peaked", 1, args.vocab, 0)
    host = {name: host_seconds(use_triton(make_params(1, CASES[name])), logits) for name in ("temperature", "top-p 0.95")}
    print("host, us a call outside of graphs:", {name: round(value * 1e6, 1) for name, value in host.items()})
    if args.out:
        result = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "vocab": args.vocab,
            "copy_bytes_per_second": rate,
            "seconds": found,
            "host_seconds": host,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

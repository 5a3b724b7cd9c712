"""Times the sampler on a CPU: draws without filters and with top-p, top-k or min-p; writes JSON.

Logits are `peaked` (fifty tokens far above the rest, as a trained model's mostly are) or `flat` (a
normal distribution). Each figure is the least of several repetitions. To compare with an older
commit, run the file on that commit's modules, in turn:

    git worktree add /tmp/before COMMIT
    PYTHONPATH=/tmp/before python benchmarks/sampling_cpu.py --out before.json
    PYTHONPATH=. python benchmarks/sampling_cpu.py --out after.json
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

from frame.core.execution.staging import SharedMemory
from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.batch_layout import compute_layout
from frame.core.sampling.logits_pipeline import Processors
from frame.core.sampling.sampler import TORCH, Sampler
from frame.core.sampling.sampling_metadata import SamplingTable

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "top-p 0.95": SamplingParams(top_p=0.95),
    "top-k 50": SamplingParams(top_k=50),
    "min-p 0.05": SamplingParams(min_p=0.05),
}


def make_logits(shape: str, rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    if shape == "peaked":
        places = torch.randint(0, vocab, (rows, 50), generator=generator)
        logits.scatter_(1, places, torch.rand(rows, 50, generator=generator) * 10 + 10)
    return logits


def seconds_of_step(logits: torch.Tensor, params: SamplingParams, repetitions: int) -> float:
    """Of the plan and the sampler's work of one decode step."""
    rows = len(logits)
    table, sampler = SamplingTable(rows), Sampler(Processors((), rows), TORCH)
    table.update([SlotSetup(row, params, row, 5, np.arange(5, dtype=np.int32)) for row in range(rows)], [])
    batch = ScheduledBatch(
        step=0,
        num_decodes=rows,
        slots=np.arange(rows, dtype=np.int32),
        num_computed=np.full(rows, 9, np.int32),
        num_scheduled=np.ones(rows, np.int32),
        token_ids=np.empty(0, np.int32),
        samples=np.ones(rows, np.bool_),
        new_pages=np.empty((0, 3), np.int32),
    )
    layout = compute_layout(batch)
    minimum = math.inf
    for _ in range(repetitions):
        start = time.perf_counter()
        plan = table.begin_step(batch, layout, draws=False)
        sampler.sample(logits, plan, None, SharedMemory().move(plan.arrays))
        minimum = min(minimum, time.perf_counter() - start)
    return minimum


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 32_000, 128_256])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = []
    with torch.inference_mode():
        for vocab in args.vocab:
            for rows in args.rows:
                for shape in ("peaked", "flat"):
                    logits = make_logits(shape, rows, vocab)
                    repetitions = 4 if logits.numel() > 4_000_000 else 200
                    for name in args.cases:
                        seconds = seconds_of_step(logits, CASES[name], repetitions)
                        found.append({"vocab": vocab, "rows": rows, "logits": shape, "case": name, "seconds": seconds})
                        print(f"{vocab:7} {rows:4} rows {shape:7} {name:12} {seconds * 1e3:9.3f} ms", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "threads": args.threads, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

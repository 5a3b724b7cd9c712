"""Times the three parts of sparse attention in the shapes of DeepSeek-V3.2, for decodes on one
rank of eight: scores of the indexer, the selection, and attention over the selected latents; beside
them PyTorch's `topk` over the same scores, and attention without a division of keys. Then attention
with the heads of all ranks, by programs of 16 and of 64 heads. In bfloat16, in CUDA graphs. Tables
have room for 128k tokens.

python benchmarks/sparse_attention.py --out benchmarks/results/sparse-attention.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from frame.attention_backends.triton import sparse_kernel
from frame.attention_backends.triton.sparse_kernel import attend_sparse
from frame.entrypoints.tools.bench.clock import Clock
from frame.kernels.index_scores import score_keys, select_best, select_keys

DEVICE, PAGE = torch.device("cuda"), 64
INDEX_HEADS, INDEX_SIZE, SELECTED = 64, 128, 2048
HEADS, RANK, ROPE = 16, 512, 64  # of one rank
ALL_HEADS, TOKENS = 128, (64, 1024)
ROWS, CONTEXTS = (1, 8, 64), (4096, 32_768, 131_072)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


@torch.inference_mode()
def measure(rows: int, context: int) -> dict[str, float]:
    """Microseconds of each part. All rows share their pages, which then fit in memory."""
    pages, width = context // PAGE, CONTEXTS[-1]
    keys, latents = random(pages, PAGE, INDEX_SIZE), random(context, RANK + ROPE)
    table = torch.arange(width // PAGE, device=DEVICE, dtype=torch.int32).remainder(pages).expand(rows, -1).contiguous()
    owners, positions = torch.arange(rows, device=DEVICE), torch.full((rows,), context - 1, device=DEVICE)
    q, weights = random(rows, INDEX_HEADS, INDEX_SIZE), torch.randn(rows, INDEX_HEADS, device=DEVICE)
    inputs = q, weights, keys, table, owners, positions, width, SELECTED
    scores, counts = score_keys(*inputs)
    first, slots = counts.clone(), select_keys(*inputs)
    exact = scores[:, :context].contiguous()
    absorbed, rope = random(rows, HEADS, RANK), random(rows, HEADS, ROPE)

    def select() -> None:
        counts.copy_(first)
        select_best(scores, counts, table, owners, positions, PAGE, SELECTED)

    attend = partial(attend_sparse, absorbed, rope, latents, slots, 0.1, 1.0)
    parts = {
        "scores": partial(score_keys, *inputs), "selection": select, "topk": partial(exact.topk, SELECTED, -1, sorted=False),
        "attention": attend,
    }  # fmt: skip
    found = {name: measure_once(part) for name, part in parts.items()}
    programs, sparse_kernel.PROGRAMS = sparse_kernel.PROGRAMS, 1
    found["attention undivided"] = measure_once(attend)
    sparse_kernel.PROGRAMS = programs
    found["attention, 2 stages"] = measure_stages(attend)
    best = exact.topk(SELECTED, -1).indices
    rows_of = table.gather(1, best // PAGE).long() * PAGE + best % PAGE
    found["equal slots"] = int(sum(len(set(a) & set(b)) for a, b in zip(slots.tolist(), rows_of.tolist(), strict=True))) / rows
    return found


@torch.inference_mode()
def measure_heads(tokens: int) -> dict[str, float]:
    """Microseconds of attention with 128 heads over 32k tokens."""
    total = CONTEXTS[1]
    latents, absorbed, rope = random(total, RANK + ROPE), random(tokens, ALL_HEADS, RANK), random(tokens, ALL_HEADS, ROPE)
    slots = torch.rand(tokens, total, device=DEVICE).topk(SELECTED, -1).indices.sort(-1).values
    found = {}
    for name, memory in (("16 heads", 0), ("64 heads", 1 << 20)):
        attend = partial(attend_sparse, absorbed, rope, latents, slots, 0.1, 1.0, memory)
        found[name], found[f"{name}, 2 stages"] = measure_once(attend), measure_stages(attend)
    return found


def measure_stages(part: Callable[[], Any]) -> float:
    stages, sparse_kernel.STAGES = sparse_kernel.STAGES, 2
    found = measure_once(part)
    sparse_kernel.STAGES = stages
    return found


def measure_once(part: Callable[[], Any]) -> float:
    return round(Clock(DEVICE, 0.15).time([part]).seconds * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out, found = parser.parse_args().out, {}
    for rows in ROWS:
        for context in CONTEXTS:
            found[f"{rows} x {context}"] = measure(rows, context)
            print(rows, context, found[f"{rows} x {context}"], flush=True)
    for tokens in TOKENS:
        found[f"{tokens} tokens, {ALL_HEADS} heads"] = measure_heads(tokens)
        print(tokens, found[f"{tokens} tokens, {ALL_HEADS} heads"], flush=True)
    if out is not None:
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

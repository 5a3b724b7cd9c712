"""Times the three parts of sparse attention in the shapes of DeepSeek-V3.2, for decodes on one
rank of eight: scores of the indexer, the selection, and attention over the selected latents. In
bfloat16, in CUDA graphs.

python benchmarks/sparse_attention.py --out benchmarks/results/sparse-attention.json
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch

from frame.attention_backends.triton.sparse_kernel import attend_sparse
from frame.entrypoints.tools.bench.clock import Clock
from frame.kernels.index_scores import score_keys

DEVICE, PAGE = torch.device("cuda"), 64
INDEX_HEADS, INDEX_SIZE, SELECTED = 64, 128, 2048
HEADS, RANK, ROPE = 16, 512, 64  # of one rank
ROWS, CONTEXTS = (1, 8, 64), (4096, 32_768, 131_072)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


@torch.inference_mode()
def measure(rows: int, context: int) -> dict[str, float]:
    """Microseconds of each part. All rows share their pages, which then fit in memory."""
    pages = context // PAGE
    keys, latents = random(pages, PAGE, INDEX_SIZE), random(context, RANK + ROPE)
    table = torch.arange(pages, device=DEVICE, dtype=torch.int32).expand(rows, -1).contiguous()
    positions = torch.full((rows,), context - 1, device=DEVICE)
    q, weights = random(rows, INDEX_HEADS, INDEX_SIZE), torch.randn(rows, INDEX_HEADS, device=DEVICE)
    scores = score_keys(q, weights, keys, table, positions)
    slots = scores.topk(SELECTED, -1).indices
    absorbed, rope = random(rows, HEADS, RANK), random(rows, HEADS, ROPE)
    parts = {
        "scores": partial(score_keys, q, weights, keys, table, positions),
        "selection": partial(scores.topk, SELECTED, -1),
        "attention": partial(attend_sparse, absorbed, rope, latents, slots, 0.1, 1.0),
    }
    return {name: round(Clock(DEVICE, 0.2).time([part]).seconds * 1e6, 1) for name, part in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out, found = parser.parse_args().out, {}
    for rows in ROWS:
        for context in CONTEXTS:
            found[f"{rows} x {context}"] = measure(rows, context)
            print(rows, context, found[f"{rows} x {context}"], flush=True)
    if out is not None:
        out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "microseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

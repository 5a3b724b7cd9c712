"""The cases of the attention conformance suite, with the batches that they are made of.

Used by the suite, and by tests of packages with attention backends. Cases are drawn within a
backend's capabilities. Must not know the scheduler or a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from frame.entrypoints.tools.bench.paged_batches import (
    DTYPES,
    Case,
    Rows,
    requirements,
)

Changes = tuple[tuple[Rows, tuple[tuple[int, int], ...]], ...]  # rows and groups to replay a captured case for

DECODES = Rows.of([5, 37, 300, 1])
EXTENDS = Rows.of([], [(0, 21), (34, 9), (0, 1), (0, 18)])
MIXED = Rows.of([5, 70], [(0, 21), (34, 9), (60, 1)])
PROMPTS = Rows.of([5], [(40, 300), (0, 270)])  # so many queries that a backend may convert each key once
LATENT: dict[str, Any] = {"rank": 32, "rope": 16, "head_dim": 40, "v_head_dim": 24, "heads": 4}


# cases that differ by dtype in more than the type of their numbers: in the sizes of tiles, or in
# what is converted to what
EACH_DTYPE = (
    *(f"{kind}-{rows}" for kind in ("mha", "mla", "mha-fp8", "mla-fp8") for rows in ("decodes", "extends", "mixed")),
    *("mha-odd-widths", "mha-sinks", "mha-window-extends", "mha-soft-cap", "encoder", "mha-shared-prefix", "mla-shared-prefix"),
    *(f"mha-long-width-{width}" for width in ("64", "128", "256", "192-values-128")),
    *("mla-512-64-pages-of-64", "mla-512-64-many-heads", "mla-512-64-decodes", "mla-256-64"),
)


def cases(device: str, thorough: bool, capabilities: Any) -> Iterator[tuple[str, Case]]:
    """Named cases that the capabilities cover: those of `EACH_DTYPE` in every dtype where there is
    time for it, the others in one."""
    candidates = [*_heads_cases(), *_latent_cases(), *_encoder_cases(), *_shared_cases(), *_fp8_cases(), *_chunked_cases(), *_int8_cases()]
    candidates += [*_sparse_cases(), *_tree_cases(), *_span_cases()]
    if thorough:
        candidates += [*_large_cases(), *_fuzzed_cases(60)]
    if getattr(capabilities, "latent_heads", False):
        candidates += [*_wide_cases(32, 16), *(_wide_cases(512, 64) if thorough else ())]
    candidates += _long_cases()
    names = [name for name in DTYPES if name in getattr(capabilities, "dtypes", DTYPES)]
    for index, (name, case) in enumerate(candidates):
        one = np.random.default_rng(index).integers(len(names)) if thorough else index % len(names)
        for dtype in names if thorough and name in EACH_DTYPE else [names[one]]:
            placed = replace(with_pages_for(case, capabilities), dtype=DTYPES[dtype], device=device, seed=index)
            if not capabilities.unsupported(requirements(placed)):
                yield f"{name}-{dtype}", placed


def with_pages_for(case: Case, capabilities: Any) -> Case:
    """The case with pages of a size that the backend takes, unless rows have pages in common."""
    sizes = getattr(capabilities, "page_sizes", None)
    return replace(case, page_size=sizes[0]) if sizes and case.page_size not in sizes and not case.groups else case


def _chunked_cases() -> Iterator[tuple[str, Case]]:
    yield "mha-chunks", Case(MIXED, window=24, chunked=True, head_dim=64, v_head_dim=64)
    yield "mha-chunks-decodes", Case(DECODES, window=37, chunked=True, head_dim=64, v_head_dim=64)
    yield "mha-chunks-extends", Case(EXTENDS, window=8, chunked=True, sinks=True, head_dim=64, v_head_dim=64)


def _heads_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mha-{name}", Case(rows, head_dim=64, v_head_dim=64)
        yield f"mha-{name}-pages-of-1", Case(rows, page_size=1, head_dim=64, v_head_dim=64)
    yield "mha-pages-of-3", Case(MIXED, page_size=3)
    yield "mha-pages-of-64", Case(MIXED, page_size=64, head_dim=128, v_head_dim=128)
    yield "mha-pages-in-order", Case(MIXED, page_size=16, head_dim=64, v_head_dim=64, shuffled=False)
    yield "mha-one-row", Case(Rows.of([129]), head_dim=64, v_head_dim=64)
    yield "mha-seven-heads-a-key", Case(MIXED, heads=7, kv_heads=1, head_dim=64, v_head_dim=64)
    yield "mha-twelve-heads-a-key", Case(MIXED, heads=24, kv_heads=2, head_dim=64, v_head_dim=64)
    yield "mha-as-many-keys-as-heads", Case(MIXED, heads=3, kv_heads=3, head_dim=64, v_head_dim=64)
    yield "mha-odd-widths", Case(MIXED, head_dim=80, v_head_dim=80)
    yield "mha-narrow-values", Case(MIXED, head_dim=48, v_head_dim=24)
    yield "mha-wide-values", Case(MIXED, head_dim=24, v_head_dim=40)
    yield "mha-window-decodes", Case(DECODES, window=33, head_dim=64, v_head_dim=64)
    yield "mha-window-extends", Case(EXTENDS, window=8, head_dim=64, v_head_dim=64)
    yield "mha-window-of-one", Case(MIXED, window=1, head_dim=64, v_head_dim=64)
    yield "mha-soft-cap", Case(MIXED, soft_cap=1.5, head_dim=64, v_head_dim=64)
    yield "mha-sinks", Case(MIXED, sinks=True, head_dim=64, v_head_dim=64)
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends")):
        yield f"mha-large-scores-{name}", Case(rows, head_dim=64, v_head_dim=64, scores=40.0)
        yield f"mha-large-products-{name}", Case(rows, head_dim=64, v_head_dim=64, magnitude=4096.0)
    yield "mha-large-scores-sinks", Case(MIXED, sinks=True, head_dim=64, v_head_dim=64, scores=40.0)
    yield "mha-long-rows", Case(Rows.of([5000], [(4200, 33)]), heads=2, kv_heads=1, head_dim=64, v_head_dim=64)
    many = Rows.of([1 + n % 23 for n in range(68)], [(n, 1 + n % 2) for n in range(5)])
    yield "mha-many-rows", Case(many, heads=2, kv_heads=1, head_dim=64, v_head_dim=64)
    yield "mha-sinks-decodes-window", Case(DECODES, sinks=True, window=40, head_dim=64, v_head_dim=64)


def _long_cases() -> Iterator[tuple[str, Case]]:
    """One row with so many queries that a backend may compute them block by block; more heads a key
    than keys."""
    rows = Rows.of([5], [(100, 1100)])
    shape: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    yield "mha-long-extends", Case(rows, **shape)
    yield "mha-long-extends-window", Case(rows, window=70, **shape)
    yield "mha-long-extends-chunks", Case(rows, window=70, chunked=True, **shape)
    yield "mha-long-extends-sinks", Case(rows, sinks=True, **shape)
    yield "mha-long-extends-sinks-window", Case(rows, sinks=True, window=700, **shape)
    yield "mha-long-extends-soft-cap", Case(rows, soft_cap=1.5, **shape)


def _sparse_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mla-selected-keys-{name}", Case(rows, selected=9, **LATENT)
    yield "mla-selected-keys-pages-of-64", Case(MIXED, selected=40, page_size=64, **LATENT)
    yield "mla-selected-keys-int8", Case(MIXED, selected=40, kv_dtype=torch.int8, **LATENT)


def _tree_cases() -> Iterator[tuple[str, Case]]:
    rows = Rows.of([5, 70], [(34, 9), (0, 21), (60, 4), (300, 17), (7, 2)])
    yield "mha-trees", Case(rows, trees=True, page_size=4)
    yield "mla-trees", Case(rows, trees=True, **LATENT)


def _span_cases() -> Iterator[tuple[str, Case]]:
    yield "mha-spans", Case(MIXED, spans=True, page_size=4)
    yield "mha-spans-window", Case(MIXED, spans=True, window=9, head_dim=64, v_head_dim=64)
    yield "mha-spans-of-other-layers", Case(MIXED, spans=True, reads_spans=False, page_size=4)
    yield "mha-spans-long-rows", Case(Rows.of([70], [(2500, 33), (0, 200)]), spans=True, heads=2, kv_heads=1, head_dim=64, v_head_dim=64)


def select_positions(case: Case, position: int) -> np.ndarray:
    """The keys that the token at a position attends to in a case of sparse attention: its own, and
    random ones before it."""
    before = np.random.default_rng((case.seed, position)).permutation(position)
    positions: np.ndarray = np.concatenate(([position], before[: case.selected - 1]))
    return positions


def _latent_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mla-{name}", Case(rows, **LATENT)
    yield "mla-pages-of-1", Case(MIXED, page_size=1, **LATENT)
    yield "mla-pages-of-64", Case(MIXED, page_size=64, **LATENT)
    yield "mla-short-extends-of-long-rows", Case(Rows.of([40], [(250, 2), (200, 3)]), **LATENT)
    yield "mla-large-scores", Case(MIXED, scores=40.0, **LATENT)
    yield "mla-window", Case(MIXED, window=12, **LATENT)
    yield "mla-soft-cap", Case(MIXED, soft_cap=1.5, **LATENT)


def _wide_cases(rank: int, rope: int) -> Iterator[tuple[str, Case]]:
    """Heads as wide as the latent."""
    sizes: dict[str, Any] = {"rank": rank, "rope": rope, "head_dim": rank + rope, "v_head_dim": rank, "heads": 4}
    for rows, name in ((DECODES, "decodes"), (EXTENDS, "extends"), (MIXED, "mixed")):
        yield f"mla-latent-heads-{rank}-{name}", Case(rows, **sizes)


SHARED_ROWS = Rows.of([600, 593, 640, 700, 594, 601, 602, 603, 604, 30])
SHARED_GROUPS = ((9, 37),)  # 592 tokens


def _shared_cases() -> Iterator[tuple[str, Case]]:
    """Decodes of rows that have the beginning of their keys in common."""
    yield "mha-shared-prefix", Case(SHARED_ROWS, groups=SHARED_GROUPS)
    yield "mha-shared-prefix-eight-heads-a-key", Case(SHARED_ROWS, groups=SHARED_GROUPS, heads=8, kv_heads=1)
    two = Rows.of([840, 850, 833, 900, 834, 20, 1300, 1025, 1030, 1040, 1026], [(5, 9)])
    yield "mha-two-shared-prefixes", Case(two, groups=((5, 52), (1, 0), (5, 64)), heads=3, kv_heads=1)
    yield "mha-shared-prefix-sinks", Case(SHARED_ROWS, groups=SHARED_GROUPS, sinks=True)
    yield "mha-shared-prefix-window", Case(SHARED_ROWS, groups=SHARED_GROUPS, window=50)
    yield "mha-shared-prefix-soft-cap", Case(SHARED_ROWS, groups=SHARED_GROUPS, soft_cap=1.5)
    yield "mla-shared-prefix", Case(SHARED_ROWS, groups=SHARED_GROUPS, **LATENT)


def _fp8_cases() -> Iterator[tuple[str, Case]]:
    fp8 = torch.float8_e4m3fn
    for rows, name in ((DECODES, "decodes"), (MIXED, "mixed")):
        yield f"mha-fp8-{name}", Case(rows, head_dim=64, v_head_dim=64, kv_dtype=fp8, kv_scales=(2.0, 0.5))
        yield f"mla-fp8-{name}", Case(rows, kv_dtype=fp8, kv_scales=(0.5, 1.0), **LATENT)
    yield "mha-fp8-prompts", Case(PROMPTS, head_dim=64, v_head_dim=32, kv_dtype=fp8, kv_scales=(2.0, 0.5), sinks=True)


def _int8_cases() -> Iterator[tuple[str, Case]]:
    for rows, name in ((DECODES, "decodes"), (MIXED, "mixed")):
        yield f"mha-int8-{name}", Case(rows, head_dim=64, v_head_dim=64, kv_dtype=torch.int8)
        yield f"mla-int8-{name}", Case(rows, kv_dtype=torch.int8, **LATENT)
    yield "mha-int8-prompts", Case(PROMPTS, head_dim=80, v_head_dim=80, kv_dtype=torch.int8, page_size=5)
    yield "mha-int8-odd-widths", Case(MIXED, head_dim=80, v_head_dim=80, kv_dtype=torch.int8, soft_cap=1.5)


def replays() -> Iterator[tuple[str, Case, Changes]]:
    """Cases to capture, and the rows and groups to replay them for."""
    bf16, few, many = torch.bfloat16, Rows.of([5, 37, 300, 1]), Rows.of([3000, 1, 17, 64])
    heads = Case(few, heads=8, kv_heads=2, head_dim=128, v_head_dim=128, dtype=bf16)
    yield "mha", heads, ((many, ()), (few, ()))
    yield "mha-fp8", replace(heads, kv_dtype=torch.float8_e4m3fn), ((many, ()),)
    yield "mha-window", replace(heads, window=100), ((many, ()),)
    yield "mla", Case(few, dtype=bf16, heads=16, rank=512, rope=64, head_dim=192, v_head_dim=128), ((many, ()), (few, ()))
    one = Rows.of([7])
    yield "mha-one-row", replace(heads, rows=one), ((Rows.of([40_000]), ()), (one, ()))
    shared = replace(heads, rows=SHARED_ROWS)
    longer = Rows.of([length + 1 for length in SHARED_ROWS.lengths.tolist()])
    yield (
        "mha-shared-prefix",
        shared,
        ((SHARED_ROWS, SHARED_GROUPS), (longer, SHARED_GROUPS), (SHARED_ROWS, ()), (longer, ((4, 37), (5, 37)))),
    )
    similar = Rows.of([4200 + row for row in range(64)])
    yield "mha-shared-prefix-64-rows", replace(heads, rows=similar, groups=((64, 256),)), ((similar, ()), (similar, ((30, 256), (34, 250))))


def _encoder_cases() -> Iterator[tuple[str, Case]]:
    fresh = Rows.of([], [(0, 21), (0, 1), (0, 9), (0, 130), (0, 21), (0, 131)])
    yield "encoder", Case(fresh, kv_heads=4, causal=False)
    yield "encoder-equal-rows", Case(Rows.of([], [(0, 40)] * 3), kv_heads=4, head_dim=64, v_head_dim=64, causal=False)
    yield "encoder-shared-keys", Case(fresh, heads=6, kv_heads=2, causal=False)
    yield "encoder-soft-cap", Case(fresh, soft_cap=1.5, causal=False)


def _large_cases() -> Iterator[tuple[str, Case]]:
    long = Rows.of([3000, 17, 5000], [(1000, 513), (0, 700), (2047, 65)])
    for width in (64, 128, 256):
        yield f"mha-long-width-{width}", Case(long, heads=8, kv_heads=2, head_dim=width, v_head_dim=width)
    yield "mha-long-width-192-values-128", Case(long, heads=4, kv_heads=4, head_dim=192, v_head_dim=128)
    yield "mha-long-window", Case(long, heads=8, kv_heads=2, head_dim=128, v_head_dim=128, window=700)
    many = Rows.of(list(range(1, 200)), [(n, n % 7 + 1) for n in range(40)])
    yield "mha-many-long-rows", Case(many, heads=4, kv_heads=1, head_dim=64, v_head_dim=64)
    deepseek: dict[str, Any] = {"heads": 16, "rank": 512, "rope": 64, "head_dim": 192, "v_head_dim": 128}
    for page_size in (1, 64):
        yield f"mla-512-64-pages-of-{page_size}", Case(long, page_size=page_size, **deepseek)
    yield "mla-512-64-decodes", Case(Rows.of([3000, 17, 5000, 1, 64, 65]), page_size=64, **deepseek)
    yield "mla-512-64-decodes-many-heads", Case(Rows.of(list(range(1, 400, 7))), page_size=64, **{**deepseek, "heads": 128})
    yield "mla-512-64-many-heads", Case(Rows.of([700, 90], [(50, 40)]), **{**deepseek, "heads": 128})
    yield "mla-256-64", Case(long, heads=8, rank=256, rope=64, head_dim=128, v_head_dim=64)


def _fuzzed_cases(count: int) -> Iterator[tuple[str, Case]]:
    for seed in range(count):
        rng = np.random.default_rng(seed)
        kv_heads, group = int(rng.integers(1, 5)), int(rng.choice([1, 2, 3, 4, 5, 8]))
        decodes = [int(n) for n in rng.integers(1, int(rng.choice([20, 600])), int(rng.integers(0, 9)))]
        count_extends = int(rng.integers(not decodes, 6))
        prefixes = rng.integers(0, 300, count_extends) * rng.integers(0, 2, count_extends)
        extends = [(int(prefix), int(rng.integers(1, 150))) for prefix in prefixes]
        shared: dict[str, Any] = {
            "rows": Rows.of(decodes, extends),
            "page_size": int(rng.choice([1, 2, 5, 16, 32, 64, 128])),
            "window": int(rng.integers(1, 200)) if rng.random() < 0.3 else None,
            "soft_cap": float(rng.uniform(1, 30)) if rng.random() < 0.2 else None,
            "sinks": bool(rng.random() < 0.2),
            "shuffled": bool(rng.random() < 0.8),
        }
        widths = [16, 32, 40, 64, 80, 96, 128, 192]
        if seed % 3:
            width = int(rng.choice(widths))
            value = width if rng.random() < 0.7 else int(rng.choice(widths))
            yield f"mha-fuzzed-{seed}", Case(heads=kv_heads * group, kv_heads=kv_heads, head_dim=width, v_head_dim=value, **shared)
        else:
            rope = int(rng.choice([8, 16, 32, 64]))
            nope, value = (int(n) for n in rng.choice([16, 32, 64, 128], 2))
            heads, rank = int(rng.choice([1, 3, 8, 16, 20])), int(rng.choice([32, 64, 96, 128, 256, 512]))
            yield f"mla-fuzzed-{seed}", Case(heads=heads, rank=rank, rope=rope, head_dim=nope + rope, v_head_dim=value, **shared)

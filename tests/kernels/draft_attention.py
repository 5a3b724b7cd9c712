"""Attention of the `triton` backend over rows that are consecutive tokens of one request (a draft),
which read its keys together.

Run by `test_interpreted.py` under TRITON_INTERPRET=1, and by tests/gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch, HostView, TreeMask
from frame.entrypoints.tools.bench.paged_batches import PlainKVCache, build_context
from frame.kernels import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
PAGE, WIDTH = 16, 16


def draw_tree(numbers: np.random.Generator, nodes: int) -> list[int]:
    """The words of `TreeMask.bits` of a tree's nodes."""
    sees: list[set[int]] = []
    for node in range(nodes):
        sees.append({node} | (sees[numbers.integers(node)] if node else set()))
    return [-1 - sum(1 << (node - other) for other in range(node) if other not in sees[node]) for node in range(nodes)]


def attend(
    runs: list[tuple[int, int]], num_drafted: int, heads: int, dtype: torch.dtype, trees: bool = False, **extra: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by request: (keys of the first row, rows). -> (what the backend computes, the same by
    PyTorch in float32), [rows, heads, WIDTH]. trees: the rows of a request are a random tree.
    extra: fields of the layer."""
    from frame.attention_backends.triton.backend import TritonBackend

    context = build_context(DEVICE, dtype, PAGE)
    backend = TritonBackend(replace(context, limits=replace(context.limits, max_drafted=num_drafted)))
    lens = np.concatenate([np.arange(first, first + count) for first, count in runs]).astype(np.int32)
    slots = np.repeat(np.arange(len(runs)), [count for _, count in runs]).astype(np.int32)
    pages = -(-int(lens.max()) // PAGE)
    numbers, count, ones = np.random.default_rng(0), len(lens), np.ones(len(lens), np.int32)
    table = 1 + numbers.permutation(len(runs) * pages).reshape(len(runs), pages).astype(np.int32)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.standard_normal(shape)).to(DEVICE, dtype)

    def put(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(DEVICE, kind)

    k, v, q = draw(table.size + 1, PAGE, 2, WIDTH), draw(table.size + 1, PAGE, 2, WIDTH), draw(count, heads, WIDTH)
    counted = torch.arange(count + 1, device=DEVICE)
    batch = ForwardBatch(
        num_decodes=count,
        token_ids=counted[:-1],
        positions=put(lens - 1, torch.int64),
        kv_slots=counted[:-1],
        request_slots=put(slots, torch.int64),
        seq_lens=put(lens, torch.int32),
        query_lens=put(ones, torch.int32),
        query_starts=counted.int(),
        page_table=put(table, torch.int32),
        logits_indices=counted[:-1],
        kv=PlainKVCache(PAGE, (k, v)),
        host=HostView(slots, ones, lens, table),
    )
    words = [word for _, nodes in runs for word in draw_tree(numbers, nodes)]
    if trees:
        mask = TreeMask(np.arange(count), put(np.array(words, np.int32), torch.int32))
        batch = replace(batch, extensions={TreeMask: mask})
    spec = AttentionSpec(layer=0, num_heads=heads, num_kv_heads=2, head_dim=WIDTH, v_head_dim=WIDTH, scale=WIDTH**-0.5, **extra)
    found = backend.run(spec, q, k[0], v[0], replace(batch, plan=backend.plan(batch)))
    expected = []
    for row, length in enumerate(lens):
        positions = np.arange(length)
        places = put(table[slots[row], positions // PAGE] * PAGE + positions % PAGE, torch.int64)
        keys, values = (part.flatten(0, 1)[places].float().repeat_interleave(heads // 2, 1) for part in (k, v))
        scores = torch.einsum("hd,khd->hk", q[row].float(), keys) * spec.scale
        if trees:
            scores[:, [int(length) - 1 - away for away in range(min(31, length)) if not int(words[row]) >> away & 1]] = float("-inf")
        if spec.sliding_window is not None:
            scores[:, : max(0, int(length) - spec.sliding_window)] = float("-inf")
        weights = scores.softmax(-1)
        if spec.sinks is not None:
            weights = torch.cat([scores, spec.sinks[:, None]], 1).softmax(-1)[:, :-1]
        expected.append(torch.einsum("hk,khd->hd", weights, values))
    return found.float(), torch.stack(expected)


@pytest.mark.parametrize(
    ("runs", "num_drafted", "heads"),
    [
        ([(5, 4), (70, 4), (33, 1)], 3, 8),  # rows of one item each
        ([(62, 4), (129, 3), (1, 2)], 3, 10),  # 5 heads and 3 tokens a tile; keys that some of its tokens do not see
        ([(1, 6), (300, 8), (63, 3)], 7, 8),  # longer drafts than a tile
        ([(700, 4)], 3, 8),  # several items a row
        ([(1500, 4), (1490, 4), (20, 2)], 3, 8),  # the first two share their prefixes
        ([(70, 4), (33, 2)], 3, 64),  # no room for a second token
    ],
)
def test_tokens_of_a_draft_see_the_keys_before_them(runs: list[tuple[int, int]], num_drafted: int, heads: int) -> None:
    found, expected = attend(runs, num_drafted, heads, torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("runs", "num_drafted", "heads"),
    [
        ([(5, 4), (70, 9), (33, 1)], 8, 8),  # branches in several tiles
        ([(62, 4), (129, 7), (1, 2)], 6, 64),  # no room for a second token
        ([(430, 12), (20, 2)], 11, 8),  # several items a row
    ],
)
def test_tokens_of_a_tree_see_their_branch(runs: list[tuple[int, int]], num_drafted: int, heads: int) -> None:
    found, expected = attend(runs, num_drafted, heads, torch.float32, trees=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sinks_and_windows() -> None:
    sinks = torch.linspace(-1, 2, 8, device=DEVICE)
    for extra in ({"sinks": sinks}, {"sliding_window": 40}):
        found, expected = attend([(150, 4), (30, 3)], 3, 8, torch.float32, **extra)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16() -> None:
    found, expected = attend([(150, 4), (30, 3), (7, 1)], 3, 8, torch.bfloat16)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)

"""Attention whose result for a token has the same bits in every batch, for
`RankContext.deterministic`.

A token attends to tiles of `KEYS` keys at absolute positions, from its first tile to its own, by
matmuls of fixed inner sizes and an online softmax in float32. A hidden key and a tile without
visible keys add exactly nothing, so that decodes, extends of any length and cached prefixes are one
form. Used by the `torch_native` backend. Must not know a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.interfaces.batch import TreeMask
from frame.core.interfaces.media import MediaSpans
from frame.kernels.linear.invariant import TILE, InvariantRows, map_elements

if TYPE_CHECKING:
    from frame.core.interfaces.attention_spec import AttentionSpec
    from frame.core.interfaces.batch import ForwardBatch

KEYS = 64  # of a tile
QUERIES = (1, 4, 16, 64)  # of a block, padded to one of these
CELLS = 1 << 22  # scores that are computed at a time
LOWEST = -1e30  # of the scores of no key: finite, so that differences are numbers

ReadRows = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # KV slots [n] -> keys and values [n, kv heads, …]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of as many queries, those with the latest keys first."""

    rows: np.ndarray  # [n]
    tokens: np.ndarray  # [n, queries] of the step; the last one again for padding
    positions: np.ndarray  # [n, queries]


class TiledStep:
    """The blocks of one step. queries: at most so many in a block."""

    def __init__(self, batch: ForwardBatch, queries: int) -> None:
        if batch.get(TreeMask) is not None or batch.get(MediaSpans) is not None:
            raise ValueError("execution.deterministic computes no masks of trees and of media; set it to false")
        self._batch, self._queries = batch, queries

    @cached_property
    def blocks(self) -> list[Blocks]:
        """All blocks, by their number of queries."""
        host = self._batch.host
        counts = host.query_lens.astype(np.int64)
        prefixes = host.seq_lens.astype(np.int64) - counts
        pieces = -(-counts // self._queries)
        rows = np.repeat(np.arange(len(counts)), pieces)
        first = (np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * self._queries
        size = np.minimum(counts[rows] - first, self._queries)
        padded = np.array(QUERIES)[np.searchsorted(QUERIES, size)]
        order = np.argsort(-(prefixes[rows] + first + size), kind="stable")
        starts, result = np.cumsum(counts) - counts, []
        for queries in np.unique(padded):
            some = order[padded[order] == queries]
            within = first[some, None] + np.minimum(np.arange(queries), size[some, None] - 1)
            result.append(Blocks(rows[some], starts[rows[some], None] + within, prefixes[rows[some], None] + within))
        return result

    def find_slots(self, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """The KV slots of `positions` [n, keys] of rows [n], flat."""
        host, size = self._batch.host, self._batch.kv.page_size
        pages = host.page_table[host.slots[rows].astype(np.int64)[:, None], positions // size].astype(np.int64)
        return torch.from_numpy((pages * size + positions % size).reshape(-1)).to(self._batch.token_ids.device)


def attend_tiled(spec: AttentionSpec, q: torch.Tensor, read: ReadRows, value_width: int, step: TiledStep) -> torch.Tensor:
    """q [tokens, heads, d] -> [tokens, heads, value_width]."""
    out = q.new_empty(*q.shape[:2], value_width)
    for blocks in step.blocks:
        max_blocks = max(1, CELLS // (blocks.tokens.shape[1] * spec.num_heads * KEYS))
        for start in range(0, len(blocks.rows), max_blocks):
            some = Blocks(*(each[start : start + max_blocks] for each in (blocks.rows, blocks.tokens, blocks.positions)))
            tokens = torch.from_numpy(some.tokens).to(q.device)
            out[tokens.flatten()] = _attend_blocks(spec, q[tokens], read, value_width, some, step).flatten(0, 1).to(q.dtype)
    return out


def _attend_blocks(
    spec: AttentionSpec, q: torch.Tensor, read: ReadRows, value_width: int, blocks: Blocks, step: TiledStep
) -> torch.Tensor:
    """q [n, queries, heads, d] -> float32 [n, queries, heads, value_width]."""
    (count, queries, heads, width), kv_heads, device = q.shape, spec.num_kv_heads, q.device
    group = heads // kv_heads
    q = q.float().view(count, queries, kv_heads, group, width).transpose(1, 2).reshape(count, kv_heads, queries * group, width)
    rows = -(-queries * group // TILE) * TILE
    q = torch.cat((q, q.new_zeros(count, kv_heads, rows - queries * group, width)), 2)
    top, total = q.new_full((count, kv_heads, rows, 1), LOWEST), q.new_zeros(count, kv_heads, rows, 1)
    if spec.sinks is not None:
        sinks = spec.sinks.float().view(kv_heads, 1, group).expand(-1, queries, -1).flatten(1)
        top[:, :, : queries * group, 0], total[:, :, : queries * group] = sinks, 1.0
    acc = q.new_zeros(count, kv_heads, rows, value_width)
    first, last = _first_visible(spec, blocks.positions[:, :1]), blocks.positions.max(1, keepdims=True)
    at = torch.from_numpy(blocks.positions).to(device)
    for tile in range(int(first.min()) // KEYS, int(last.max()) // KEYS + 1):
        active = int((last[:, 0] >= tile * KEYS).sum())  # blocks with later keys come first
        keys_at = tile * KEYS + np.arange(KEYS)
        keys, values = read(step.find_slots(blocks.rows[:active], np.clip(keys_at, first[:active], last[:active])))
        keys, values = (each.float().view(active, KEYS, kv_heads, -1).transpose(1, 2).flatten(0, 1) for each in (keys, values))
        scores = torch.bmm(q[:active].flatten(0, 1), keys.transpose(1, 2)) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * map_elements(torch.tanh, scores / spec.soft_cap)
        hidden = _hide(spec, at[:active, :, None], torch.from_numpy(keys_at).to(device)).repeat_interleave(group, 1)
        scores = scores.view(active, kv_heads, rows, KEYS)
        scores[:, :, : queries * group].masked_fill_(hidden[:, None], -torch.inf)
        new = torch.maximum(top[:active], scores.amax(-1, keepdim=True))
        weights, rescale = map_elements(torch.exp, scores - new), map_elements(torch.exp, top[:active] - new)
        total[:active] = total[:active] * rescale + weights.sum(-1, keepdim=True)
        acc[:active] = acc[:active] * rescale + torch.bmm(weights.flatten(0, 1), values).view(active, kv_heads, rows, -1)
        top[:active] = new
    out = (acc / total)[:, :, : queries * group]
    return out.view(count, kv_heads, queries, group, -1).transpose(1, 2).flatten(2, 3)


def _first_visible(spec: AttentionSpec, positions: np.ndarray) -> np.ndarray:
    """The first key that each of these queries sees."""
    if spec.sliding_window is None:
        return np.zeros_like(positions)
    if spec.chunked:
        return positions // spec.sliding_window * spec.sliding_window
    return np.maximum(positions - spec.sliding_window + 1, 0)


def _hide(spec: AttentionSpec, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which keys each query does not see, by their positions."""
    hidden = keys > queries
    if spec.sliding_window is not None:
        hidden |= keys < (queries // spec.sliding_window * spec.sliding_window if spec.chunked else queries - spec.sliding_window + 1)
    return hidden


def find_max_queries(spec: AttentionSpec, width: int, value_width: int, device: torch.device) -> int:
    """The queries of a block for which a query's bits were equal to those of a block of one: all
    of `QUERIES`, or 1."""
    group = spec.num_heads // spec.num_kv_heads
    max_rows = -(-QUERIES[-1] * group // TILE) * TILE
    for inputs, outputs in ((width, KEYS), (KEYS, value_width)):
        other = torch.randn(2, inputs, outputs, generator=torch.Generator().manual_seed(0)).to(device)

        def multiply(x: torch.Tensor, other: torch.Tensor = other) -> torch.Tensor:
            return torch.bmm(x.transpose(0, 1), other).transpose(0, 1)

        if InvariantRows(multiply, other[None, :, :, 0], "attention", inputs, outputs).max_rows < max_rows:
            return QUERIES[0]
    return QUERIES[-1]

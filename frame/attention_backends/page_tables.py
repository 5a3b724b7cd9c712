"""Base class of backends whose library reads one page table per row: row ranges of a step, and
chunks of latents to expand.

Reads the batch's host view and never waits for the device. Used by `fa3`, `flashmla` and `trtllm`;
depends on no library and no layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel

from frame.attention_backends.shared import locate_keys
from frame.core.interfaces.attention import AttentionBackend
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.build import BuildContext

EXPANDED_KEYS = 1 << 15  # latents expanded at a time; a longer row is expanded whole


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of a step. Tensors are int32 on the device, indexed from the range's first
    row."""

    tokens: slice
    table: torch.Tensor  # [rows, pages]; entries after a row's last page are undefined
    seq_lens: torch.Tensor  # [rows]
    query_starts: torch.Tensor  # [rows + 1]
    max_queries: int
    max_keys: int

    @property
    def rows(self) -> int:
        return int(self.seq_lens.shape[0])

    def compute_key_starts(self) -> torch.Tensor:
        """int32 [rows + 1]: where each row's keys start when all rows' keys are concatenated."""
        return F.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))


@dataclass(frozen=True, slots=True)
class ExpandedChunk:
    """Extend rows whose latents are expanded together."""

    row_range: RowRange
    places: torch.Tensor | None  # int64 [keys]: KV slots, row after row; None: the keys are this step's own


@dataclass(frozen=True, slots=True)
class PageTablePlan:
    """The decodes and extends of a step; None where there are none."""

    decodes: RowRange | None
    extends: RowRange | None
    chunks: list[ExpandedChunk]  # the extends in chunks, if latents are expanded


class PageTableBackend(AttentionBackend):
    """A backend whose library reads page tables. `plan` is a `PageTablePlan`."""

    table_multiple = 1  # a page table covers a multiple of this many tokens
    expands_latents = False  # whether extends use expanded latents

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._tables: torch.Tensor | None = None  # [rows, pages]: page tables of captured decode steps

    def plan(self, batch: ForwardBatch) -> PageTablePlan:
        first, rows = batch.num_decodes, batch.num_rows
        decodes = self._make_range(batch, 0, first) if first else None
        extends = self._make_range(batch, first, rows) if first < rows else None
        chunks = list(self._make_chunks(batch)) if extends is not None and self.expands_latents else []
        return PageTablePlan(decodes, extends, chunks)

    def capture_plan(self, batch: ForwardBatch) -> PageTablePlan:
        limits, rows = self.context.limits, batch.num_rows
        if self._tables is None:
            width = self._width(batch, batch.page_table.shape[1])
            self._tables = torch.zeros(limits.max_decodes, width, dtype=torch.int32, device=self.context.device)
        row_range = RowRange(slice(0, rows), self._tables[:rows], batch.seq_lens, batch.query_starts, 1, limits.max_context)
        plan = PageTablePlan(row_range, None, [])
        self.replay_plan(plan, batch)
        return plan

    def replay_plan(self, plan: PageTablePlan, batch: ForwardBatch) -> None:
        if plan.decodes is not None:
            plan.decodes.table[:, : batch.page_table.shape[1]].copy_(batch.page_table.index_select(0, batch.request_slots))

    def _make_range(self, batch: ForwardBatch, first: int, stop: int) -> RowRange:
        host = batch.host
        start = int(host.query_lens[:first].sum())
        queries, keys = host.query_lens[first:stop], host.seq_lens[first:stop]
        width = self._width(batch, -(-int(keys.max()) // batch.kv.page_size))
        table = batch.page_table[:, :width].index_select(0, batch.request_slots[first:stop])
        return RowRange(
            tokens=slice(start, start + int(queries.sum())),
            table=F.pad(table, (0, width - table.shape[1])) if table.shape[1] < width else table,
            seq_lens=batch.seq_lens[first:stop],
            query_starts=batch.query_starts[first : stop + 1] - start,
            max_queries=int(queries.max()),
            max_keys=int(keys.max()),
        )

    def _width(self, batch: ForwardBatch, pages: int) -> int:
        multiple = max(1, self.table_multiple // batch.kv.page_size)
        return -(-pages // multiple) * multiple

    def _make_chunks(self, batch: ForwardBatch) -> Iterator[ExpandedChunk]:
        first, keys = batch.num_decodes, batch.host.seq_lens.astype(np.int64)
        while first < batch.num_rows:
            fits = int(np.searchsorted(np.cumsum(keys[first:]), EXPANDED_KEYS, side="right"))
            stop = first + max(1, fits)
            row_range = self._make_range(batch, first, stop)
            is_fresh = bool((keys[first:stop] == batch.host.query_lens[first:stop]).all())
            yield ExpandedChunk(row_range, None if is_fresh else locate_keys(batch, first, int(keys[first:stop].sum()), stop))
            first = stop


def gather_latents(chunk: ExpandedChunk, latent: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
    """The chunk's latents [keys, width]: this step's own, or those of the cache [pages, page_size,
    width]."""
    if chunk.places is None:
        return latent[chunk.row_range.tokens]
    return cached.view(-1, cached.shape[-1]).index_select(0, chunk.places)

"""Rows of a step as FlashInfer takes them: compressed lists of pages, with what its planning reads on the host.

Reads the batch's host view; the page numbers themselves never pass through the host. Knows no layer and no wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of `rows` consecutive rows, side by side. What is on the host is in pinned memory (on a GPU), all int32.

    Row r has queries `query_starts[r] … query_starts[r + 1] - 1` (counted from the first row's) and pages `page_starts[r] …` of
    `pages`, the last of which holds `last_page[r]` of its `lengths[r]` tokens.
    """

    query_starts: torch.Tensor  # host [rows + 1]
    page_starts: torch.Tensor  # host [rows + 1]
    last_page: torch.Tensor  # host [rows]
    lengths: torch.Tensor  # host [rows]
    pages: torch.Tensor  # device [page_starts[-1]]

    @property
    def rows(self) -> int:
        return int(self.lengths.shape[0])


@dataclass(frozen=True, slots=True)
class PageBuffers:
    """Device memory of fixed addresses for the lists of up to `max_rows` decodes: what a captured graph reads. int32."""

    query_starts: torch.Tensor  # [max_rows + 1]; 0, 1, 2, …: a decode has one query
    page_starts: torch.Tensor  # [max_rows + 1]
    last_page: torch.Tensor  # [max_rows]
    lengths: torch.Tensor  # [max_rows]
    pages: torch.Tensor  # [max_rows * pages of the longest row]

    @classmethod
    def of(cls, max_rows: int, max_pages: int, device: torch.device) -> PageBuffers:
        def make(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        return cls(starts, make(max_rows + 1), make(max_rows), make(max_rows), make(max_rows * max_pages))

    def fill(self, lists: PageLists) -> None:
        """Copies on the current stream. `pages` are there already where `list_pages` was given this object."""
        rows = lists.rows
        self.page_starts[: rows + 1].copy_(lists.page_starts, non_blocking=True)
        self.last_page[:rows].copy_(lists.last_page, non_blocking=True)
        self.lengths[:rows].copy_(lists.lengths, non_blocking=True)


def list_pages(batch: ForwardBatch, first: int, last: int, buffers: PageBuffers | None = None) -> PageLists:
    """The lists of rows `first` … `last - 1`; with `buffers`, the page numbers go there. Never waits for the device."""
    host, page_size = batch.host, batch.kv.page_size
    lengths = host.seq_lens[first:last].astype(np.int32)
    counts = -(-lengths // page_size)
    page_starts = _starts(counts)
    last_page = (lengths - (counts - 1) * page_size).astype(np.int32)
    copied = _on_host(batch.token_ids.device, _starts(host.query_lens[first:last]), page_starts, last_page, lengths)
    numbers = _page_numbers(batch, first, last, copied[1], int(page_starts[-1]), None if buffers is None else buffers.pages)
    return PageLists(copied[0], copied[1], copied[2], copied[3], numbers)


def _page_numbers(batch: ForwardBatch, first: int, last: int, starts: torch.Tensor, total: int, out: torch.Tensor | None) -> torch.Tensor:
    """int32 [total]: the table's entries of all rows in one gather on the device."""
    table, device = batch.page_table, batch.token_ids.device
    on_device = starts.to(device, non_blocking=True).long()
    rows = torch.repeat_interleave(on_device.diff(), output_size=total)
    offsets = batch.request_slots[first:last] * table.shape[1] - on_device[:-1]
    places = offsets.index_select(0, rows).add_(torch.arange(total, device=device))
    if out is None:
        return table.view(-1).index_select(0, places)
    return torch.index_select(table.view(-1), 0, places, out=out[:total])


def _starts(counts: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _on_host(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """The arrays as host tensors, in one pinned piece where the device is a GPU: from other memory a copy would wait."""
    sizes = [len(array) for array in arrays]
    piece = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        piece = piece.pin_memory()
    return list(piece.split(sizes))

"""A step's rows in FlashInfer's format: CSR page lists, and the host copies that its planning
reads.

Planning reads the batch's host view; page numbers stay on the device. Depends on no layer and no
wrapper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch
from frame.kernels import can_use_triton


@dataclass(frozen=True, slots=True)
class PageLists:
    """The concatenated pages of `rows` consecutive rows. All int32; host tensors are pinned if the
    device is a GPU.

    Row r has queries `query_starts[r] … query_starts[r + 1] - 1` (from the range's first query) and
    pages `page_starts[r] …` of `pages`. The last page holds `last_page[r]` of its `lengths[r]`
    tokens.
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
    """Device buffers with fixed addresses for the page lists of up to `max_rows` decodes, which a
    captured graph reads. int32."""

    query_starts: torch.Tensor  # [max_rows + 1]; 0, 1, 2, …: a decode has one query
    page_starts: torch.Tensor  # [max_rows + 1]
    last_page: torch.Tensor  # [max_rows]
    lengths: torch.Tensor  # [max_rows]
    pages: torch.Tensor  # [max_rows * pages of the longest row]

    @classmethod
    def create(cls, max_rows: int, max_pages: int, device: torch.device) -> PageBuffers:
        def make(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        return cls(starts, make(max_rows + 1), make(max_rows), make(max_rows), make(max_rows * max_pages))

    def write_lists(self, batch: ForwardBatch) -> None:
        """Write the lists of a batch of decodes from its device tensors. Part of the captured
        graph, so each replay repeats it."""
        rows = batch.num_rows
        starts, last_page = self.page_starts[: rows + 1], self.last_page[:rows]
        self.lengths[:rows].copy_(batch.seq_lens)
        _write(batch, slice(0, rows), starts, last_page, self.pages)


def list_pages(batch: ForwardBatch, first: int, stop: int, buffers: PageBuffers | None = None) -> PageLists:
    """The page lists of rows `first` … `stop - 1`. Does not wait for the device.

    With `buffers` (captured decodes) nothing is copied to the device: `PageBuffers.write_lists` is
    part of the graph.
    """
    host, page_size, device = batch.host, batch.kv.page_size, batch.token_ids.device
    lengths = host.seq_lens[first:stop].astype(np.int32)
    counts = -(-lengths // page_size)
    page_starts = _starts(counts)
    last_page = (lengths - (counts - 1) * page_size).astype(np.int32)
    queries = _starts(host.query_lens[first:stop])
    copied = _on_host(device, queries, page_starts, last_page, lengths)
    if buffers is not None:
        return PageLists(copied[0], copied[1], copied[2], copied[3], buffers.pages)
    # outputs of the kernel that planning does not use
    scratch = torch.empty(2 * (stop - first) + 1, dtype=torch.int32, device=device)
    pages = torch.empty(int(page_starts[-1]), dtype=torch.int32, device=device)
    _write(batch, slice(first, stop), scratch[: stop - first + 1], scratch[stop - first + 1 :], pages)
    return PageLists(copied[0], copied[1], copied[2], copied[3], pages)


def _write(batch: ForwardBatch, rows: slice, starts: torch.Tensor, last_page: torch.Tensor, pages: torch.Tensor) -> None:
    """Write page lists from the batch's tensors: by a kernel, or in PyTorch where Triton does not
    run."""
    slots, lengths, page_size = batch.request_slots[rows], batch.seq_lens[rows], batch.kv.page_size
    if can_use_triton(lengths.device):
        from frame.attention_backends.flashinfer.page_list_kernel import write_page_lists

        write_page_lists(batch.page_table, slots, lengths, starts, last_page, pages, page_size)
        return
    counts = (lengths + page_size - 1) // page_size
    starts.copy_(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))
    last_page.copy_(lengths - (counts - 1) * page_size)
    columns = torch.arange(batch.page_table.shape[1], device=lengths.device)
    listed = batch.page_table.index_select(0, slots)[columns < counts[:, None]]
    pages[: len(listed)].copy_(listed)


def _starts(counts: np.ndarray) -> np.ndarray:
    starts = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _on_host(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """The arrays as host tensors, in one pinned allocation if the device is a GPU: a copy from
    pageable memory would wait."""
    sizes = [len(array) for array in arrays]
    chunk = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        chunk = chunk.pin_memory()
    return list(chunk.split(sizes))

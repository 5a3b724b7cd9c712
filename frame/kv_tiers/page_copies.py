"""`PageCopies`: gathers pages of all layers into a staging buffer and copies blocks of it to host
memory, and the reverse.

Used by `PoolBlockMover`. Work is queued on the current stream of a device with streams. Must not
know a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from frame import kernels
from frame.core.interfaces.kv_tier import BLOCK_ALIGNMENT
from frame.core.kv_cache.kv_pool import KVPool

_UNITS = (BLOCK_ALIGNMENT, 4, 2, 1)  # bytes that a kernel copies at once; the largest first
KINDS = ("tokens", "sidecar")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the pool."""

    pages: torch.Tensor  # uint8 [pages, bytes of a page]
    offset: int  # in a block

    @property
    def width(self) -> int:
        return self.pages.shape[1]


class PageCopies:
    """A block holds the pages of all tensors of `tokens` and `sidecar` groups one after another,
    layers in order and scales after them, those first whose page is a multiple of more bytes."""

    def __init__(self, pool: KVPool, device: torch.device, staging_bytes: int) -> None:
        ordered = sorted(_list_tensors(pool), key=lambda pages: -_find_unit(pages))
        self._tensors: list[_Tensor] = []
        end = 0
        for pages in ordered:
            self._tensors.append(_Tensor(pages, end))
            end += pages.shape[1]
        self.block_bytes = -(-end // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT
        self.num_blocks = max(1, staging_bytes // max(1, self.block_bytes))  # in one piece
        self.staging = torch.zeros((self.num_blocks, self.block_bytes), dtype=torch.uint8, device=device)
        self._device = device
        self._tables = self._make_tables() if kernels.can_use_triton(device) else None

    @torch.inference_mode()
    def load(self, pages: np.ndarray, buffers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Copy the first buffer of each page, uint8 [block_bytes], to the page. pages: int64 [n],
        at most `num_blocks`."""
        for block, (buffer, *_) in zip(self.staging[: len(buffers)], buffers, strict=True):
            block.copy_(buffer, non_blocking=True)
        self._move(pages, is_store=False)

    @torch.inference_mode()
    def store(self, pages: np.ndarray, buffers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Copy each page to all of its buffers."""
        self._move(pages, is_store=True)
        for block, copies in zip(self.staging[: len(buffers)], buffers, strict=True):
            for buffer in copies:
                buffer.copy_(block, non_blocking=True)

    def _move(self, pages: np.ndarray, *, is_store: bool) -> None:
        if not len(pages):
            return
        numbers = torch.from_numpy(pages).to(self._device, non_blocking=True)
        if self._tables is not None:
            from frame.kernels.page_blocks import copy_blocks

            for unit, table, max_width in self._tables:
                copy_blocks(self.staging, numbers, table, unit, max_width, is_store=is_store)
            return
        for tensor in self._tensors:
            columns = self.staging[: len(pages), tensor.offset : tensor.offset + tensor.width]
            if is_store:
                columns.copy_(tensor.pages.index_select(0, numbers))
            else:
                tensor.pages.index_copy_(0, numbers, columns)

    def _make_tables(self) -> list[tuple[int, torch.Tensor, int]]:
        """The arguments of `copy_blocks` for the tensors of each unit."""
        tables = []
        for unit in _UNITS:
            rows = [
                (tensor.pages.data_ptr(), tensor.width // unit, tensor.offset // unit)
                for tensor in self._tensors
                if _find_unit(tensor.pages) == unit
            ]
            if rows:
                tables.append((unit, torch.tensor(rows, dtype=torch.int64, device=self._device), max(row[1] for row in rows)))
        return tables

    def free(self) -> None:
        """Free the staging buffer, once nothing is queued."""
        self.staging = self.staging[:0].clone()


def _list_tensors(pool: KVPool) -> Iterator[torch.Tensor]:
    for group in pool.geometry.groups:
        if group.kind in KINDS:
            for layer in group.layers:
                for tensor in (*pool.layer(layer.layer), *pool.scales(layer.layer)):
                    yield tensor.flatten(1).view(torch.uint8)


def _find_unit(pages: torch.Tensor) -> int:
    """The largest unit that divides the width of a tensor's pages, and the address, which is
    aligned to more."""
    return next(unit for unit in _UNITS if not pages.shape[1] % unit)

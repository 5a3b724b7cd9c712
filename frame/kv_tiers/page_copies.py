"""`PageCopies`: gathers pages of all layers into buffers on the device, or into a staging buffer
from which blocks are copied to host memory, and the reverse.

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
from frame.kv_tiers.block_layout import BlockLayout, plan_blocks

_UNITS = (BLOCK_ALIGNMENT, 4, 2, 1)  # bytes that a kernel copies at once; the largest first
_DIRECT = 8  # pieces of the staging buffer's size in one piece that is not staged


@dataclass(frozen=True, slots=True)
class _Tensor:
    """What blocks of a part hold of a tensor of the pool."""

    pages: torch.Tensor  # uint8 [pages, bytes]; columns of a larger tensor where a page is several blocks
    offset: int  # in a block
    unit: int  # bytes that divide offset, width and address

    @property
    def width(self) -> int:
        return self.pages.shape[1]


Tables = list[tuple[int, torch.Tensor, int]]


class PageCopies:
    """A page holds the tensors of all layers of a pool one after another, layers in order and
    scales after them, those first whose width is a multiple of more bytes; `BlockLayout` divides it
    into blocks. Page i of a pool is at index i of its tensors."""

    def __init__(self, pool: KVPool, device: torch.device, staging_bytes: int) -> None:
        self.layout = plan_blocks(pool.geometry, pool.num_pages)
        self.num_blocks = max(1, staging_bytes // max(1, self.layout.block_bytes))  # in one piece that is staged
        self.staging = torch.zeros((self.num_blocks, self.layout.block_bytes), dtype=torch.uint8, device=device)
        self._device = device
        self._parts = list(_list_parts(pool, self.layout))
        self._tables = [self._make_tables(part) for part in self._parts] if kernels.can_use_triton(device) else None
        for part in range(len(self._parts)) if self._tables is not None else ():  # compiles; page 0 is reserved
            numbers = torch.tensor([[0], [self.staging.data_ptr()]], device=device)
            for is_store in (True, False):
                self._move_run(part, numbers, self.staging[:1], is_store=is_store)

    def count_piece(self, buffers: Sequence[tuple[torch.Tensor, ...]]) -> int:
        """How many of the leading buffers one call takes: more where none of them is staged."""
        leading = buffers[: self.num_blocks * _DIRECT]
        return len(leading) if all(self._find_place(copies) is not None for copies in leading) else min(len(leading), self.num_blocks)

    @torch.inference_mode()
    def load(self, blocks: np.ndarray, buffers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Copy the first buffer of each block, uint8 [block_bytes], to its page. blocks: the
        numbers, int32 or int64 [n], at most `count_piece`."""
        places = self._find_places(buffers)
        for place, (buffer, *_) in zip(places, buffers, strict=True):
            if place is not buffer:
                place.copy_(buffer, non_blocking=True)
        self._move(blocks, places, is_store=False)

    @torch.inference_mode()
    def store(self, blocks: np.ndarray, buffers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Copy each block to all of its buffers."""
        places = self._find_places(buffers)
        self._move(blocks, places, is_store=True)
        for place, copies in zip(places, buffers, strict=True):
            for buffer in copies:
                if place is not buffer:
                    buffer.copy_(place, non_blocking=True)

    def _find_place(self, copies: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The buffer that kernels copy pages from or to; None: the block is staged."""
        if self._tables is None:
            return None
        return next((buffer for buffer in copies if buffer.device == self._device), None)

    def _find_places(self, buffers: Sequence[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
        staging = iter(self.staging[: len(buffers)].unbind())  # views of all of it would take 0.1 s
        return [next(staging) if (place := self._find_place(copies)) is None else place for copies in buffers]

    def _move(self, blocks: np.ndarray, places: Sequence[torch.Tensor], *, is_store: bool) -> None:
        if not len(blocks):
            return
        parts, pages = self.layout.locate(blocks)
        addresses = np.array([place.data_ptr() for place in places], np.int64)
        numbers = torch.from_numpy(np.stack((pages, addresses))).to(self._device, non_blocking=True)
        ends = [*(np.flatnonzero(np.diff(parts)) + 1).tolist(), len(parts)]
        for start, end in zip([0, *ends], ends, strict=False):  # runs of blocks of the same part
            self._move_run(int(parts[start]), numbers[:, start:end], self.staging[start:end], is_store=is_store)

    def _move_run(self, part: int, numbers: torch.Tensor, staging: torch.Tensor, *, is_store: bool) -> None:
        """numbers: int64 [2, n], pages and addresses of places. staging: the places where there are
        no kernels."""
        if self._tables is not None:
            from frame.kernels.page_blocks import copy_blocks

            for unit, table, max_width in self._tables[part]:
                copy_blocks(numbers[1], numbers[0], table, unit, max_width, is_store=is_store)
            return
        for tensor in self._parts[part]:
            columns = staging[:, tensor.offset : tensor.offset + tensor.width]
            if is_store:
                columns.copy_(tensor.pages.index_select(0, numbers[0]))
            else:
                tensor.pages.index_copy_(0, numbers[0], columns)

    def _make_tables(self, part: Sequence[_Tensor]) -> Tables:
        """The arguments of `copy_blocks` for the tensors of each unit."""
        tables = []
        for unit in _UNITS:
            rows = [
                (tensor.pages.data_ptr(), tensor.width // unit, tensor.offset // unit, tensor.pages.stride(0) // unit)
                for tensor in part
                if tensor.unit == unit
            ]
            if rows:
                tables.append((unit, torch.tensor(rows, dtype=torch.int64, device=self._device), max(row[1] for row in rows)))
        return tables

    def free(self) -> None:
        """Free the staging buffer, once nothing is queued."""
        self.staging = self.staging[:0].clone()


def _list_parts(pool: KVPool, layout: BlockLayout) -> Iterator[list[_Tensor]]:
    """The tensors of each part, in the order of `BlockLayout.locate`."""
    for index, num_pieces in enumerate(layout.num_pieces):
        layers = [layer.layer for group in pool.geometry.groups if group.pool == index for layer in group.layers]
        tensors = [each.flatten(1).view(torch.uint8) for layer in layers for each in (*pool.layer(layer), *pool.scales(layer))]
        pieces: list[list[_Tensor]] = [[] for _ in range(num_pieces)]
        at = 0  # in the page
        for tensor in sorted(tensors, key=lambda pages: -_find_unit(pages)):
            first = 0
            while first < tensor.shape[1]:
                piece, offset = divmod(at, layout.block_bytes)
                width = min(tensor.shape[1] - first, layout.block_bytes - offset)
                pieces[piece].append(_Tensor(tensor[:, first : first + width], offset, _find_unit(tensor)))
                first, at = first + width, at + width
        yield from pieces


def _find_unit(pages: torch.Tensor) -> int:
    """The largest unit that divides the width of a tensor's pages, and the address, which is
    aligned to more. It divides the width of each piece too."""
    return next(unit for unit in _UNITS if not pages.shape[1] % unit)

"""`KVPool`: keys and values (or latents) by page; `DeviceTable`: each slot's page table and last
token, on the device.

Used by the model runner (SGLang: token-to-KV pool and request-to-token pool). Must not know
requests, the scheduler or the allocator. Page 0 is reserved: padded rows write to it. The last slot
(`padding_slot`) has page 0 everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ScheduledBatch
from frame.core.interfaces.build import Limits
from frame.core.kv_cache.geometry import SCALE, KVGeometry

if TYPE_CHECKING:
    from frame.core.interfaces.device_operations import MoveRows

MAX_HOST_TOKENS = 1024  # most tokens of a step that come from the host
_FP8_MAX = 448.0
_ALIGNMENT = 64
_INT8_MAX = 127.0
_SMALLEST = 2.0**-24  # the smallest positive number of float16


class KVPool:
    """The KV pool (`KVCache`): the tensors of every layer, pages first.

    `num_pages` counts the pages of each pool of the geometry, the reserved page 0 included; a
    single number is that of all pools. A block of a `write_once` group is as many pages in a row as
    it fills. Memory is zeroed, so that a masked read of a page without
    data yields finite numbers, and page 0 of a `snapshot` pool is the initial state. Pools of
    states have one page more, which no sequence uses.
    """

    def __init__(
        self, geometry: KVGeometry, num_pages: int | Sequence[int], device: torch.device, move_rows: MoveRows | None = None
    ) -> None:
        """move_rows: see `DeviceOperations`."""
        self._move_rows = move_rows
        self.geometry = geometry
        self.num_pages = (num_pages,) * geometry.num_pools if isinstance(num_pages, int) else tuple(num_pages)
        self.page_size = geometry.page_size
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}
        self._scales: dict[int, tuple[torch.Tensor, ...]] = {}
        for group in geometry.groups:
            count = self.num_pages[group.pool]
            pages = (count, group.page_size) if group.page_size else (count + 1,)
            if span := geometry.count_block_pages(group):
                pages = (count * span, geometry.page_size)
            for layer in group.layers:
                self._layers[layer.layer] = tuple(
                    _zeros((*pages, *tensor.shape), geometry.dtype_of(tensor), device) for tensor in layer.tensors
                )
                self._scales[layer.layer] = tuple(
                    _zeros((*pages, *tensor.shape[:-1]), SCALE, device) for tensor in layer.tensors if geometry.has_scales(tensor)
                )
        self._addresses: dict[int, torch.Tensor] = {}  # by bytes of a token: the tensors, for `move_tokens`
        self._is_fp8 = geometry.dtype == torch.float8_e4m3fn
        # One row for each token; fp8 as bytes, because index_copy_ does not support fp8.
        self._rows = {
            layer.layer: tuple(map(_by_token, self._layers[layer.layer]))
            for group in geometry.groups
            if group.kind != "snapshot"
            for layer in group.layers
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of all layers, with the scales."""
        return [tensor for layer in (*self._layers.values(), *self._scales.values()) for tensor in layer]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def store(self, spec: AttentionSpec, slots: torch.Tensor, *tensors: torch.Tensor) -> None:
        """Write this step's tokens; see `KVCache.store`. Tensors are cast to the cache's dtype
        (fp8: scaled and saturated; int8: by a scale for each row, `quantize_rows`)."""
        rows_of_layer = self._rows[spec.layer]
        scales_of_layer = self._scales[spec.layer]
        if scales_of_layer:
            for rows, scales, tensor in zip(rows_of_layer, scales_of_layer, tensors, strict=True):
                quantized, factors = quantize_rows(tensor)
                rows.index_copy_(0, slots, quantized)
                scales.flatten(0, 1).index_copy_(0, slots, factors)
            return
        for rows, tensor, scale in zip(rows_of_layer, tensors, (spec.k_scale, spec.v_scale)[: len(rows_of_layer)], strict=True):
            if self._is_fp8:
                tensor = tensor if scale == 1.0 else tensor * (1.0 / scale)
                tensor = tensor.clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
            elif tensor.dtype != rows.dtype:
                tensor = tensor.to(rows.dtype)
            rows.index_copy_(0, slots, tensor)

    def copy_pages(self, layer: int, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy pages of a layer, int64 [n] each, all at once."""
        for tensor in self._layers[layer]:
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def move_tokens(self, sources: torch.Tensor, targets: torch.Tensor, first: torch.Tensor, counts: torch.Tensor) -> None:
        """Copy what all layers have of some tokens to places at or before theirs. sources, targets:
        KV slots of the `tokens` group, int64 [n]. first, counts: int64 [rows], the part of them of
        each row; others have equal slots."""
        if self._move_rows is None:
            for rows in self._list_rows():
                rows.index_copy_(0, targets, rows.index_select(0, sources))
            return
        if not self._addresses:
            by_width: dict[int, list[int]] = {}
            for rows in self._list_rows():
                by_width.setdefault(rows[0].numel() * rows.element_size(), []).append(rows.data_ptr())
            self._addresses = {width: torch.tensor(starts, device=sources.device) for width, starts in by_width.items()}
        for width, addresses in self._addresses.items():
            self._move_rows(addresses, width, sources, targets, first, counts)

    def _list_rows(self) -> list[torch.Tensor]:
        """The tensors of all layers, one row for each token."""
        return [rows for layer in self._rows for rows in (*self._rows[layer], *(each.flatten(0, 1) for each in self._scales[layer]))]

    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The layer's tensors, pages first; see `KVCache.layer`."""
        return self._layers[layer]

    def scales(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The scales of an int8 cache, pages first; see `KVCache.scales`."""
        return self._scales[layer]


class PageTable:
    """The page table of a cache group, int32 [rows, max_pages], one row for each request slot. It
    has a host mirror, from which attention plans are made; on the CPU both are the same memory."""

    def __init__(self, num_rows: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size  # tokens; 0: a page holds one sequence
        self.max_pages = max_pages
        self.host_pages = np.zeros((num_rows, max_pages), np.int32)
        self.pages = torch.from_numpy(self.host_pages)
        self.is_shared = device.type == "cpu"
        if not self.is_shared:
            self.pages = self.pages.to(device)

    def fill(self, page: int) -> None:
        """Set every entry to this page."""
        self.host_pages.fill(page)
        self.pages.fill_(page)

    def find_kv_slots(self, batch: ScheduledBatch, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """The KV cache slot of each token, int64 [tokens], of its request slot and position. Tokens
        of rows with `skip_kv_store` go to page 0, which is reserved."""
        size = self.page_size
        if size == 1:
            kv_slots: np.ndarray = self.host_pages[slots, positions].astype(np.int64)
        else:
            column = positions // size
            kv_slots = self.host_pages[slots, column].astype(np.int64)
            kv_slots -= column
            kv_slots *= size  # (page - column) * size + position = page * size + position % size
            kv_slots += positions
        if batch.skip_kv_store is not None:
            kv_slots[np.repeat(batch.skip_kv_store, batch.num_scheduled)] = 0
        return kv_slots

    def write_host(self, writes: np.ndarray) -> None:
        """Apply page-table writes, int32 [n, 3] of (slot, index in row, page), to the mirror."""
        self.host_pages[writes[:, 0], writes[:, 1]] = writes[:, 2]

    def flat_writes(self, writes: np.ndarray) -> dict[str, np.ndarray]:
        """The arguments of `write_device` for these writes: indices into the flattened table, int64
        [n], and pages, int32 [n]."""
        places = writes[:, 0].astype(np.int64) * self.max_pages + writes[:, 1]
        return {"new_places": places, "new_pages": np.ascontiguousarray(writes[:, 2], np.int32)}

    def write_device(self, new_places: torch.Tensor, new_pages: torch.Tensor) -> None:
        """Apply writes on the device, in stream order; only for a table that is not shared with the
        host."""
        self.pages.view(-1).index_copy_(0, new_places, new_pages)


class DeviceTable(PageTable):
    """The page table of the `tokens` group, and the last sampled tokens by request slot, int64.
    `last_token` from index `first_host_token` on holds tokens of a step that come from the host,
    then the drafts by slot, and last a cell with -1. `parents`: of drafts that are trees, see
    `Drafts.parents`."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        self.num_slots = limits.max_running_requests
        self.padding_slot = self.num_slots
        self.has_trees = limits.verifies_trees  # rows may be tokens of trees of drafted tokens
        # One page more than a request may fill: a request that ended at its limit may run in one
        # more step.
        super().__init__(self.num_slots + 1, -(-limits.max_context // limits.page_size) + 1, limits.page_size, device)
        self.first_host_token = self.num_slots + 1
        self.first_drafted = self.first_host_token + MAX_HOST_TOKENS
        self.set_draft_width(0)

    def set_draft_width(self, width: int, tree_depth: int = 0) -> None:
        """Make room for drafts of `width` tokens. tree_depth: most of them in a branch of a tree;
        0: drafts are chains. Called before the first step."""
        rows, end = self.num_slots + 1, self.first_drafted
        self.last_token = torch.zeros(end + rows * width + 1, dtype=torch.int64, device=self.pages.device)
        self.last_token[-1] = -1
        self.drafts = self.last_token[end:-1].view(rows, width)
        self.tree_depth = tree_depth
        self.parents = torch.zeros_like(self.drafts if tree_depth else self.drafts[:0])

    def store_drafts(self, slots: torch.Tensor, drafts: torch.Tensor) -> None:
        """Keep the drafts of these slots, which are as in `StepResult.drafts`."""
        for kept, drafted in zip((self.drafts, self.parents), (drafts,) if drafts.ndim == 2 else drafts.unbind(1), strict=False):
            kept[:, : drafted.shape[1]].index_copy_(0, slots, drafted)


def _by_token(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.view(-1, *tensor.shape[2:])
    return rows.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else rows


def quantize_rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., width] -> (int8 of the same shape, float16 scales [...]). The largest magnitude of a
    row becomes 127."""
    numbers = tensor.float()
    scales = (numbers.abs().amax(-1) / _INT8_MAX).clamp_(_SMALLEST, torch.finfo(SCALE).max).to(SCALE)
    quantized = (numbers / scales.float().unsqueeze(-1)).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return quantized.to(torch.int8), scales


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy allocates with calloc: pages that are never written do not become resident.
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + num_bytes]).view(dtype).view(shape)

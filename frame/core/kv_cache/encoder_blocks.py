"""`EncoderBlocks`: the blocks of a `write_once` group on the device, and how cross-attention reads
them.

Each token of a step becomes a row of one query over all positions of its sequence's block, so that
every attention backend computes cross-attention as decodes. Used by `GroupInputs`. Must not know a
request, a model or the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.batch import AlignedText, EncoderInputs, ForwardBatch, HostView, ScheduledBatch
from frame.core.interfaces.media import MediaItem
from frame.core.kv_cache.geometry import CacheGroup, KVGeometry
from frame.core.kv_cache.kv_pool import PageTable


class EncoderBlocks:
    """The page table of the group, with a row of `span` pages for each request slot. The scheduler
    numbers blocks; block b is the pages from b * span on."""

    def __init__(self, geometry: KVGeometry, group: CacheGroup, num_rows: int, device: torch.device) -> None:
        self.span = geometry.count_block_pages(group)
        self.length = group.length
        self.table = PageTable(num_rows, self.span, geometry.page_size, device)
        self.layers = tuple(layer.layer for layer in group.layers)
        self.read_features: Callable[[MediaItem], Mapping[str, np.ndarray]] | None = None  # the builder sets it
        self._group = group.pool
        self._rows = self._make_rows(num_rows)
        self._aligned: list[tuple[int, int, int] | None] = []  # of the step: (slot, prompt tokens, positions)

    def expand_writes(self, writes: np.ndarray) -> np.ndarray:
        """Writes of (slot, 0, block), int32 [n, 3], as writes of pages, int32 [n * span, 3]."""
        pages = np.arange(self.span, dtype=np.int32)
        slots, blocks = np.repeat(writes[:, 0], self.span), writes[:, 2:] * self.span + pages
        return np.stack((slots, np.tile(pages, len(writes)), blocks.ravel()), axis=1).astype(np.int32)

    def list_inputs(self, batch: ScheduledBatch, token_slots: np.ndarray) -> dict[str, np.ndarray]:
        """The arrays that `make_view` reads on the device. token_slots: int64 [tokens]."""
        arrays = {"group_queries": token_slots}
        orders = [order for order in batch.encodes if order.slot >= 0]
        if orders:
            slots, size = np.array([order.slot for order in orders]), self.table.page_size
            positions = np.arange(self.length)
            pages = self.table.host_pages[slots][:, positions // size].astype(np.int64)
            arrays["group_encoded"] = pages * size + positions % size
            items = [self._read(order.item) for order in orders]
            arrays["group_features"] = np.stack([item["input_features"] for item in items])
            self._aligned = [None] * len(orders)
            for index, (order, item) in enumerate(zip(orders, items, strict=True)):
                if "aligned_ids" in item:
                    self._aligned[index] = order.slot, *item["aligned_sizes"].tolist()
                    arrays[f"group_aligned_{index}"] = item["aligned_ids"].copy()
        return arrays

    def _read(self, item: MediaItem) -> Mapping[str, np.ndarray]:
        """The encoder's input, `input_features`, and of a text that is aligned with it
        `aligned_ids` and `aligned_sizes`: the tokens of the prompt, and positions with sound."""
        if self.read_features is None:
            raise RuntimeError("an encoder-decoder model got an item, and nothing reads files of features")
        return self.read_features(item)

    def make_view(self, batch: ForwardBatch, places: Mapping[str, torch.Tensor]) -> ForwardBatch:
        """The batch as the group's layers read it, without a plan. Adds `EncoderInputs` to the
        batch where sequences start."""
        if "group_features" in places:
            aligned = tuple(
                None if sizes is None else AlignedText(sizes[0], places[f"group_aligned_{index}"], *sizes[1:])
                for index, sizes in enumerate(self._aligned)
            )
            batch.extensions[EncoderInputs] = EncoderInputs(places["group_features"], places["group_encoded"], aligned)
        queries, count = places["group_queries"], batch.num_tokens
        if count > len(self._rows["query_lens"]):
            self._rows = self._make_rows(2 * count)
        rows: dict[str, Any] = {name: tensor[: count + (name == "query_starts")] for name, tensor in self._rows.items()}
        slots = np.repeat(batch.host.slots, batch.host.query_lens)
        ones = np.ones(count, np.int32)
        host = HostView(slots, ones, ones * self.length, self.table.host_pages)
        return replace(batch, num_decodes=count, request_slots=queries, page_table=self.table.pages, host=host, group=self._group, **rows)

    def _make_rows(self, count: int) -> dict[str, torch.Tensor]:
        """The tensors of so many rows that are the same in all steps."""
        device = self.table.pages.device
        ones = torch.ones(count, dtype=torch.int32, device=device)
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        return {"positions": ones.long() * (self.length - 1), "seq_lens": ones * self.length, "query_lens": ones, "query_starts": starts}

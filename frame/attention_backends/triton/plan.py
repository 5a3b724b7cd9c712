"""What the launches of one step share: extend tiles, split schedules of decodes, KV slots of
expanded latents.

Reads `batch.host` only and copies from pinned memory, so it never waits for the device. Depends on
no layer: what depends on a layer's shape is made when the first layer of that shape needs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from frame.attention_backends.triton.shared_prefixes import SharedPrefixes
from frame.attention_backends.triton.split_schedule import SplitConfig, make_schedule
from frame.core.interfaces.batch import ForwardBatch


class StepPlan:
    """The data of one step. Decodes are rows 0 … num_decodes - 1, extends the rest.

    `query_lens`, `key_lens`: int64 [extends]. `num_pairs`: query-key pairs of all extends.
    `launch_state`: what launchers keep for this step, by keys of their own.
    """

    def __init__(self, batch: ForwardBatch, prefixes: SharedPrefixes) -> None:
        host = batch.host
        self.num_decodes = batch.num_decodes
        self._device = batch.token_ids.device
        self._page_size = batch.kv.page_size
        self._host = host
        lengths = host.seq_lens.astype(np.int64)
        self.prefixes = prefixes
        self.query_lens = host.query_lens[self.num_decodes :].astype(np.int64)
        self.key_lens = lengths[self.num_decodes :]
        self.num_pairs = int((self.query_lens * (2 * self.key_lens - self.query_lens + 1)).sum()) // 2
        self.has_prefixes = bool((self.key_lens > self.query_lens).any())
        self.max_query_len = int(self.query_lens.max(initial=0))
        self._schedules: dict[SplitConfig, torch.Tensor] = {}
        self.launch_state: dict[Any, Any] = {}
        self._tiles: dict[int, torch.Tensor] = {}
        self._all_tiles: dict[int, torch.Tensor] = {}

    def get_tiles(self, queries: int) -> torch.Tensor:
        """int32 [2, tiles]: extend row and first query of each tile of `queries` queries; tiles
        with most keys come first."""
        computed = self._tiles.get(queries)
        if computed is None:
            counts = -(-self.query_lens // queries)
            rows = np.repeat(np.arange(len(counts)), counts)
            starts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
            order = np.argsort(-(self.key_lens - self.query_lens)[rows] - starts, kind="stable")
            computed = self._copy(np.stack((rows[order], starts[order])).astype(np.int32))
            self._tiles[queries] = computed
        return computed

    def get_all_tiles(self, queries: int) -> torch.Tensor:
        """int32 [2, tiles]: row and first query of each tile of `queries` queries, of all rows in
        order. Those of decodes alone are made on the device, which a graph can capture."""
        computed = self._all_tiles.get(queries)
        if computed is None:
            if len(self.query_lens):
                rows, starts, _ = self._list_tiles(queries)
                computed = self._copy(np.stack((rows, starts)).astype(np.int32))
            else:
                rows_on_device = torch.arange(self.num_decodes, dtype=torch.int32, device=self._device)
                computed = torch.stack((rows_on_device, torch.zeros_like(rows_on_device)))
            self._all_tiles[queries] = computed
        return computed

    def divide_tiles(self, queries: int, room: int) -> Iterator[tuple[int, int, int, int]]:
        """Consecutive tiles of `get_all_tiles` with at most `room` tokens: (first tile, tiles,
        first token, tokens)."""
        _, _, ends = self._list_tiles(queries)
        first, token = 0, 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, token + room, side="right")))
            yield first, last - first, token, int(ends[last - 1]) - token
            first, token = last, int(ends[last - 1])

    def _list_tiles(self, queries: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The row, first query and end token of each tile of all rows."""
        lengths = self._host.query_lens.astype(np.int64)
        counts = -(-lengths // queries)
        rows = np.repeat(np.arange(len(counts)), counts)
        starts = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * queries
        return rows, starts, np.cumsum(np.minimum(lengths[rows] - starts, queries))

    def get_schedule(self, config: SplitConfig, batch: ForwardBatch, pdl: bool) -> torch.Tensor:
        """The split schedule of this step's decodes, computed on the device when the first layer
        with this configuration needs it."""
        computed = self._schedules.get(config)
        if computed is None:
            computed = make_schedule(config, self.num_decodes, batch.seq_lens, batch.request_slots, self.prefixes.tensor, pdl)
            self._schedules[config] = computed
        return computed

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [extends]: the start of each row among the keys of all extends."""
        return self._copy(self._key_starts)

    @cached_property
    def key_places(self) -> torch.Tensor:
        """int64 [keys]: the KV slots of all extends' keys, row by row."""
        slots = np.repeat(self._host.slots[self.num_decodes :].astype(np.int64), self.key_lens)
        positions = np.arange(int(self.key_lens.sum())) - np.repeat(self._key_starts, self.key_lens)
        pages = self._host.page_table[slots, positions // self._page_size].astype(np.int64)
        return self._copy(pages * self._page_size + positions % self._page_size)

    @property
    def _key_starts(self) -> np.ndarray:
        starts: np.ndarray = (np.cumsum(self.key_lens) - self.key_lens).astype(np.int32)
        return starts

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type == "cuda":  # a copy from pageable memory would wait for the stream
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

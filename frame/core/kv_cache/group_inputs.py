"""`GroupInputs`: the page tables of the cache groups besides `tokens`, and the views of a step's
batch that their layers get.

Used by the input batch, for models with several cache groups only. Must not know a request, a model
or the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.batch import DraftedStates, ForwardBatch, ScheduledBatch, SequenceStates
from frame.core.kv_cache.encoder_blocks import EncoderBlocks
from frame.core.kv_cache.kv_pool import DeviceTable, KVPool, PageTable


class GroupInputs:
    """One page table for each further group. In a step: `write_tables`; `find_places` and
    `list_moves`, whose arrays travel to the device; `begin_step`; `make_views`; the forward pass;
    `save_states`."""

    def __init__(self, pool: KVPool, table: DeviceTable, device: torch.device) -> None:
        geometry = pool.geometry
        self._pool = pool
        groups, rows = geometry.groups[1 : geometry.num_pools], table.num_slots + 1
        self.blocks = EncoderBlocks(geometry, groups[-1], rows, device) if groups[-1].kind == "write_once" else None
        self._groups = groups if self.blocks is None else groups[:-1]
        self._tables = [
            PageTable(rows, table.max_pages, table.page_size, device) if group.page_size else PageTable(rows, 1, 0, device)
            for group in self._groups
        ]
        self._padding_slot = table.padding_slot
        self._saves: torch.Tensor | None = None
        self._drafted: tuple[DraftedStates, dict[str, torch.Tensor]] | None = None  # of the latest step, until its verification
        for index, group_table in enumerate(self._tables, 1):
            if not group_table.page_size:  # slots without a request, and rows of padding, write to the spare page
                group_table.fill(pool.num_pages[index])

    @staticmethod
    def has_moves(batch: ScheduledBatch) -> bool:
        """Whether the batch writes to a table of a further group, or copies states."""
        return batch.state_loads is not None or batch.state_saves is not None or any(len(writes) for writes in batch.group_pages)

    def write_tables(self, batch: ScheduledBatch) -> None:
        """Write the batch's pages to the host's tables."""
        for table, writes in zip(self._tables, batch.group_pages, strict=False):
            table.write_host(writes)
        if self.blocks is not None and batch.group_pages:
            self.blocks.table.write_host(self.blocks.expand_writes(batch.group_pages[-1]))

    @property
    def windows(self) -> dict[str, PageTable]:
        """The page tables of the `window` groups, by their names in `find_places`."""
        return {self._name(index): table for index, table in enumerate(self._tables) if table.page_size}

    @property
    def has_states(self) -> bool:
        """Whether rows of one slot depend on each other within a step."""
        return any(not table.page_size for table in self._tables)

    @property
    def padding(self) -> dict[str, np.generic]:
        """The names of `find_places`, with the values of rows of padding."""
        values = (np.int64(0 if table.page_size else self._pool.num_pages[index]) for index, table in enumerate(self._tables, 1))
        queries = {} if self.blocks is None else {"group_queries": np.int64(self._padding_slot)}
        return {**{self._name(index): value for index, value in enumerate(values)}, **queries}

    def pad_states(self, rows: int) -> dict[type, Any]:
        """The `SequenceStates` of a batch of this many rows of padding; empty without a group of
        states."""
        for index, table in enumerate(self._tables, 1):
            if not table.page_size:
                pages = torch.full((rows,), self._pool.num_pages[index], dtype=torch.int64, device=table.pages.device)
                return {SequenceStates: SequenceStates(pages)}
        return {}

    def find_places(
        self, batch: ScheduledBatch, slots: np.ndarray, token_slots: np.ndarray, positions: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Where each token is stored in a window group, int64 [tokens], the page of each row's
        state, int64 [rows], and `EncoderBlocks.list_inputs`. `slots`: int64 [rows]; `token_slots`,
        `positions`: int64 [tokens]."""
        places = {
            self._name(index): table.find_kv_slots(batch, token_slots, positions)
            if table.page_size
            else table.host_pages[slots, 0].astype(np.int64)
            for index, table in enumerate(self._tables)
        }
        return places if self.blocks is None else places | self.blocks.list_inputs(batch, token_slots)

    def find_drafted(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """The arrays of `DraftedStates`, and of the rows with drafts: their pages, `query_starts`
        and numbers among the sampling rows. Empty if no row has a state and drafts."""
        index = next((index for index, table in enumerate(self._tables) if not table.page_size), None)
        if index is None or batch.num_drafts is None or not batch.num_drafts.any():
            return {}
        is_drafted = batch.num_drafts > 0
        pages = self._tables[index].host_pages[batch.slots, 0].astype(np.int64)
        return {
            "group_targets": np.where(is_drafted, self._pool.num_pages[index + 1], pages),
            "group_tokens": np.flatnonzero(np.repeat(is_drafted, batch.num_scheduled)),
            "group_pages": pages[is_drafted],
            "group_starts": np.append(0, np.cumsum(batch.num_scheduled[is_drafted])).astype(np.int32),
            "group_samples": (np.cumsum(batch.samples) - 1)[is_drafted],
        }

    def list_moves(self, batch: ScheduledBatch) -> dict[str, np.ndarray]:
        """The writes to the device's tables and the copies of states; empty in most steps."""
        arrays: dict[str, np.ndarray] = {}
        for index, table in enumerate(self._tables):
            if not table.is_shared and batch.group_pages and len(batch.group_pages[index]):
                writes = table.flat_writes(batch.group_pages[index])
                arrays |= {f"{self._name(index)}_{name}": array for name, array in writes.items()}
        blocks = self.blocks
        if blocks is not None and not blocks.table.is_shared and batch.group_pages and len(batch.group_pages[-1]):
            writes = blocks.table.flat_writes(blocks.expand_writes(batch.group_pages[-1]))
            arrays |= {f"{self._name(len(self._tables))}_{name}": array for name, array in writes.items()}
        for name, copies in (("group_loads", batch.state_loads), ("group_saves", batch.state_saves)):
            if copies is not None:
                arrays[name] = np.ascontiguousarray(copies.T, np.int64)
        return arrays

    def begin_step(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the arrays of `list_moves` from `tensors`: write the tables and copy the states that
        the step begins with."""
        if (loads := tensors.pop("group_loads", None)) is not None:
            self._copy_states(loads)
        self._saves = tensors.pop("group_saves", None)
        for index, table in enumerate(self._tables if self.blocks is None else [*self._tables, self.blocks.table]):
            self._write_device(index, table, tensors)

    def make_views(self, batch: ForwardBatch, places: Mapping[str, torch.Tensor], plan: Callable[[ForwardBatch], Any]) -> ForwardBatch:
        """The batch with a planned view for each window group. `places`: the arrays of
        `find_places` and `find_drafted`."""
        views: dict[int, ForwardBatch] = {}
        for index, (group, table) in enumerate(zip(self._groups, self._tables, strict=True)):
            if not group.page_size:
                drafted = None
                if "group_targets" in places:
                    drafted = DraftedStates(places["group_targets"], places["group_tokens"])
                    self._drafted = drafted, {name: places[f"group_{name}"] for name in ("pages", "starts", "samples")}
                batch.extensions[SequenceStates] = SequenceStates(places[self._name(index)], drafted)
                continue
            host = replace(batch.host, page_table=table.host_pages)
            view = replace(batch, kv_slots=places[self._name(index)], page_table=table.pages, host=host, group=index + 1)
            view = replace(view, plan=plan(view))
            views |= dict.fromkeys((layer.layer for layer in group.layers), view)
        if self.blocks is not None:
            view = self.blocks.make_view(batch, places)
            views |= dict.fromkeys(self.blocks.layers, replace(view, plan=plan(view)))
        return replace(batch, views=views)

    @staticmethod
    def _name(index: int) -> str:
        return f"group_{index}"

    def save_states(self) -> None:
        """Copy the states that are kept, after the step's forward pass."""
        saves, self._saves = self._saves, None
        if saves is not None:
            self._copy_states(saves)

    def store_drafted(self, counts: torch.Tensor) -> None:
        """Write the states of rows with drafts after their accepted tokens. counts: int64 [sampling
        rows], the tokens that are output."""
        latest, self._drafted = self._drafted, None
        if latest is None:
            return
        drafted, rows = latest
        lens = counts.index_select(0, rows["samples"]).int()
        for layer, inputs in drafted.inputs.values():
            layer.replay(inputs, self._pool, rows["pages"], (rows["starts"], lens))

    def _write_device(self, index: int, table: PageTable, tensors: dict[str, torch.Tensor]) -> None:
        names = {name: f"{self._name(index)}_{name}" for name in ("new_places", "new_pages")}
        if names["new_places"] in tensors:
            table.write_device(**{name: tensors.pop(key) for name, key in names.items()})

    def _copy_states(self, copies: torch.Tensor) -> None:
        for group in self._groups:
            for layer in group.layers if not group.page_size else ():
                self._pool.copy_pages(layer.layer, copies[0], copies[1])

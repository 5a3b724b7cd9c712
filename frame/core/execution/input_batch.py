"""ScheduledBatch -> ForwardBatch: vectorised on the host, and the step's only host-to-device copy.

What the sampler needs from the host rides along in the same copy. Knows no request and no model; pages, slots and token counts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, HostView

if TYPE_CHECKING:
    from frame.core.execution.staging import Staging
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.batch import KVCache, ScheduledBatch
    from frame.core.kv_cache.kv_pool import DeviceTable

TOKEN_ARRAYS = ("token_ids", "positions", "kv_slots")


class Placement(Protocol):
    """Where a step's tensors have to be that lie at addresses of their own."""

    def place(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """`TOKEN_ARRAYS` by name -> tensors of the same lengths on the device."""
        ...

    def extensions(self, tokens: int) -> dict[type, Any]:
        """Of a batch of so many tokens."""
        ...


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Host arithmetic over a batch's rows that several parts need. All int64 but the marked."""

    query_starts: np.ndarray  # [rows + 1]
    seq_lens: np.ndarray  # [rows]; cached tokens after this step
    sampling: np.ndarray  # [sampling rows]; row indices
    prompt_rows: np.ndarray  # [n]; rows whose prompt log-probabilities are wanted
    logits_indices: np.ndarray  # [sampling rows + tokens of prompt_rows]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A step's tokens as rows of one token each, the sampled ones first: what a step of decodes is, and one of short prompts may be.
    All int64 [tokens]."""

    slots: np.ndarray
    positions: np.ndarray
    sources: np.ndarray  # where in the last-token table a row's id is
    drawn: np.ndarray  # where the token goes that is drawn for it
    kv_slots: np.ndarray  # where its K and V go
    num_sampling: int


def count_rows(batch: ScheduledBatch) -> RowCounts:
    """Where every row's tokens lie and which of them need logits: the last of each sampling row, then all of each prompt row."""
    rows = len(batch.slots)
    starts = np.zeros(rows + 1, np.int64)
    np.cumsum(batch.num_scheduled, out=starts[1:])
    seq_lens = np.add(batch.num_computed, batch.num_scheduled, dtype=np.int64)
    sampling = np.flatnonzero(batch.samples)
    logits = starts[1:][sampling] - 1
    prompt_rows = np.flatnonzero(batch.prompt_logprobs) if batch.prompt_logprobs is not None else sampling[:0]
    if len(prompt_rows):
        logits = np.concatenate([logits, *(np.arange(starts[row], starts[row + 1]) for row in prompt_rows)])
    return RowCounts(starts, seq_lens, sampling, prompt_rows, logits)


class BatchBuilder:
    """Builds one step's ForwardBatch. One object a runner."""

    def __init__(self, table: DeviceTable, kv: KVCache, backend: AttentionBackend, staging: Staging) -> None:
        self.table = table
        self.kv = kv
        self._backend = backend
        self._staging = staging

    def build(
        self, batch: ScheduledBatch, counts: RowCounts, riders: Mapping[str, np.ndarray], placement: Placement | None = None
    ) -> tuple[ForwardBatch, dict[str, torch.Tensor]]:
        """The batch on the device with its plan, and the `riders` (the sampler's arrays) as tensors under their names.

        `riders` may not use the names of the batch's own fields. `placement` brings what tokens have (`TOKEN_ARRAYS`) where it has to
        be.
        """
        table = self.table
        if len(batch.new_pages):
            table.write_host(batch.new_pages)
        arrays = self._arrays(batch, counts)
        placed: dict[str, torch.Tensor] = {}
        extensions: dict[type, Any] = {}
        if placement is not None:
            placed = placement.place({name: arrays[name] for name in TOKEN_ARRAYS})
            extensions = placement.extensions(len(arrays["token_ids"]))
        others = {name: array for name, array in arrays.items() if name not in placed}
        tensors = self._put(batch, {**others, **riders}) | placed
        decodes = batch.num_decodes
        if decodes:
            # sampled by a step that may still be in flight: the host does not know these ids
            torch.index_select(table.last_token, 0, tensors["request_slots"][:decodes], out=tensors["token_ids"][:decodes])
        fields: dict[str, Any] = {name: tensors.pop(name) for name in arrays}
        forward = ForwardBatch(
            num_decodes=decodes,
            page_table=table.pages,
            kv=self.kv,
            host=HostView(batch.slots, batch.num_scheduled, arrays["seq_lens"], table.host_pages),
            extensions=extensions,
            **fields,
        )
        return replace(forward, plan=self._backend.plan(forward)), tensors

    def stage(self, batch: ScheduledBatch, riders: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """The batch's pages and given tokens into the table, and the `riders` as tensors: what is left to do for a step that a graph
        runs."""
        given = len(batch.token_ids)
        if given:
            riders = {**riders, "given_tokens": batch.token_ids.astype(np.int64)}
        if not len(batch.new_pages) and not riders:
            return {}
        self.table.write_host(batch.new_pages)
        tensors = self._put(batch, riders)
        if given:
            first = self.table.first_given
            self.table.last_token[first : first + given].copy_(tensors.pop("given_tokens"))
        return tensors

    def token_rows(self, batch: ScheduledBatch, counts: RowCounts) -> TokenRows:
        """The step's tokens one by one; those of extends are where `stage` puts them."""
        slots, decodes, sampling = batch.slots.astype(np.int64), batch.num_decodes, counts.sampling
        table, total = self.table, int(counts.query_starts[-1])
        every, positions = self._tokens(batch, counts, slots)
        sources = every
        if decodes < total:
            sources = every.copy()
            sources[decodes:] = table.first_given + np.arange(total - decodes)
        targets = self._places(batch, every, positions)
        if total == len(sampling):
            return TokenRows(every, positions, sources, every, targets, total)
        last = counts.query_starts[1:][sampling] - 1
        is_inner = np.ones(total, bool)
        is_inner[last] = False
        order = np.concatenate((last, np.flatnonzero(is_inner)))
        drawn = np.full(total, table.padding_slot, np.int64)
        drawn[: len(last)] = slots[sampling]
        return TokenRows(every[order], positions[order], sources[order], drawn, targets[order], len(last))

    @staticmethod
    def _tokens(batch: ScheduledBatch, counts: RowCounts, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slot and position of each of the step's tokens, int64 [tokens]."""
        total, lens = int(counts.query_starts[-1]), batch.num_scheduled
        if total == len(slots):
            return slots, batch.num_computed.astype(np.int64)
        return np.repeat(slots, lens), np.arange(total) + np.repeat(batch.num_computed - counts.query_starts[:-1], lens)

    def _places(self, batch: ScheduledBatch, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where the K and V of the step's tokens go, by request slot and position, all int64 [tokens]: to page 0, which is nobody's, where
        the cache has them already."""
        size = self.table.page_size
        if size == 1:
            places: np.ndarray = self.table.host_pages[slots, positions].astype(np.int64)
        else:
            column = positions // size
            places = self.table.host_pages[slots, column].astype(np.int64)
            places -= column
            places *= size  # (page - column) * size + position = page * size + position % size
            places += positions
        if batch.cached is not None:
            places[np.repeat(batch.cached, batch.num_scheduled)] = 0
        return places

    def _put(self, batch: ScheduledBatch, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Arrays and new pages to the device in one copy; the pages into its table."""
        if not len(batch.new_pages) or self.table.is_shared:
            return self._staging.put(arrays)
        writes = self.table.flat_writes(batch.new_pages)
        tensors = self._staging.put({**arrays, **writes})
        self.table.write_device(**{name: tensors.pop(name) for name in writes})
        return tensors

    def _arrays(self, batch: ScheduledBatch, counts: RowCounts) -> dict[str, np.ndarray]:
        decodes, total = batch.num_decodes, int(counts.query_starts[-1])
        slots = batch.slots.astype(np.int64)
        token_ids = np.empty(total, np.int64)
        token_ids[decodes:] = batch.token_ids
        token_slots, positions = self._tokens(batch, counts, slots)
        return {
            "token_ids": token_ids,
            "positions": positions,
            "kv_slots": self._places(batch, token_slots, positions),
            "request_slots": slots,
            "logits_indices": counts.logits_indices,
            "seq_lens": counts.seq_lens.astype(np.int32),
            "query_lens": batch.num_scheduled.astype(np.int32),
            "query_starts": counts.query_starts.astype(np.int32),
        }

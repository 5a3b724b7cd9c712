"""ScheduledBatch -> ForwardBatch: vectorised on the host, and the step's only host-to-device copy.

What the sampler needs from the host rides along in the same copy. Knows no request and no model; pages, slots and token counts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, HostView

if TYPE_CHECKING:
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.batch import KVCache, ScheduledBatch
    from frame.core.memory_pool import DeviceTable
    from frame.core.staging import Staging


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Host arithmetic over a batch's rows that several parts need. All int64 but the marked."""

    query_starts: np.ndarray  # [rows + 1]
    seq_lens: np.ndarray  # [rows]; cached tokens after this step
    sampling: np.ndarray  # [sampling rows]; row indices
    prompt_rows: np.ndarray  # [n]; rows whose prompt log-probabilities are wanted
    logits_indices: np.ndarray  # [sampling rows + tokens of prompt_rows]


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
        self._table = table
        self._kv = kv
        self._backend = backend
        self._staging = staging

    def build(
        self, batch: ScheduledBatch, counts: RowCounts, riders: Mapping[str, np.ndarray]
    ) -> tuple[ForwardBatch, dict[str, torch.Tensor]]:
        """The batch on the device with its plan, and the `riders` (the sampler's arrays) as tensors under their names.

        `riders` may not use the names of the batch's own fields.
        """
        table = self._table
        if len(batch.new_pages):
            table.write_host(batch.new_pages)
        arrays = self._arrays(batch, counts)
        if len(batch.new_pages) and not table.is_shared:
            arrays["new_pages"] = batch.new_pages
        tensors = self._staging.put({**arrays, **riders})
        if "new_pages" in tensors:
            table.write_device(tensors.pop("new_pages"))
        decodes = batch.num_decodes
        if decodes:
            # sampled by a step that may still be in flight: the host does not know these ids
            torch.index_select(table.last_token, 0, tensors["request_slots"][:decodes], out=tensors["token_ids"][:decodes])
        fields: dict[str, Any] = {name: tensors.pop(name) for name in arrays if name != "new_pages"}
        forward = ForwardBatch(
            num_decodes=decodes,
            page_table=table.pages,
            kv=self._kv,
            host=HostView(batch.slots, batch.num_scheduled, arrays["seq_lens"], table.host_pages),
            **fields,
        )
        return replace(forward, plan=self._backend.plan(forward)), tensors

    def _arrays(self, batch: ScheduledBatch, counts: RowCounts) -> dict[str, np.ndarray]:
        decodes, total = batch.num_decodes, int(counts.query_starts[-1])
        slots = batch.slots.astype(np.int64)
        token_ids = np.empty(total, np.int64)
        token_ids[decodes:] = batch.token_ids
        if decodes == len(slots):
            positions, token_slots = batch.num_computed.astype(np.int64), slots
        else:
            lens = batch.num_scheduled
            positions = np.arange(total) + np.repeat(batch.num_computed - counts.query_starts[:-1], lens)
            token_slots = np.repeat(slots, lens)
        size = self._table.page_size
        if size == 1:
            kv_slots = self._table.host_pages[token_slots, positions].astype(np.int64)
        else:
            column = positions // size
            kv_slots = self._table.host_pages[token_slots, column].astype(np.int64)
            kv_slots -= column
            kv_slots *= size  # (page - column) * size + position = page * size + position % size
            kv_slots += positions
        return {
            "token_ids": token_ids,
            "positions": positions,
            "kv_slots": kv_slots,
            "request_slots": slots,
            "logits_indices": counts.logits_indices,
            "seq_lens": counts.seq_lens.astype(np.int32),
            "query_lens": batch.num_scheduled.astype(np.int32),
            "query_starts": counts.query_starts.astype(np.int32),
        }

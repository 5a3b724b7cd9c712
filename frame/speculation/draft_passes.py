"""`DraftPasses`: what each pass of a device drafter over the sampling rows of a step is made of.

Used by the draft runner and its graphs. Must not know a request or a drafter by name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, HostView
from frame.core.sampling.sampler import row_max
from frame.speculation.token_ranking import rank_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from frame.core.execution.input_batch import InputBatch
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.device_drafter import DraftModel
    from frame.core.sampling.step_plan import DraftingPlan


@dataclass(slots=True)
class DraftRows:
    """The sampling rows of a step while they draft. int64 [rows] unless said otherwise."""

    slots: torch.Tensor  # request slots
    limits: torch.Tensor  # tokens that the pages of the row hold
    ids: torch.Tensor  # the row's last token, drawn or drafted
    positions: torch.Tensor  # of the next entry of the drafter's cache
    states: torch.Tensor  # [rows, width]
    columns: torch.Tensor  # of the key of the next draw
    temperature: torch.Tensor | None = None  # float32 [rows]; None: all rows are greedy
    keys: torch.Tensor | None = None  # int64 [rows, columns]

    def select(self, some: slice) -> DraftRows:
        """Some of the rows."""
        tensors = [getattr(self, each.name) for each in fields(self)]
        values: list[Any] = [None if tensor is None else tensor[some] for tensor in tensors]
        return DraftRows(*values)


class DraftPasses:
    """A draft model with its attention backend and page table."""

    def __init__(
        self, model: DraftModel, attention: AttentionBackend | None, inputs: InputBatch, agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """attention: the backend of the model's layers; None: that of the target. inputs: of the
        target. agree: tokens drawn on this rank -> those of rank 0."""
        self.model = model
        self.backend = attention or inputs.backend
        self.has_separate_backend = attention is not None
        self.table, self.kv, self._media = inputs.table, inputs.kv, inputs.media
        self._agree = agree
        self._draw_plain = inputs.sampler.operations.draw_plain

    def draw(self, rows: DraftRows, place: int) -> torch.Tensor:
        """The next token of each row, int64 [rows]."""
        logits = self.model.compute_logits(rows.states, place)
        if rows.temperature is None or rows.keys is None:
            return self._agree(row_max(logits)[1])
        keys = rows.keys.gather(1, rows.columns.unsqueeze(1)).squeeze(1)
        return self._agree(self._draw_plain(logits, rows.temperature, keys, None)[0])

    def rank(self, rows: DraftRows, states: torch.Tensor, place: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest next tokens of each branch, see `rank_tokens`. Where tokens are drawn, they
        race with the keys of the position. states: [rows, branches, width]. -> [rows, branches,
        count] each."""
        logits = self.model.compute_logits(states.flatten(0, 1), place)
        draws = None
        if rows.temperature is not None and rows.keys is not None:
            draws = rows.temperature, rows.keys.gather(1, (rows.columns + place).unsqueeze(1)).squeeze(1)
        values, ids = rank_tokens(logits, draws, states.shape[1], count)
        return self._agree(values), self._agree(ids)

    def find_positions(self, slots: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rotary positions of tokens at these places of their sequences, int64 [n] each."""
        return places if self._media is None else self._media.shift_positions(slots, places)

    def make_batch(self, rows: DraftRows, host_lens: np.ndarray, host_slots: np.ndarray) -> ForwardBatch:
        """A pass over one token of each row, without a plan. A token beyond the pages of its row is
        stored in the reserved page."""
        table, size, count = self.table, self.table.page_size, len(rows.ids)
        inside = torch.minimum(rows.positions, rows.limits - 1)
        pages = table.pages[rows.slots, inside // size].long()
        return ForwardBatch(
            num_decodes=count,
            token_ids=rows.ids,
            positions=self.find_positions(rows.slots, inside),
            kv_slots=torch.where(rows.positions < rows.limits, pages * size + inside % size, 0),
            request_slots=rows.slots,
            seq_lens=(inside + 1).int(),
            query_lens=torch.ones(count, dtype=torch.int32, device=inside.device),
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=inside.device),
            page_table=table.pages,
            logits_indices=rows.slots[:0],
            kv=self.kv,
            host=HostView(host_slots, np.ones(count, np.int32), host_lens, table.host_pages),
        )


def list_lens(rows: DraftRows, plan: DraftingPlan, offset: int) -> np.ndarray:
    """The cached tokens of each row after a pass, int32 [rows]: exact on the CPU, else upper
    bounds, since the accepted counts are on the device."""
    if rows.positions.device.type == "cpu":
        lens: np.ndarray = torch.minimum(rows.positions + 1, rows.limits).int().numpy()
        return lens
    return np.minimum(plan.arrays.positions + plan.width + offset, plan.arrays.limits).astype(np.int32)

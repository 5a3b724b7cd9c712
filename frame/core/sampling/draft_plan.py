"""The host's plan of one step of a device drafter. Used by the input batch and the draft runner.
Imports no torch. Must not know a drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from frame.core.interfaces.batch import DraftOrder, ScheduledBatch
    from frame.core.sampling.batch_layout import BatchLayout
    from frame.core.sampling.sampling_metadata import SamplingTable


@dataclass(frozen=True, slots=True)
class DraftingPlan:
    """The work of a device drafter after one step. `arrays`, int64 unless said otherwise; rows are
    the sampling rows of the batch:

      draft.next_ids     [tokens]; the token after each token, where the host has it
      draft.samples      [samples]; the token that each sample is drawn from
      draft.first        [rows]; the first sample of the row
      draft.positions    [rows]; the position of the first sample
      draft.slots        [rows]; request slots
      draft.limits       [rows]; tokens that the pages of the row hold
      draft.temperature  float32 [rows]; 0: greedy
      draft.places       [samples]; places of the samples' tokens; missing without trees
      draft.key          [rows, width + num_tokens]; keys of the draws from position + 1 on
    """

    num_tokens: int  # to draft for each row
    num_drawn: int  # rows with a temperature above 0
    width: int  # most samples of a row, and tokens by which its positions may be greater
    arrays: dict[str, np.ndarray]


def plan_drafting(batch: ScheduledBatch, order: DraftOrder, layout: BatchLayout, table: SamplingTable, more: int = 0) -> DraftingPlan:
    """The plan of a step with this order. more: tokens by which the positions may be greater."""
    if layout.drafts is None:
        rows = layout.sample_rows
        first, width = np.arange(len(rows)), 1
    else:
        rows, first, width = layout.drafts.rows, layout.drafts.first, int(layout.drafts.num_samples.max(initial=1))
    width += more
    num_samples = len(layout.sample_rows)
    next_ids = np.zeros(layout.num_tokens, np.int64)
    next_ids[batch.num_decodes : -1] = batch.token_ids[1:]
    next_ids[layout.query_starts[1:] - 1] = order.next_tokens
    slots, positions = batch.slots[rows].astype(np.int64), layout.sample_positions[first]
    draws = table.plan_drafts(slots, positions + 1, width + order.num_tokens - 1) if order.num_tokens else {}
    arrays = {
        "draft.next_ids": next_ids,
        "draft.samples": layout.logits_indices[:num_samples],
        "draft.first": first,
        "draft.positions": positions,
        "draft.slots": slots,
        "draft.limits": order.limits[rows].astype(np.int64),
        **{f"draft.{name}": array for name, array in draws.items()},
    }
    if layout.drafts is not None and layout.drafts.shifts is not None:
        arrays["draft.places"] = layout.sample_positions + layout.drafts.shifts - 1
    num_drawn = int(np.count_nonzero(draws["temperature"])) if draws else 0
    return DraftingPlan(order.num_tokens if len(rows) else 0, num_drawn, width, arrays)

"""Steps with drafts of which the device alone has the ids, and the lengths that the step before
them, still in flight, decides.

The host plans such a step from the least lengths, as if that step accepted no draft;
`PendingRows` adds the accepted tokens on the device. Used by the input batch and the model
runner. Must not know a drafter, a request or a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from frame.core.execution.pending_trees import trace_trees

if TYPE_CHECKING:
    from collections.abc import Mapping

    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.kv_cache.kv_pool import DeviceTable, PageTable
    from frame.core.sampling.batch_layout import BatchLayout, DraftLayout
    from frame.core.sampling.sampling_metadata import SamplingTable
    from frame.core.sampling.verification import ChooseAccepted


@dataclass(frozen=True, slots=True)
class PendingPlan:
    """The host's plan of one such step. `arrays`, int64, of which all but the first two are
    missing where all lengths are known:

      pending.sources   [tokens of rows with drafts]; index of the token in the last-token table
      pending.targets   [samples]; the same of the drafted token that a sample is compared with
      pending.tokens    [tokens]; request slots
      pending.kv_slots  [tokens, width + 1]; the KV slot after so many accepted tokens; those of
                          each `window` group, by its name in `GroupInputs.windows`
      pending.samples   [samples]; request slots
      pending.keys      [sampling rows, n]; keys of the draws from the row's first sample on
      pending.cells     [samples]; the cell of the sample's key in `keys`, if no token is accepted
      pending.chosen    [samples, width + 1]; see `ChooseAccepted`, as above

    and of trees, of which only the device has the form:

      pending.nodes     bool [sampling rows, most samples of a row]; whether the row has the node
      pending.places    [samples]; the token that the sample is drawn from
    """

    width: int  # most tokens by which a row may be longer
    arrays: dict[str, np.ndarray]


def shorten_rows(batch: ScheduledBatch) -> ScheduledBatch:
    """The batch with the least lengths of its rows."""
    return batch if batch.num_pending is None else msgspec.structs.replace(batch, num_computed=batch.num_computed - batch.num_pending)


class PendingRows:
    """The accepted tokens of the last step by request slot, on the device."""

    def __init__(self, table: DeviceTable, windows: Mapping[str, PageTable]) -> None:
        """windows: `GroupInputs.windows`."""
        self._table = table
        self._tables = {"kv_slots": table, **windows}
        self._accepted = torch.zeros(table.num_slots + 1, dtype=torch.int64, device=table.pages.device)
        self._is_used = False

    def plan(
        self,
        batch: ScheduledBatch,
        counts: np.ndarray,
        layout: BatchLayout,
        sampling: SamplingTable,
        choose_accepted: ChooseAccepted | None,
    ) -> PendingPlan:
        """The plan of a batch of `shorten_rows`, whose pages the tables have. counts: its
        `num_pending`."""
        slots = batch.slots.astype(np.int64)
        width, arrays = int(counts.max(initial=0)), self._locate_drafts(batch, layout, slots)
        if width:
            tokens, more = np.repeat(slots, batch.num_scheduled), np.arange(width + 1)
            positions = np.arange(layout.num_tokens) + np.repeat(batch.num_computed - layout.query_starts[:-1], batch.num_scheduled)
            reached = np.minimum(more[:, None], np.repeat(counts, batch.num_scheduled))
            for name, table in self._tables.items():
                arrays[f"pending.{name}"] = np.stack([table.find_kv_slots(batch, tokens, positions + each) for each in reached], 1)
            arrays["pending.tokens"] = tokens
            if choose_accepted is not None and layout.drafts is not None:
                samples = slots[layout.sample_rows]
                found = [choose_accepted(samples, layout.sample_positions + each, layout.drafts.targets) for each in more]
                arrays["pending.chosen"] = np.stack(found, 1)
        if self._table.tree_depth and layout.drafts is not None:
            arrays |= _plan_trees(layout, layout.drafts)
        if width or "pending.nodes" in arrays:
            arrays |= _plan_keys(layout, slots, sampling, width)
        return PendingPlan(width, arrays)

    def read_tokens(self, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """The ids of the rows with drafts. out: int64 [tokens], those after the decodes."""
        sources = tensors.get("pending.sources")
        if sources is not None:
            torch.index_select(self._table.last_token, 0, sources, out=out[: len(sources)])

    def resolve_tokens(self, tensors: dict[str, torch.Tensor], fields: Mapping[str, torch.Tensor]) -> None:
        """Add the accepted tokens to `positions`, `seq_lens`, `kv_slots` and those of the `window`
        groups, in place, and set what depends on the form of trees."""
        if "pending.tokens" in tensors:
            self._add_accepted(tensors, fields)
        else:
            self._clear_counts()  # the step before is committed
        if "pending.nodes" in tensors:
            self._resolve_trees(tensors, fields)

    def _add_accepted(self, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, torch.Tensor]) -> None:
        accepted = self._accepted.index_select(0, tensors["pending.tokens"])
        count = len(accepted)
        fields["positions"][:count].add_(accepted)
        for name in self._tables:
            torch.gather(tensors[f"pending.{name}"], 1, accepted.unsqueeze(1), out=fields[name][:count].unsqueeze(1))
        rows = fields["request_slots"]
        fields["seq_lens"].add_(self._accepted.index_select(0, rows))

    def _resolve_trees(self, tensors: dict[str, torch.Tensor], fields: Mapping[str, torch.Tensor]) -> None:
        """Make what `plan_verification` makes of trees that the host has."""
        table, slots, exists = self._table, tensors["verify.slots"], tensors["pending.nodes"]
        parents, ids = (each.index_select(0, slots)[:, : exists.shape[1] - 1] for each in (table.parents, table.drafts))
        trees = trace_trees(parents, ids, exists, table.tree_depth)
        bits = trees.pop("bits").int()
        tensors |= {f"verify.{name}": tensor for name, tensor in trees.items()}
        cells, places = tensors["verify.cells"], tensors["pending.places"]
        shifts = torch.arange(exists.shape[1], device=cells.device).sub(trees["depths"]).view(-1).index_select(0, cells)
        tensors["pending.shifts"] = shifts
        fields["positions"].index_add_(0, places, shifts, alpha=-1)
        bits = tensors["verify.bits"].index_copy_(0, places, bits.view(-1).index_select(0, cells))
        if "tree_bits" in fields:  # of a decode graph
            fields["tree_bits"][: len(bits)].copy_(bits)

    def resolve_samples(self, plan: PendingPlan | None, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Replace what the sampler, the verification and the device drafter read of positions. ->
        the keys of the draws, int64 [samples]; None: those of the host hold. The step's tokens must
        be settled."""
        keys = None
        if plan is not None:
            if "verify.targets" in tensors:
                tensors["verify.targets"] = self._table.last_token.index_select(0, tensors["pending.targets"])
            if "pending.keys" in tensors:
                keys = self._resolve_samples(tensors)
        self._clear_counts()
        return keys

    def _clear_counts(self) -> None:
        if self._is_used:
            self._accepted.zero_()
            self._is_used = False

    def store_counts(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """The samples of these slots that the step outputs, both int64 [n]."""
        self._accepted.index_copy_(0, slots, counts - 1)
        self._is_used = True

    def _resolve_samples(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        accepted = self._accepted.index_select(0, tensors["pending.samples"])
        cells, known = tensors["pending.cells"] + accepted, tensors["pending.keys"].view(-1)
        keys = in_order = known.index_select(0, cells)  # in_order: of rounds, whose samples follow each other
        if "pending.shifts" in tensors:
            keys = known.index_select(0, cells - tensors["pending.shifts"])
            tensors["draft.places"] = tensors["draft.places"] + accepted
        if "verify.chosen" in tensors:
            tensors["verify.chosen"] = tensors["pending.chosen"].gather(1, accepted.unsqueeze(1)).squeeze(1)
        for name in list(tensors):
            part, _, field = name.rpartition(".")
            if field == "positions" and f"{part}.slots" in tensors:  # of a logits processor or the drafter
                more = self._accepted.index_select(0, tensors[f"{part}.slots"])
                tensors[name] = tensors[name] + more
                if part == "draft":
                    tensors["draft.columns"] = more
            elif field == "key" and part != "draft":
                start = part and f"{part}."
                found = keys if not part else in_order.index_select(0, tensors[f"{start}samples"])
                drawn = tensors.get(f"{start}drawn_rows")
                tensors[name] = found if drawn is None else found.index_select(0, drawn)
        return keys

    def _locate_drafts(self, batch: ScheduledBatch, layout: BatchLayout, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Where the table has the ids of the rows with drafts."""
        if layout.drafts is None or batch.num_drafts is None:
            return {}
        table, drafts = self._table, layout.drafts
        samples = slots[layout.sample_rows]
        cells = table.first_drafted + samples * table.drafts.shape[1] + drafts.offsets
        targets = np.where(drafts.targets < 0, len(table.last_token) - 1, cells)
        has_draft = np.repeat(batch.num_drafts[drafts.rows] > 0, drafts.num_samples)
        sources = np.where(drafts.offsets == 0, samples, cells - 1)[has_draft]
        return {"pending.sources": sources, "pending.targets": targets}


def _plan_keys(layout: BatchLayout, slots: np.ndarray, sampling: SamplingTable, width: int) -> dict[str, np.ndarray]:
    """slots: int64 [rows]."""
    drafts, samples = layout.drafts, slots[layout.sample_rows]
    first = rows = np.arange(len(samples))
    offsets = np.zeros_like(first)
    if drafts is not None:
        first, rows, offsets = drafts.first, np.repeat(np.arange(len(drafts.rows)), drafts.num_samples), drafts.offsets
    keys = sampling.plan_drafts(samples[first], layout.sample_positions[first], int(offsets.max(initial=0)) + 1 + width)["key"]
    return {"pending.samples": samples, "pending.keys": keys, "pending.cells": rows * keys.shape[1] + offsets}


def _plan_trees(layout: BatchLayout, drafts: DraftLayout) -> dict[str, np.ndarray]:
    """Also the arrays of the other plans of trees, as of tokens that are all in one branch."""
    return {
        "pending.nodes": np.arange(int(drafts.num_samples.max(initial=1))) < drafts.num_samples[:, None],
        "pending.places": layout.logits_indices[: len(layout.sample_rows)],
        "verify.bits": np.full(layout.num_tokens, -1, np.int32),
        "draft.places": layout.sample_positions - 1,
    }

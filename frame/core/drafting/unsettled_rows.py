"""Steps with drafts of which the device alone has the ids, and the lengths that the step before
them, still in flight, decides.

The host plans such a step from the least lengths, as if that step accepted no draft;
`UnsettledRows` adds the accepted tokens on the device. Used by the input batch and the model
runner. Must not know a drafter, a request or a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.kv_cache.kv_pool import DeviceTable
    from frame.core.sampling.batch_layout import BatchLayout
    from frame.core.sampling.sampling_metadata import SamplingTable
    from frame.core.sampling.synthetic_acceptance import SyntheticAcceptance


@dataclass(frozen=True, slots=True)
class UnsettledPlan:
    """The host's plan of one such step. `arrays`, int64, of which the last five are missing where
    all lengths are known:

      unsettled.sources   [tokens of rows with drafts]; index of the token in the last-token table
      unsettled.targets   [samples]; the same of the drafted token that a sample is compared with
      unsettled.tokens    [tokens]; request slots
      unsettled.kv_slots  [tokens, width + 1]; the KV slot after so many accepted tokens
      unsettled.samples   [samples]; request slots
      unsettled.keys      [samples, width + 1]; keys of the draws, as above
      unsettled.chosen    [samples, width + 1]; see `SyntheticAcceptance.choose`, as above
    """

    width: int  # most tokens by which a row may be longer
    arrays: dict[str, np.ndarray]


def shorten_rows(batch: ScheduledBatch) -> ScheduledBatch:
    """The batch with the least lengths of its rows."""
    return batch if batch.num_unsettled is None else msgspec.structs.replace(batch, num_computed=batch.num_computed - batch.num_unsettled)


class UnsettledRows:
    """The accepted tokens of the last step by request slot, on the device."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._accepted = torch.zeros(table.num_slots + 1, dtype=torch.int64, device=table.pages.device)
        self._is_used = False

    def plan(
        self,
        batch: ScheduledBatch,
        counts: np.ndarray,
        layout: BatchLayout,
        sampling: SamplingTable,
        synthetic: SyntheticAcceptance | None,
    ) -> UnsettledPlan:
        """The plan of a batch of `shorten_rows`, whose pages the table has. counts: its
        `num_unsettled`."""
        table, slots = self._table, batch.slots.astype(np.int64)
        width, arrays = int(counts.max(initial=0)), self._locate_drafts(batch, layout, slots)
        if width:
            tokens, more = np.repeat(slots, batch.num_scheduled), np.arange(width + 1)
            positions = np.arange(layout.num_tokens) + np.repeat(batch.num_computed - layout.query_starts[:-1], batch.num_scheduled)
            reached = np.minimum(more[:, None], np.repeat(counts, batch.num_scheduled))
            places = [table.find_kv_slots(batch, tokens, positions + each) for each in reached]
            samples = slots[layout.sample_rows]
            arrays |= {"unsettled.tokens": tokens, "unsettled.kv_slots": np.stack(places, 1), "unsettled.samples": samples}
            arrays["unsettled.keys"] = sampling.plan_drafts(samples, layout.sample_positions, width + 1)["key"]
            if synthetic is not None and layout.drafts is not None:
                found = [synthetic.choose(samples, layout.sample_positions + each, layout.drafts.targets) for each in more]
                arrays["unsettled.chosen"] = np.stack(found, 1)
        return UnsettledPlan(width, arrays)

    def read_tokens(self, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """The ids of the rows with drafts. out: int64 [tokens], those after the decodes."""
        sources = tensors.get("unsettled.sources")
        if sources is not None:
            torch.index_select(self._table.last_token, 0, sources, out=out[: len(sources)])

    def settle_tokens(self, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, torch.Tensor]) -> None:
        """Add the accepted tokens to `positions`, `kv_slots` and `seq_lens`, in place."""
        if "unsettled.tokens" not in tensors:
            return
        accepted = self._accepted.index_select(0, tensors["unsettled.tokens"])
        count, choices = len(accepted), tensors["unsettled.kv_slots"]
        fields["positions"][:count].add_(accepted)
        torch.gather(choices, 1, accepted.unsqueeze(1), out=fields["kv_slots"][:count].unsqueeze(1))
        rows = fields["request_slots"]
        fields["seq_lens"].add_(self._accepted.index_select(0, rows))

    def settle_samples(self, plan: UnsettledPlan | None, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """Replace what the sampler, the verification and the device drafter read of positions. ->
        the keys of the draws, int64 [samples]; None: those of the host hold. The step's tokens must
        be settled."""
        keys = None
        if plan is not None:
            if "verify.targets" in tensors:
                tensors["verify.targets"] = self._table.last_token.index_select(0, tensors["unsettled.targets"])
            if plan.width:
                keys = self._settle_samples(tensors)
        if self._is_used:
            self._accepted.zero_()
            self._is_used = False
        return keys

    def store_counts(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """The samples of these slots that the step outputs, both int64 [n]."""
        self._accepted.index_copy_(0, slots, counts - 1)
        self._is_used = True

    def _settle_samples(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        accepted = self._accepted.index_select(0, tensors["unsettled.samples"]).unsqueeze(1)
        keys = tensors["unsettled.keys"].gather(1, accepted).squeeze(1)
        if "verify.chosen" in tensors:
            tensors["verify.chosen"] = tensors["unsettled.chosen"].gather(1, accepted).squeeze(1)
        for name in list(tensors):
            part, _, field = name.rpartition(".")
            if field == "positions" and f"{part}.slots" in tensors:  # of a logits processor or the drafter
                more = self._accepted.index_select(0, tensors[f"{part}.slots"])
                tensors[name] = tensors[name] + more
                if part == "draft":
                    tensors["draft.columns"] = more
            elif field == "key" and part != "draft":
                start = part and f"{part}."
                found = keys if not part else keys.index_select(0, tensors[f"{start}samples"])
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
        return {"unsettled.sources": sources, "unsettled.targets": targets}

"""Steps with drafts of which the device alone has the ids, and the lengths that the step before
them, still in flight, decides.

The host plans such a step from the minimum lengths, as if that step accepted no draft
(`PendingPlan`); `PendingRows` adds the accepted tokens on the device. Nothing waits for the device.
Used by the input batch and the model runner. Must not know a drafter, a request or a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from frame.core.sampling.batch_layout import DraftTrees

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frame.core.kv_cache.kv_pool import DeviceTable
    from frame.core.sampling.logits_pipeline import ProcessorArrays
    from frame.core.sampling.step_plan import PendingArrays, PendingKeys, StepArrays, VerificationArrays


@dataclass(slots=True)
class TokenFields:
    """The tensors of a forward batch, or of a decode graph's inputs, that accepted tokens change in
    place."""

    positions: torch.Tensor  # int64 [tokens]
    seq_lens: torch.Tensor  # int32 [rows]
    request_slots: torch.Tensor  # int64 [rows]
    kv_slots: Sequence[torch.Tensor]  # int64 [tokens] each, of the page tables of `PendingArrays.kv_slots`
    tree_bits: torch.Tensor | None = None  # int32 [tokens]; of a decode graph


class PendingRows:
    """The accepted tokens of the last step by request slot, on the device."""

    def __init__(self, table: DeviceTable) -> None:
        self._table = table
        self._accepted = torch.zeros(table.num_slots + 1, dtype=torch.int64, device=table.pages.device)
        self._is_used = False

    def store_counts(self, slots: torch.Tensor, counts: torch.Tensor) -> None:
        """The samples of these slots that the step outputs, both int64 [n]."""
        self._accepted.index_copy_(0, slots, counts - 1)
        self._is_used = True

    def resolve(self, tensors: StepArrays[torch.Tensor], fields: TokenFields | None) -> torch.Tensor | None:
        """Add the accepted tokens to `fields`, and replace in `tensors` what the sampler, the
        verification and the device drafter read of positions, and what depends on the form of
        trees. fields: None for a step without pending rows. -> the keys of the draws, int64
        [samples]; None: those of the host hold."""
        keys, pending = None, tensors.pending
        if pending is not None and fields is not None:
            if pending.tokens is None:
                self._clear_counts()  # the step before is committed
            else:
                self._add_accepted(pending, pending.tokens, fields)
            shifts = None
            if tensors.verification is not None:
                if pending.nodes is not None:
                    shifts = self._resolve_trees(tensors.verification, pending, pending.nodes, fields)
                if pending.targets is not None:
                    tensors.verification.targets = self._table.last_token.index_select(0, pending.targets)
            if pending.keys is not None:
                keys = self._resolve_samples(tensors, pending, pending.keys, shifts)
        self._clear_counts()
        return keys

    def _clear_counts(self) -> None:
        if self._is_used:
            self._accepted.zero_()
            self._is_used = False

    def _add_accepted(self, pending: PendingArrays[torch.Tensor], token_slots: torch.Tensor, fields: TokenFields) -> None:
        accepted = self._accepted.index_select(0, token_slots)
        count = len(accepted)
        fields.positions[:count].add_(accepted)
        for kv_slots, choices in zip(fields.kv_slots, pending.kv_slots, strict=True):
            torch.gather(choices, 1, accepted.unsqueeze(1), out=kv_slots[:count].unsqueeze(1))
        fields.seq_lens.add_(self._accepted.index_select(0, fields.request_slots))

    def _resolve_trees(
        self,
        verification: VerificationArrays[torch.Tensor],
        pending: PendingArrays[torch.Tensor],
        exists: torch.Tensor,
        fields: TokenFields,
    ) -> torch.Tensor:
        """Make what `plan_verification` makes of trees that the host has. -> `DraftLayout.shifts`,
        int64 [samples]."""
        table, slots, places = self._table, verification.slots, pending.places
        if places is None or verification.bits is None:
            raise RuntimeError("a step with trees has no places of their nodes")
        parents, ids = (each.index_select(0, slots)[:, : exists.shape[1] - 1] for each in (table.parents, table.drafts))
        trees, bits = trace_trees(parents, ids, exists, table.tree_depth)
        verification.trees = trees
        cells = verification.cells
        shifts = torch.arange(exists.shape[1], device=cells.device).sub(trees.depths).view(-1).index_select(0, cells)
        fields.positions.index_add_(0, places, shifts, alpha=-1)
        bits = verification.bits.index_copy_(0, places, bits.view(-1).index_select(0, cells))
        if fields.tree_bits is not None:
            fields.tree_bits[: len(bits)].copy_(bits)
        return shifts

    def _resolve_samples(
        self,
        tensors: StepArrays[torch.Tensor],
        pending: PendingArrays[torch.Tensor],
        planned: PendingKeys[torch.Tensor],
        shifts: torch.Tensor | None,
    ) -> torch.Tensor:
        accepted = self._accepted.index_select(0, planned.samples)
        cells, known, drafting = planned.cells + accepted, planned.keys.view(-1), tensors.drafting
        keys = in_order = known.index_select(0, cells)  # in_order: of rounds, whose samples follow each other
        if shifts is not None:
            keys = known.index_select(0, cells - shifts)
            if drafting is not None and drafting.places is not None:
                drafting.places = drafting.places + accepted
        if tensors.verification is not None and pending.chosen is not None:
            tensors.verification.chosen = pending.chosen.gather(1, accepted.unsqueeze(1)).squeeze(1)
        if drafting is not None:
            drafting.columns = self._accepted.index_select(0, drafting.slots)
            drafting.positions = drafting.positions + drafting.columns
        samplings = [] if tensors.sampling is None else [(tensors.sampling, keys)]
        samplings += [(each.sampling, in_order.index_select(0, each.samples)) for each in tensors.rounds]
        for sampling, sample_keys in samplings:
            if (draw := sampling.draw) is not None:
                draw.key = sample_keys if draw.rows is None else sample_keys.index_select(0, draw.rows)
            if sampling.processing is not None:
                self._move_positions(sampling.processing)
        return keys

    def _move_positions(self, processing: ProcessorArrays[torch.Tensor]) -> None:
        for each in processing.by_processor:
            each.positions = each.positions + self._accepted.index_select(0, each.slots)


def trace_trees(
    parents: torch.Tensor, token_ids: torch.Tensor, exists: torch.Tensor, depth: int
) -> tuple[DraftTrees[torch.Tensor], torch.Tensor]:
    """What `build_trees` computes on the host, from the parents in the device's table; paths are
    int64. parents, token_ids: int64 [rows, width - 1], of the nodes from 1 on. exists: bool [rows,
    width], whether the row has the node. depth: maximum of a node."""
    nodes, is_drafted = torch.arange(exists.shape[1], device=parents.device), exists[:, 1:]
    parents = pad(torch.where(is_drafted, parents, 0), (1, 0))
    branch = [nodes.expand_as(parents)]  # of each node: the node itself, its parent and so on, then 0
    for _ in range(depth):
        branch.append(parents.gather(1, branch[-1]))
    above = torch.stack(branch, 2)
    in_branch = above > 0
    depths = in_branch.sum(dim=2) * exists
    branches = torch.zeros(*parents.shape, len(nodes), dtype=torch.bool, device=parents.device).scatter_(2, above, in_branch)
    places = (depths.unsqueeze(2) - torch.arange(depth + 1, device=parents.device)).clamp_(min=0)
    seen = (in_branch.long() << (nodes.unsqueeze(1) - above)).sum(dim=2)
    trees = DraftTrees(
        parents=parents,
        depths=depths,
        tokens=pad(torch.where(is_drafted, token_ids, -2), (1, 0), value=-2),
        branches=branches | ~exists.unsqueeze(2),
        paths=nodes.expand_as(branches).scatter(2, places, above),
    )
    return trees, (seen - (1 << nodes)).int()  # and all tokens before the draft, and node 0

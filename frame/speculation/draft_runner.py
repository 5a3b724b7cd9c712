"""`DraftRunner`: runs the model of a device drafter after each step of the target model.

The first pass has the step's own tokens and fills the drafter's cache; each further pass has one
token of each sampling row. Used by the model runner. Must not know a request or a drafter by name.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.blame import describe, remedy
from frame.core.interfaces.batch import ForwardBatch, HiddenStateOutputs, SelectedTokens, TreeMask
from frame.core.interfaces.media import MediaRows
from frame.speculation.draft_graphs import DraftGraphs
from frame.speculation.draft_passes import DraftPasses, DraftRows, list_lens
from frame.speculation.tree_passes import TreePasses

if TYPE_CHECKING:
    from frame.core.execution.decode_graphs import DecodeGraphs
    from frame.core.interfaces.drafter import TreeShape
    from frame.core.sampling.step_plan import DraftingArrays, DraftingPlan

log = logging.getLogger(__name__)


class DraftRunner:
    """Runs on the runner's stream and in inference mode; the methods are those of
    `DeviceDrafts`."""

    def __init__(self, passes: DraftPasses, num_steps: int, tree: TreeShape | None = None, *, is_alone: bool = True) -> None:
        """num_steps: maximum length of a draft. tree: None: drafts are chains. is_alone: no other
        rank drafts the same tokens."""
        self.model = passes.model
        self._passes = passes
        self._num_steps = num_steps
        self._tree = None if tree is None else TreePasses(passes, tree)
        self._graphs: DraftGraphs | None = None
        self._step: tuple[ForwardBatch, torch.Tensor] | None = None
        self._has_failed = False
        self._is_alone = is_alone

    def add_hidden_outputs(self, batch: ForwardBatch) -> None:
        if self.model.tapped_layers:
            batch.extensions[HiddenStateOutputs] = HiddenStateOutputs(self.model.tapped_layers)

    def read_states(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        hidden_outputs = batch.get(HiddenStateOutputs)
        return self.model.read_states(hidden, {} if hidden_outputs is None else hidden_outputs.states)

    def begin_step(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        self._step = batch, self.read_states(batch, hidden)

    def make_graphs(self, graphs: DecodeGraphs) -> DraftGraphs:
        self._graphs = DraftGraphs(self._passes, graphs, self._num_steps, self._tree)
        return self._graphs

    def draft(
        self,
        token_ids: torch.Tensor,
        counts: torch.Tensor | None,
        plan: DraftingPlan,
        tensors: DraftingArrays[torch.Tensor],
        order: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """See `DeviceDrafts.draft`. An error of the model ends its use. With other ranks, which
        wait for this one's tokens, it is raised."""
        if self._has_failed:
            return None
        try:
            return self._draft(token_ids, counts, plan, tensors, order)
        except torch.AcceleratorError:
            raise  # the device has failed
        except Exception as error:
            if not self._is_alone:
                raise
            self._has_failed = True
            problem = f"{type(error).__name__}: {error}"
            log.error("%s failed and is not used any more: %s; %s", describe(self.model), problem, remedy(self.model), exc_info=error)
            return None

    def _draft(
        self,
        token_ids: torch.Tensor,
        counts: torch.Tensor | None,
        plan: DraftingPlan,
        tensors: DraftingArrays[torch.Tensor],
        order: torch.Tensor | None,
    ) -> torch.Tensor | None:
        skipped = torch.zeros_like(tensors.first) if counts is None else counts - 1
        last = tensors.first + skipped
        if order is not None:
            token_ids = token_ids.index_select(0, order).clamp_(min=0)  # -1: not drawn
        if self._step is not None:
            (batch, states), self._step = self._step, None
            if order is not None:
                batch = _follow_path(batch, order, tensors)
                if self.model.reads_next:
                    samples = tensors.samples
                    states = states.index_copy(0, samples, states.index_select(0, samples.index_select(0, order)))
            states = self._fill(batch, states, token_ids, last if plan.num_tokens else last[:0], tensors)
        elif self._graphs is not None:
            states = self._graphs.fill(token_ids, order, tensors.places).index_select(0, last)
        else:
            raise RuntimeError("a step drafts, but its forward pass is not known")
        if not plan.num_tokens:
            return None
        ids, positions = token_ids.index_select(0, last), tensors.positions + skipped
        columns = skipped if tensors.columns is None else skipped + tensors.columns
        rows = DraftRows(tensors.slots, tensors.limits, ids, positions, states, columns)
        if plan.num_drawn:
            rows.temperature, rows.keys = tensors.temperature, tensors.key
        if self._graphs is not None and self._graphs.can_draft(len(ids)):
            return self._graphs.draft(rows, plan)
        if self._tree is not None:
            return self._tree.draft(rows, plan)
        return self._draft_rows(rows, plan)

    def _fill(
        self, batch: ForwardBatch, states: torch.Tensor, token_ids: torch.Tensor, last: torch.Tensor, tensors: DraftingArrays[torch.Tensor]
    ) -> torch.Tensor:
        """The first pass. last: int64 [n], the samples whose states are read. -> the states of the
        tokens that these are drawn from."""
        samples, ids = tensors.samples, batch.token_ids
        extensions = {**batch.extensions, SelectedTokens: SelectedTokens(samples.index_select(0, last))}
        if self.model.reads_next:
            ids = tensors.next_ids.index_copy(0, samples, token_ids)
            if (media := batch.get(MediaRows)) is not None:
                extensions[MediaRows] = media.shift(batch.query_starts)
        first = replace(batch, token_ids=ids, extensions=extensions)
        needs_plan = self._passes.has_separate_backend or tensors.places is not None
        return self.model.forward(replace(first, plan=self._passes.backend.plan(first)) if needs_plan else first, states)

    def _draft_rows(self, rows: DraftRows, plan: DraftingPlan) -> torch.Tensor:
        """The passes after the first one, without graphs."""
        model, drafts = self.model, []
        for place in range(plan.num_tokens):
            if model.needs_passes and (place or not model.reads_next):
                batch = self._passes.make_batch(rows, list_lens(rows, plan, place), plan.arrays.slots.astype(np.int32))
                rows.states = model.forward(replace(batch, plan=self._passes.backend.plan(batch)), rows.states)
                rows.positions = rows.positions + 1
            rows.ids = self._passes.draw(rows, place)
            rows.columns = rows.columns + 1
            drafts.append(rows.ids)
        return torch.stack(drafts, 1)


def _follow_path(batch: ForwardBatch, order: torch.Tensor, tensors: DraftingArrays[torch.Tensor]) -> ForwardBatch:
    """The batch of a step with trees, as if the accepted tokens had been drafted as chains. order:
    see `Verified`."""
    samples, positions = tensors.samples, batch.positions
    if tensors.places is not None:
        positions = positions.index_copy(0, samples, tensors.places)
    path = samples.index_select(0, order)
    return replace(
        batch,
        token_ids=batch.token_ids.index_copy(0, samples, batch.token_ids.index_select(0, path)),
        positions=positions,
        extensions={name: each for name, each in batch.extensions.items() if name is not TreeMask},
    )

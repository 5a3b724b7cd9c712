"""`DraftGraphs`: the passes of a device drafter as CUDA graphs.

For each size of the decode graphs there is a graph of the first pass, over the decode graph's own
batch, and, up to the number of request slots, graphs of a draw and of a further pass over as many
rows. Their inputs have fixed addresses; nothing waits for the device. On a CPU a pass is computed
again instead of replayed. Used by the draft runner. Must not know a request or a drafter by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.core.execution.decode_graphs import bound_lengths, capture_step, create_graph_pool
from frame.core.garbage_collection import paused_collection
from frame.core.interfaces.batch import HostView
from frame.core.interfaces.rank_context import Track, track_silently
from frame.speculation.draft_passes import DraftPasses, DraftRows

if TYPE_CHECKING:
    from frame.core.execution.decode_graphs import Captured, CapturedSize, DecodeGraphs
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.sampling.step_plan import DraftingPlan
    from frame.speculation.tree_passes import TreePasses


@dataclass(frozen=True, slots=True)
class _Fill:
    """The first pass of one size: its batch, the states that it reads, those of its tokens, and the
    graph."""

    batch: ForwardBatch
    inputs: torch.Tensor
    states: torch.Tensor
    captured: Captured


@dataclass(frozen=True, slots=True)
class _Passes:
    """The passes of one number of rows. `first`: draws from the states of the first pass, of trees
    all tokens; None if the model does not."""

    rows: DraftRows
    batch: ForwardBatch
    first: Captured | None
    further: Captured | None


class DraftGraphs:
    """Call `capture` once; in a step that a decode graph ran `fill`, then `draft`."""

    def __init__(self, passes: DraftPasses, graphs: DecodeGraphs, num_steps: int, tree: TreePasses | None = None) -> None:
        self._drafter = passes
        self._tree = tree
        self._graphs = graphs
        self._num_steps = num_steps
        device, maximum = graphs.device, graphs.maximum
        self._next_ids = torch.zeros(maximum, dtype=torch.int64, device=device)
        self._drafts = torch.zeros(maximum, *((num_steps,) if tree is None else (2, num_steps)), dtype=torch.int64, device=device)
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._fills: dict[int, _Fill] = {}
        self._passes: dict[int, _Passes] = {}

    def can_draft(self, rows: int) -> bool:
        """Whether there are graphs of the passes of so many rows."""
        return rows <= self._graphs.maximum and self._graphs.find_size(rows) in self._passes

    def capture(self, *, is_dry: bool = False, track: Track = track_silently) -> None:
        """Run and capture each size, the largest first, so that smaller sizes reuse its memory.
        is_dry: run each size only."""
        graphs = self._graphs
        pool = None if is_dry else create_graph_pool(graphs.platform)
        max_rows = graphs.find_size(min(self._drafter.table.num_slots, graphs.maximum))
        if self._tree is not None:  # each branch is a row
            max_rows = min(max_rows, graphs.maximum // self._tree.shape.width)
        with paused_collection(collects_first=True):
            for step in track(graphs.steps[::-1], "capturing graphs of drafts"):
                size = step.batch.num_rows
                self._fills[size] = fill = self._capture_fill(step, pool)
                if size <= max_rows:
                    self._passes[size] = self._capture_passes(step, fill, pool)

    def fill(self, token_ids: torch.Tensor, order: torch.Tensor | None = None, places: torch.Tensor | None = None) -> torch.Tensor:
        """The first pass of the step that was replayed last, whose tokens all sample. token_ids:
        int64 [tokens], drawn. order: of trees, see `Verified`; places: of the tokens. -> the states
        of the tokens."""
        size, host = self._graphs.replayed
        fill, count = self._fills[size], len(token_ids)
        if order is not None and places is not None:  # as if the accepted tokens had been drafted as chains
            inputs = self._graphs.inputs
            inputs["positions"][:count].copy_(places)
            inputs["tree_bits"][:count].fill_(-1)
            read = fill.inputs if self._drafter.model.reads_next else fill.batch.token_ids
            read[:count].copy_(read[:count].index_select(0, order))
        self._next_ids[:count].copy_(token_ids)
        if self._drafter.has_separate_backend:
            self._drafter.backend.replay_plan(fill.batch.plan, replace(fill.batch, host=host))
        fill.captured.replay()
        return fill.states[:count]

    def draft(self, rows: DraftRows, plan: DraftingPlan) -> torch.Tensor:
        """The draft of each row, see `StepResult.drafts`, int64, valid until the next call."""
        count = len(rows.ids)
        passes = self._passes[self._graphs.find_size(count)]
        _copy_rows(rows, passes.rows, self._drafter.table.padding_slot)
        if self._tree is not None and passes.first is not None:
            passes.first.replay()
            return self._drafts[:count, :, : plan.num_tokens]
        num_further = plan.num_tokens
        if passes.first is not None:
            passes.first.replay()
            num_further -= 1
        else:
            self._place.zero_()
        if passes.further is not None and num_further:
            self._replay_plan(passes.batch, plan)
            for _ in range(num_further):
                passes.further.replay()
        return self._drafts[:count, : plan.num_tokens]

    def _replay_plan(self, batch: ForwardBatch, plan: DraftingPlan) -> None:
        """Update the plan of the further passes: to upper bounds of their lengths, since the
        accepted counts are on the device."""
        slots = np.full(batch.num_rows, self._drafter.table.padding_slot, np.int32)
        lens = np.ones(batch.num_rows, np.int32)
        arrays, count = plan.arrays, len(plan.arrays.slots)
        slots[:count] = arrays.slots
        lens[:count] = np.minimum(arrays.positions + plan.width + plan.num_tokens, arrays.limits)
        host = HostView(slots, batch.host.query_lens, lens, batch.host.page_table)
        self._drafter.backend.replay_plan(batch.plan, replace(batch, host=host))

    def _capture_fill(self, step: CapturedSize, pool: Any) -> _Fill:
        drafter, batch, states = self._drafter, step.batch, step.outputs.states
        if states is None:
            raise RuntimeError("the decode graphs have no states for a drafter")
        if drafter.model.reads_next:
            batch = replace(batch, token_ids=self._next_ids[: batch.num_rows])
        plain = replace(batch, plan=drafter.backend.plan(batch))
        if drafter.has_separate_backend:
            batch = replace(batch, plan=drafter.backend.capture_plan(batch))
        model = drafter.model
        (out,), captured = capture_step(
            self._graphs.platform,
            pool,
            lambda: (model.forward(bound_lengths(plain), states),),
            lambda: (model.forward(bound_lengths(batch), states),),
        )
        return _Fill(batch, states, out, captured)

    def _capture_passes(self, step: CapturedSize, fill: _Fill, pool: Any) -> _Passes:
        drafter, size, platform = self._drafter, step.batch.num_rows, self._graphs.platform
        rows = self._make_rows(size, fill.states)
        batch = drafter.make_batch(rows, np.ones(size, np.int32), step.batch.host.slots)
        if (tree := self._tree) is not None:
            slots = step.batch.host.slots

            def draft() -> tuple[torch.Tensor, ...]:
                self._drafts[:size].copy_(tree.draft_captured(rows, slots))
                return ()

            return _Passes(rows, batch, capture_step(platform, pool, draft, draft)[1], None)
        first = further = None
        if drafter.model.reads_next or not drafter.model.needs_passes:
            first = capture_step(platform, pool, lambda: self._draw_first(rows), lambda: self._draw_first(rows))[1]
        if drafter.model.needs_passes:
            plain, planned = (replace(batch, plan=plan(batch)) for plan in (drafter.backend.plan, drafter.backend.capture_plan))
            batch = planned
            self._place.zero_()
            rows.columns.zero_()
            further = capture_step(platform, pool, lambda: self._extend(rows, plain), lambda: self._extend(rows, planned))[1]
        return _Passes(rows, batch, first, further)

    def _make_rows(self, size: int, states: torch.Tensor) -> DraftRows:
        """Inputs of the passes, as rows of padding."""

        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=states.device)

        slots = numbers(size).fill_(self._drafter.table.padding_slot)
        temperature = torch.zeros(size, dtype=torch.float32, device=states.device)
        keys = numbers(size, 3 * self._num_steps)  # with a draft of the step, and one of the step before
        return DraftRows(slots, numbers(size) + 1, numbers(size), numbers(size), torch.zeros_like(states), numbers(size), temperature, keys)

    def _draw_first(self, rows: DraftRows) -> tuple[torch.Tensor, ...]:
        """`_draw` from the states of the first pass."""
        self._place.zero_()
        return self._draw(rows)

    def _draw(self, rows: DraftRows) -> tuple[torch.Tensor, ...]:
        """Draw the next token of each row; without further passes, the whole draft."""
        count = 1 if self._drafter.model.needs_passes else self._num_steps
        for place in range(count):
            rows.ids.copy_(self._drafter.draw(rows, place))
            self._drafts[: len(rows.ids)].index_copy_(1, self._place, rows.ids.unsqueeze(1))
            self._place.add_(1)
            rows.columns.add_(1)
        return ()

    def _extend(self, rows: DraftRows, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        """A further pass, and its draw."""
        inputs = self._drafter.make_batch(rows, batch.host.seq_lens, batch.host.slots)
        for name in ("positions", "kv_slots", "seq_lens"):
            getattr(batch, name).copy_(getattr(inputs, name))
        rows.states.copy_(self._drafter.model.forward(bound_lengths(batch), rows.states))
        rows.positions.add_(1)
        return self._draw(rows)


def _copy_rows(source: DraftRows, target: DraftRows, padding_slot: int) -> None:
    """Copy rows to their fixed addresses. The rows after them become padding."""
    count = len(source.ids)
    numbers = ("slots", "limits", "ids", "positions", "columns")
    torch._foreach_copy_([getattr(target, name)[:count] for name in numbers], [getattr(source, name) for name in numbers])
    target.states[:count].copy_(source.states)
    if target.temperature is None or target.keys is None:
        raise RuntimeError("captured passes draw at any temperature")
    if source.temperature is None or source.keys is None:  # greedy rows need no keys
        target.temperature[:count].zero_()
    else:
        target.temperature[:count].copy_(source.temperature)
        target.keys[:count, : source.keys.shape[1]].copy_(source.keys)
    target.slots[count:].fill_(padding_slot)
    target.columns[count:].zero_()

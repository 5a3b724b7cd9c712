"""`TreePasses`: drafts trees with a device drafter (EAGLE-2: Li et al. 2024, arXiv 2406.16858).

Each pass extends the likeliest branches of the deepest tokens, by the joint probability along a
branch; of all candidates, the likeliest are drafted. The tokens of a pass are decodes, whose keys
are stored after those of the sequence and of the passes before. Nothing waits for the device. Used
by the draft runner. Must not know a request or a drafter by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.execution.decode_graphs import bound_lengths
from frame.core.interfaces.batch import ForwardBatch, HostView, TreeMask
from frame.speculation.tree_choice import begin_branches, choose_branches, choose_nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from frame.core.interfaces.drafter import TreeShape
    from frame.core.sampling.step_plan import DraftingPlan
    from frame.speculation.draft_passes import DraftPasses, DraftRows


class TreePasses:
    """The passes after the first one, of drafts that are trees."""

    def __init__(self, passes: DraftPasses, shape: TreeShape) -> None:
        self._passes = passes
        self._shape = shape

    @property
    def shape(self) -> TreeShape:
        return self._shape

    def draft(self, rows: DraftRows, plan: DraftingPlan) -> torch.Tensor:
        """The tree of each row: int64 [rows, 2, plan.num_tokens], see `StepResult.drafts`. The
        tokens are ordered by their probability, so that the first n are the likeliest n. Attention
        backends have room for as many decodes as there are slots, so that many rows draft in
        chunks."""
        count = max(1, self._passes.table.num_slots // self._shape.width)
        chunks = [slice(start, start + count) for start in range(0, len(rows.ids), count)]
        return torch.cat([self._draft_chunk(rows.select(chunk), plan, chunk) for chunk in chunks])

    def _draft_chunk(self, rows: DraftRows, plan: DraftingPlan, chunk: slice) -> torch.Tensor:
        """The trees of some rows, which are some of the plan's."""
        size = self._shape.num_extended
        slots, positions, limits = plan.arrays.slots[chunk].astype(np.int32), plan.arrays.positions[chunk], plan.arrays.limits[chunk]
        # upper bounds, since the accepted counts are on the device
        bounds = (np.maximum(np.minimum(positions + plan.width - 1, limits - size), 1) + size + 1).astype(np.int32)

        def prepare(batch: ForwardBatch) -> ForwardBatch:
            branches = batch.num_decodes // len(slots)
            lens = batch.seq_lens.numpy() if batch.seq_lens.device.type == "cpu" else bounds.repeat(branches)
            host = HostView(slots.repeat(branches), np.ones(batch.num_decodes, np.int32), lens, batch.host.page_table)
            return replace(batch, host=host, plan=self._passes.backend.plan(replace(batch, host=host)))

        return self._draft(rows, plan.num_tokens, prepare)

    def draft_captured(self, rows: DraftRows, host_slots: np.ndarray) -> torch.Tensor:
        """The whole tree of each row, [rows, 2, num_nodes], by passes that a CUDA graph can
        capture. host_slots: int32 [rows], of the capture."""

        def prepare(batch: ForwardBatch) -> ForwardBatch:
            ones = np.ones(batch.num_decodes, np.int32)
            host = HostView(host_slots.repeat(len(ones) // len(host_slots)), ones, ones, batch.host.page_table)
            return bound_lengths(replace(batch, host=host, plan=self._passes.backend.capture_plan(replace(batch, host=host))))

        return self._draft(rows, self._shape.num_nodes, prepare)

    def _draft(self, rows: DraftRows, num_nodes: int, prepare: Callable[[ForwardBatch], ForwardBatch]) -> torch.Tensor:
        """prepare: adds the host's view and the plan to the batch of a pass."""
        width, count = self._shape.width, len(rows.ids)
        if not self._passes.model.reads_next:
            rows = self._read_last(rows, prepare)
        values, ids = (each[:, 0] for each in self._passes.rank(rows, rows.states.unsqueeze(1), 0, width))
        branches, states = begin_branches(values, ids), rows.states
        candidates, numbers = [(values, ids)], [ids[:, :0]]
        # a token follows its parents in the order, so that no branch has more tokens than are taken
        for place, batch in zip(range(1, num_nodes), self._make_batches(rows), strict=False):
            if place > 1:
                branches = choose_branches(values, ids, branches, width + (place - 2) * width * width)
            mask = TreeMask(np.arange(batch.num_decodes), branches.bits.flatten())
            batch = prepare(replace(batch, token_ids=branches.ids.flatten(), extensions={TreeMask: mask}))
            states = self._passes.model.forward(batch, states.index_select(0, branches.sources.flatten()))
            values, ids = self._passes.rank(rows, states.view(count, width, -1), place, width)
            values, ids = (branches.values.unsqueeze(2) + values).flatten(1), ids.flatten(1)
            candidates.append((values, ids))
            numbers.append(branches.numbers)
        values, ids = (torch.cat(each, 1) for each in zip(*candidates, strict=True))
        return choose_nodes(values, ids, torch.cat(numbers, 1), width, num_nodes)

    def _read_last(self, rows: DraftRows, prepare: Callable[[ForwardBatch], ForwardBatch]) -> DraftRows:
        """Read the rows' last tokens, which the first pass of the step has left out."""
        nothing = np.zeros(0, np.int32)
        batch = self._passes.make_batch(rows, nothing, nothing)
        mask = TreeMask(np.arange(batch.num_decodes), torch.full_like(batch.seq_lens, -1))
        states = self._passes.model.forward(prepare(replace(batch, extensions={TreeMask: mask})), rows.states)
        return replace(rows, states=states, positions=rows.positions + 1)

    def _make_batches(self, rows: DraftRows) -> Iterator[ForwardBatch]:
        """The batches of the passes, without tokens, the host's view and a plan. The keys of a row
        whose pages have no room for all extended tokens are stored in the reserved page, and it
        reads wrong ones."""
        table, (width, size), device = self._passes.table, (self._shape.width, self._shape.num_extended), rows.ids.device
        if not size:
            return
        last = rows.limits - size
        first = torch.minimum(rows.positions, last).clamp_(min=1)
        places = first.unsqueeze(1) + torch.arange(size, device=device).view(-1, 1, width)  # [passes, rows, width]
        pages = table.pages[rows.slots.unsqueeze(1), places // table.page_size]
        stored = torch.add(places % table.page_size, pages, alpha=table.page_size)
        kv_slots = torch.where((rows.positions <= last).unsqueeze(1), stored, 0)
        slots = rows.slots.repeat_interleave(width)
        lens, ones = (places[0] + 1).int().flatten(), torch.ones_like(slots, dtype=torch.int32)
        starts, nothing = torch.arange(len(slots) + 1, dtype=torch.int32, device=device), np.zeros(0, np.int32)
        for place in range(size // width):
            yield ForwardBatch(
                num_decodes=len(slots),
                token_ids=slots,
                positions=self._passes.find_positions(slots, first.repeat_interleave(width) + place),
                kv_slots=kv_slots[place].flatten().clone(),  # at an aligned address, which kernels want
                request_slots=slots,
                seq_lens=lens + place * width,
                query_lens=ones,
                query_starts=starts,
                page_table=table.pages,
                logits_indices=slots[:0],
                kv=self._passes.kv,
                host=HostView(nothing, nothing, nothing, table.host_pages),
            )

"""`TreePasses`: drafts trees with a device drafter (EAGLE-2: Li et al. 2024, arXiv 2406.16858).

Each pass extends the likeliest branches of the deepest tokens, by the product of the probabilities
along a branch; of all tokens found, the likeliest are drafted. A pass reads all tokens that were
extended so far as rows of a few tokens, whose keys are stored after those of the sequence. Nothing
waits for the device. Used by the draft runner. Must not know a request or a drafter by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.execution.decode_graphs import bound_lengths
from frame.core.interfaces.batch import ForwardBatch, HostView, SelectedTokens, TreeMask

if TYPE_CHECKING:
    from collections.abc import Callable

    from frame.core.drafting.draft_passes import DraftPasses, DraftRows
    from frame.core.interfaces.drafter import TreeShape
    from frame.core.sampling.draft_plan import DraftingPlan


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
        tokens are ordered by their probability, so that the first n are the likeliest n."""
        slots = plan.arrays["draft.slots"].astype(np.int32)

        def bound(first: torch.Tensor, size: int) -> np.ndarray:
            if first.device.type == "cpu":
                lens: np.ndarray = (first + size).int().numpy()
                return lens
            # upper bounds, since the accepted counts are on the device
            most = np.minimum(plan.arrays["draft.positions"] + plan.width - 1, plan.arrays["draft.limits"] - size)
            return (np.maximum(most, 1) + size).astype(np.int32)

        def forward(tokens: torch.Tensor, inputs: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
            (count, size), first = tokens.shape, self._place_first(rows, tokens.shape[1])
            batch = replace(
                self._make_batch(rows, tokens, sees),
                num_decodes=0,
                request_slots=rows.slots,
                seq_lens=(first + size).int(),
                query_lens=torch.full((count,), size, dtype=torch.int32, device=first.device),
                query_starts=torch.arange(0, count * size + 1, size, dtype=torch.int32, device=first.device),
                host=HostView(slots, np.full(count, size, np.int32), bound(first, size), self._passes.table.host_pages),
            )
            batch.extensions[TreeMask] = TreeMask(np.arange(count), batch.extensions[TreeMask].bits)
            return self._passes.model.forward(replace(batch, plan=self._passes.backend.plan(batch)), inputs.flatten(0, 1))

        return self._draft(rows, plan.num_tokens, forward)

    def draft_apart(self, rows: DraftRows, host_slots: np.ndarray) -> torch.Tensor:
        """The whole tree of each row, whose tokens are decodes of their own, as CUDA graphs need
        them: [rows, 2, num_nodes]. host_slots: int32 [rows], of the capture."""

        def forward(tokens: torch.Tensor, inputs: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
            batch, ones = self._make_batch(rows, tokens, sees), np.ones(tokens.numel(), np.int32)
            host = HostView(np.repeat(host_slots, tokens.shape[1]), ones, ones, self._passes.table.host_pages)
            planned = replace(batch, host=host, plan=self._passes.backend.capture_plan(replace(batch, host=host)))
            return self._passes.model.forward(bound_lengths(planned), inputs.flatten(0, 1))

        return self._draft(rows, self._shape.num_nodes, forward)

    def _draft(
        self, rows: DraftRows, num_nodes: int, forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """forward: a pass over the tokens that were extended so far: their ids, int64 [rows, n],
        the states that they follow, [rows, n, width], and which of them each attends to, bool
        [rows, n, n] -> the states of each row's last ones."""
        width, count = self._shape.width, len(rows.ids)
        states = rows.states.unsqueeze(1)
        values, ids = (each[:, 0] for each in self._passes.rank(rows, states, 0, width))
        number = torch.arange(width, device=ids.device).expand(count, -1)  # of each branch's last token, among all found
        found = [(values, ids, torch.full_like(ids, -1))]
        states, tokens, inputs = states.expand(-1, width, -1), ids[:, :0], rows.states[:, None][:, :0]
        sees = torch.ones(count, 0, 0, dtype=torch.bool, device=ids.device)
        parents = ids[:, :0]
        for depth in range(1, self._shape.depth):
            tokens, inputs = torch.cat((tokens, ids), 1), torch.cat((inputs, states), 1)
            sees = _add_branches(sees, parents, width)
            after = forward(tokens, inputs, sees).view(count, width, -1)
            more, next_ids = self._passes.rank(rows, after, depth, width)
            more, next_ids = (values.unsqueeze(2) + more).flatten(1), next_ids.flatten(1)
            found.append((more, next_ids, number.repeat_interleave(width, 1)))
            values, chosen = more.topk(width)
            number = chosen + width + (depth - 1) * width * width
            ids, branch = next_ids.gather(1, chosen), chosen // width
            states = after.gather(1, branch.unsqueeze(2).expand(-1, -1, after.shape[2]))
            parents = branch + (depth - 1) * width
        values, ids, parents = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        return _choose_nodes(values, ids, parents, num_nodes)

    def _place_first(self, rows: DraftRows, size: int) -> torch.Tensor:
        """The place of each row's first extended token, int64 [rows]. A row whose pages have no
        room for all reads wrong keys."""
        return torch.minimum(rows.positions, rows.limits - size).clamp_(min=1)

    def _make_batch(self, rows: DraftRows, tokens: torch.Tensor, sees: torch.Tensor) -> ForwardBatch:
        """The extended tokens as decodes, without a plan. The keys of a row whose pages have no
        room are stored in the reserved page."""
        table, (count, size), width = self._passes.table, tokens.shape, self._shape.width
        page_size, total = table.page_size, tokens.numel()
        own, every = torch.arange(size, device=tokens.device), torch.arange(total + 1, device=tokens.device)
        first = self._place_first(rows, size).unsqueeze(1)
        places = first + own
        pages = table.pages[rows.slots.unsqueeze(1), places // page_size].long()
        has_room = (rows.positions + size <= rows.limits).unsqueeze(1)
        hidden = (~sees).long() << (own.unsqueeze(1) - own).clamp_(min=0)
        bits = hidden.tril(-1).sum(2).bitwise_not().int().flatten()
        nothing = np.zeros(0, np.int32)
        return ForwardBatch(
            num_decodes=total,
            token_ids=tokens.flatten(),
            positions=(first + own // width).flatten(),
            kv_slots=torch.where(has_room, pages * page_size + places % page_size, 0).flatten(),
            request_slots=rows.slots.repeat_interleave(size),
            seq_lens=(places + 1).int().flatten(),
            query_lens=torch.ones(total, dtype=torch.int32, device=tokens.device),
            query_starts=every.int(),
            page_table=table.pages,
            logits_indices=rows.slots[:0],
            kv=self._passes.kv,
            host=HostView(nothing, nothing, nothing, table.host_pages),
            extensions={
                TreeMask: TreeMask(np.arange(total), bits),
                SelectedTokens: SelectedTokens(every[:-1].view(count, size)[:, size - width :].flatten()),
            },
        )


def _add_branches(sees: torch.Tensor, parents: torch.Tensor, width: int) -> torch.Tensor:
    """`sees` of the extended tokens and of the next ones, which follow `parents`, int64 [rows,
    width]; empty: they are the first."""
    count, size = sees.shape[:2]
    whole = torch.eye(size + width, dtype=torch.bool, device=sees.device).repeat(count, 1, 1)
    if size:
        whole[:, :size, :size] = sees
        whole[:, size:, :size] = sees.gather(1, parents.unsqueeze(2).expand(-1, -1, size))
    return whole


def _choose_nodes(values: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor, most: int) -> torch.Tensor:
    """The likeliest tokens and their parents as nodes. [rows, n] each; parents: -1: the root. A
    token is no likelier than its parent, which comes before it, so it is also sorted after it."""
    order = values.argsort(dim=1, descending=True, stable=True)
    nodes = torch.empty_like(order).scatter_(1, order, torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order))
    order = order[:, :most]
    before = parents.gather(1, order)
    return torch.stack((ids.gather(1, order), torch.where(before < 0, 0, nodes.gather(1, before.clamp(min=0)))), 1)

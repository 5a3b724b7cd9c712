"""`DraftRunner`: runs the model of a device drafter after each step of the target model.

The first pass has the step's own tokens and fills the drafter's cache; each further pass has one
token of each sampling row. Used by the model runner. Must not know a request or a drafter by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.core.interfaces.batch import ForwardBatch, HiddenStateTaps, HostView, SelectedTokens
from frame.core.sampling.sampler import draw_plain, row_max

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from frame.core.execution.input_batch import InputBatch
    from frame.core.interfaces.attention import AttentionBackend
    from frame.core.interfaces.device_drafter import DraftModel
    from frame.core.sampling.draft_plan import DraftingPlan


class DraftRunner:
    """Runs on the runner's stream and in inference mode. In a step: `add_taps`, `begin_step` after
    the target's forward pass, then `draft` once its tokens are drawn and verified."""

    def __init__(
        self, model: DraftModel, attention: AttentionBackend | None, inputs: InputBatch, agree: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """attention: the backend of the model's layers; None: that of the target. inputs: of the
        target. `agree`: tokens drawn on this rank -> those of rank 0."""
        self.model = model
        self._backend = attention or inputs.backend
        self._has_own_backend = attention is not None
        self._table = inputs.table
        self._agree = agree
        self._step: tuple[ForwardBatch, torch.Tensor] | None = None

    def add_taps(self, batch: ForwardBatch) -> None:
        """Ask the target for the hidden states that the model reads."""
        if self.model.tapped_layers:
            batch.extensions[HiddenStateTaps] = HiddenStateTaps(self.model.tapped_layers)

    def begin_step(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """Keep the batch of a step and what the target's forward pass returned for it, [tokens,
        hidden_size]."""
        self._step = batch, hidden

    def draft(
        self, token_ids: torch.Tensor, counts: torch.Tensor | None, plan: DraftingPlan, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """Fill the model's cache with the step, and draft. token_ids: int64 [samples], drawn.
        counts: int64 [sampling rows], the samples of each row that are output; None: 1 each.
        tensors: the plan's arrays. -> int64 [sampling rows, plan.num_tokens]; None without a token
        to draft."""
        if self._step is None:
            raise RuntimeError("a step drafts, but its forward pass is not known")
        (batch, hidden), self._step = self._step, None
        model, skipped = self.model, 0 if counts is None else counts - 1
        last = tensors["draft.first"] + skipped
        states = self._fill(batch, hidden, token_ids, last, tensors)
        ids, positions, drafts = token_ids.index_select(0, last), tensors["draft.positions"] + skipped, []
        for place in range(plan.num_tokens):
            if model.needs_passes and (place or not model.reads_next):
                offset = place - model.reads_next
                states = model.forward(self._make_pass(batch, plan, tensors, ids, positions + offset, offset), states)
            logits = model.compute_logits(states, place)
            ids = self._draw(logits, plan, tensors, place if counts is None else counts - 1 + place)
            drafts.append(ids)
        return torch.stack(drafts, 1) if drafts else None

    def _fill(
        self, batch: ForwardBatch, hidden: torch.Tensor, token_ids: torch.Tensor, last: torch.Tensor, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The first pass. last: int64 [sampling rows], the samples that are the rows' last output
        tokens. -> the states of the tokens that these are drawn from."""
        taps, samples, ids = batch.get(HiddenStateTaps), tensors["draft.samples"], batch.token_ids
        if self.model.reads_next:
            ids = tensors["draft.next_ids"].index_copy(0, samples, token_ids)
        selected = SelectedTokens(samples.index_select(0, last))
        states = self.model.read_states(hidden, {} if taps is None else taps.states)
        first = replace(batch, token_ids=ids, extensions={**batch.extensions, SelectedTokens: selected})
        return self.model.forward(replace(first, plan=self._backend.plan(first)) if self._has_own_backend else first, states)

    def _make_pass(
        self,
        batch: ForwardBatch,
        plan: DraftingPlan,
        tensors: Mapping[str, torch.Tensor],
        ids: torch.Tensor,
        positions: torch.Tensor,
        offset: int,
    ) -> ForwardBatch:
        """A batch of one token of each row, at these positions, int64 [rows]. A token beyond the
        pages of its row is stored in the reserved page. offset: from the last output token."""
        size, slots, limits, rows = self._table.page_size, tensors["draft.slots"], tensors["draft.limits"], len(ids)
        inside = torch.minimum(positions, limits - 1)
        pages = self._table.pages[slots, inside // size].long()
        kv_slots = torch.where(positions < limits, pages * size + inside % size, 0)
        seq_lens = (inside + 1).int()
        ones = np.ones(rows, np.int32)
        if seq_lens.device.type == "cpu":
            host_lens = seq_lens.numpy()
        else:  # upper bounds: the accepted counts are on the device
            most = plan.arrays["draft.positions"] + plan.width + offset
            host_lens = np.minimum(most, plan.arrays["draft.limits"]).astype(np.int32)
        made = ForwardBatch(
            num_decodes=rows,
            token_ids=ids,
            positions=inside,
            kv_slots=kv_slots,
            request_slots=slots,
            seq_lens=seq_lens,
            query_lens=torch.ones_like(seq_lens),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=ids.device),
            page_table=self._table.pages,
            logits_indices=slots[:0],
            kv=batch.kv,
            host=HostView(plan.arrays["draft.slots"].astype(np.int32), ones, host_lens, self._table.host_pages),
        )
        return replace(made, plan=self._backend.plan(made))

    def _draw(
        self, logits: torch.Tensor, plan: DraftingPlan, tensors: Mapping[str, torch.Tensor], column: torch.Tensor | int
    ) -> torch.Tensor:
        """The next token of each row, int64 [rows]; column: of its key."""
        if not plan.num_drawn:
            return self._agree(row_max(logits)[1])
        keys = tensors["draft.key"]
        chosen = keys[:, column].contiguous() if isinstance(column, int) else keys.gather(1, column.unsqueeze(1)).squeeze(1)
        return self._agree(draw_plain(logits, tensors["draft.temperature"], chosen)[0])

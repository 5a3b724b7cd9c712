"""`DeviceDrafts`: what the model runner calls of the object that runs a device drafter.

`frame.speculation.draft_runner` implements it; the builder of the runner hands it in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from frame.core.interfaces.rank_context import Track, track_silently

if TYPE_CHECKING:
    import torch

    from frame.core.execution.decode_graphs import DecodeGraphs
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.device_drafter import DraftModel
    from frame.core.sampling.step_plan import DraftingArrays, DraftingPlan


class DraftGraphs(Protocol):
    def capture(self, *, is_dry: bool = False, track: Track = track_silently) -> None:
        """See `DecodeGraphs.capture`."""
        ...


class DeviceDrafts(Protocol):
    """The passes of a device drafter. In a step: `add_hidden_outputs`, `begin_step` after the
    target's forward pass, then `draft` once its tokens are drawn and verified. In a decode graph
    `read_states` takes the place of `begin_step`."""

    model: DraftModel

    def add_hidden_outputs(self, batch: ForwardBatch) -> None:
        """Ask the target for the hidden states that the model reads."""
        ...

    def read_states(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        """What the first pass reads of a step, [tokens, width]. hidden: what the target's forward
        pass returned."""
        ...

    def begin_step(self, batch: ForwardBatch, hidden: torch.Tensor) -> None:
        """Keep the batch of a step and what the target's forward pass returned for it, [tokens,
        hidden_size]."""
        ...

    def make_graphs(self, graphs: DecodeGraphs) -> DraftGraphs:
        """The graphs of the passes after steps of these decode graphs; the caller captures them."""
        ...

    def draft(
        self,
        token_ids: torch.Tensor,
        counts: torch.Tensor | None,
        plan: DraftingPlan,
        tensors: DraftingArrays[torch.Tensor],
        order: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Fill the model's cache with the step, and draft. token_ids: int64 [samples], drawn.
        counts: int64 [sampling rows], the samples of each row that are output; None: 1 each.
        tensors: the plan's arrays. order: see `Verified`. -> see `StepResult.drafts`, int64; None
        without a token to draft, and where the drafter is out of use."""
        ...

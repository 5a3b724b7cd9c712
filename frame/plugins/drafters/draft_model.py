"""`draft_model`: drafts with a smaller checkpoint of the same vocabulary (Leviathan et al. 2023,
arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

Its keys and values are further layers in the target's pages. The first pass of a step reads the
step's own tokens; the passes after it read the drawn token and the drafted ones. Used by the model
runner. Must not know the target's layers or a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from frame.core.interfaces.attention_spec import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.device_drafter import DeviceDrafter, DraftModel, DraftModelContext
from frame.core.interfaces.model import LazyTensor


class DraftModelDrafter(DeviceDrafter):
    """The model is that of the model plugin for the draft checkpoint's architecture."""

    def build_model(self, context: DraftModelContext) -> SmallerModel:
        return SmallerModel(context, self.context.vocab_size)


class SmallerModel(DraftModel, nn.Module):
    """A whole model whose layers are numbered after the target's."""

    reads_next: ClassVar[bool] = False

    def __init__(self, context: DraftModelContext, vocab_size: int) -> None:
        super().__init__()
        if context.make_model is None:
            raise ValueError("this drafter needs a model plugin's model")
        self.model = context.make_model()
        self._vocab_size = vocab_size  # the target's; that of the draft model may have other padding
        self._largest_id = context.context.model_config.vocab_size - 1
        for module in self.model.modules():  # type: ignore[attr-defined]
            if isinstance(getattr(module, "spec", None), AttentionSpec):
                module.spec = replace(module.spec, layer=module.spec.layer + context.first_layer)

    def forward(self, batch: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
        if self._largest_id + 1 < self._vocab_size:
            batch = replace(batch, token_ids=batch.token_ids.clamp(max=self._largest_id))
        hidden: torch.Tensor = self.model.forward(batch)
        return hidden

    def compute_logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        return self.model.compute_logits(states)[:, : self._vocab_size]

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return {f"model.{name}" for name in self.model.load_weights(weights)}

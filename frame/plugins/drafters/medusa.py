"""`medusa`: drafts with Medusa heads (Cai et al. 2024, arXiv 2401.10774).

Head i predicts the token i + 2 places after a token from the target's hidden state there: residual
blocks, then a layer over the vocabulary. It has no cache and needs no further passes. Used by the
model runner. Must not know a request or the target's layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.core.interfaces.device_drafter import DeviceDrafter, DraftModel, DraftModelContext
from frame.core.interfaces.model import LazyTensor, ModelConfig
from frame.models.layers.embedding import Head
from frame.models.layers.linear import ReplicatedLinear
from frame.models.layers.parameter import load_parameters
from frame.plugins.drafters.draft_config import read_draft_config


class MedusaDrafter(DeviceDrafter):
    """Uses the heads in `speculative.draft_model_path`."""

    def read_config(self, target: ModelConfig) -> ModelConfig:
        config = read_draft_config(self.context.draft_model_path, "medusa")
        if (heads := int(config.get("medusa_num_heads", 0))) < self.context.num_steps:
            raise ConfigurationError(
                f"speculative.num_steps is {self.context.num_steps}, and the checkpoint has medusa_num_heads {heads};"
                " each head drafts one token: lower speculative.num_steps"
            )
        return replace(target, config=config)

    def build_model(self, context: DraftModelContext) -> MedusaHeads:
        return MedusaHeads(context, self.context.num_steps)


class MedusaHeads(DraftModel, nn.Module):
    """The names of the tensors are those of the published heads: `i.j.linear` and `i.n.weight` for
    head i, its blocks j and their number n."""

    needs_passes: ClassVar[bool] = False

    def __init__(self, context: DraftModelContext, num_heads: int) -> None:
        super().__init__()
        model_config = context.context.model_config
        build = context.context
        hidden, blocks = model_config.hidden_size, int(model_config.config.get("medusa_num_layers", 1))
        self.blocks = nn.ModuleList(
            nn.ModuleList(ReplicatedLinear(build, (f"{head}.{block}.linear",), hidden, (hidden,), bias=True) for block in range(blocks))
            for head in range(num_heads)
        )
        self.heads = nn.ModuleList(Head(build, f"{head}.{blocks}", model_config.vocab_size, hidden) for head in range(num_heads))

    def forward(self, batch: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
        selected = batch.get(SelectedTokens)
        return states if selected is None else states.index_select(0, selected.indices)

    def compute_logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        for block in self.blocks[place]:  # type: ignore[attr-defined]
            states = states + F.silu(block(states))
        logits: torch.Tensor = self.heads[place](states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        renamed = ((name.removeprefix("medusa_head."), tensor) for name, tensor in weights)
        num_heads = len(self.heads)
        return load_parameters(self, (each for each in renamed if int(each[0].split(".")[0]) < num_heads))

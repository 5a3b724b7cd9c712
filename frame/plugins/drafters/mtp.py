"""`mtp`: drafts with the multi-token-prediction module of the target's checkpoint (DeepSeek-V3,
arXiv 2412.19437, section 2.2).

The module predicts the token after next from the target's hidden state and the next token. For
further tokens it reads its own output instead of the target's hidden state. Embedding and head are
the target's. Used by the model runner. Must not know a request.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.core.interfaces.device_drafter import DeviceDrafter, DraftModel, DraftModelContext
from frame.core.interfaces.model import LazyTensor
from frame.models.layers.decoder import Decoder
from frame.models.layers.linear import ReplicatedLinear, add_up
from frame.models.layers.parameter import load_parameters


class MtpDrafter(DeviceDrafter):
    """Uses the first of the checkpoint's prediction layers for every token of a draft."""

    def get_folder(self) -> None:
        """None: the layer is in the target's checkpoint."""

    def build_model(self, context: DraftModelContext) -> PredictionLayer:
        return PredictionLayer(context)


class PredictionLayer(DraftModel, nn.Module):
    """enorm(embedding) and hnorm(hidden state), projected to one hidden state; layers of the
    target's kinds; a norm before the target's head."""

    def __init__(self, context: DraftModelContext) -> None:
        super().__init__()
        target, build, layer = context.target, context.context, context.first_layer
        if not isinstance(target, Decoder) or target.head is None:
            raise ConfigurationError(f"{type(target).__name__} has no layers that mtp can draft with; choose another speculative.algorithm")
        names, hidden = target.find_draft_names(), target.model_config.hidden_size
        self._prefix = names.prefix
        self.enorm, self.hnorm = target.build_norm(names.embedding_norm), target.build_norm(names.hidden_norm)
        self.eh_proj = ReplicatedLinear(build, (names.projection,), 2 * hidden, (hidden,))
        self.layers = nn.ModuleList(target.build_draft_layer(layer + place, name) for place, name in enumerate(names.layers))
        self.norm = target.build_norm(names.last_norm)
        self._target = (target,)  # in a tuple, so that its parameters are not those of this module
        self._rotary = target.get_rotary(layer)

    def forward(self, batch: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
        embedded = self._target[0].embed_inputs(batch)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(states)), -1))
        rows = self._rotary.prepare_rows(batch)
        selected, residual = batch.get(SelectedTokens), None
        *body, last = self.layers
        for layer in body:
            x, residual = layer(x, residual, rows, batch)
        x, residual = last(x, residual, rows, batch, None if selected is None else selected.indices)
        return self.norm.add_residual(x, residual)[0] if len(x) else add_up(x)

    def compute_logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        return self._target[0].compute_logits(states)

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        (target,) = self._target
        layers = (each for each in target.rename_weights(weights) if each[0].startswith(self._prefix))
        return load_parameters(self, target.map_weights(layers), (r".*\.(?:embed_tokens|shared_head\.head)\.", r".*rotary_emb\.inv_freq$"))

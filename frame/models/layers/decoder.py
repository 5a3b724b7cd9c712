"""The pre-norm decoder that most architectures share: embedding, layers of attention and feed-forward, final norm, head.

An architecture's file derives from `Decoder` and says what stands at the two places of a layer, and under which checkpoint names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from frame.core.interfaces.model import CausalLM
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import load_parameters
from frame.models.layers.rotary import Rotary, rope_parameters

if TYPE_CHECKING:
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import LazyTensor, ModelFacts


class DecoderLayer(nn.Module):
    """x, residual -> x, residual: the residual stream is added by the norm that follows, so that a kernel can join the two."""

    def __init__(self, input_norm: RMSNorm, attention: nn.Module, post_norm: RMSNorm, mlp: nn.Module) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.post_norm = post_norm
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self.input_norm.add(x, residual)
        x = self.attention(x, rows, batch)
        x, residual = self.post_norm.add(x, residual)
        return self.mlp(x), residual


class Decoder(CausalLM, nn.Module):
    """A causal decoder of `facts.num_layers` equal places. Subclasses give `attention` and `mlp` for each layer."""

    mlp_name: ClassVar[str] = "mlp"  # how the checkpoint calls the feed-forward part of a layer

    def __init__(self, facts: ModelFacts, context: BuildContext) -> None:
        super().__init__(facts, context)
        self.facts = facts
        self.context = context
        self.tied = bool(facts.config.get("tie_word_embeddings", False))
        self.rotary = self.build_rotary()
        self.embed_tokens = VocabEmbedding(context, "model.embed_tokens", facts.vocab_size, facts.hidden_size)
        self.layers = nn.ModuleList(self._layer(index, f"model.layers.{index}") for index in range(facts.num_layers))
        self.norm = self.build_norm("model.norm")
        self.head = Head(context, "lm_head", facts.vocab_size, facts.hidden_size, self.embed_tokens if self.tied else None)

    @abstractmethod
    def attention(self, layer: int, prefix: str) -> nn.Module:
        """The attention of a layer; `prefix` is "model.layers.N.self_attn"."""

    @abstractmethod
    def mlp(self, layer: int, prefix: str) -> nn.Module:
        """The feed-forward part of a layer; `prefix` is "model.layers.N." and `mlp_name`."""

    def build_rotary(self) -> Rotary:
        """The rotary embedding of all layers."""
        parameters = rope_parameters(self.facts)
        return Rotary(self.context, int(self.facts.head_dim * parameters["partial_rotary_factor"]), parameters)

    def build_norm(self, name: str) -> RMSNorm:
        """A norm over the hidden size."""
        return RMSNorm(self.context, name, self.facts.hidden_size, self.facts.config.get("rms_norm_eps", 1e-6))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        rows = self.rotary.rows(batch.positions)
        x, residual = self.embed_tokens(batch.token_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, rows, batch)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return load_parameters(self, weights, self.left_out())

    def left_out(self) -> tuple[str, ...]:
        """Patterns of checkpoint names that this model has no use for."""
        # A tied checkpoint may hold the head nevertheless; transformers takes the embedding then, and so do we.
        return (*self.ignored, r"lm_head\.weight$") if self.tied else self.ignored

    def _layer(self, index: int, prefix: str) -> DecoderLayer:
        return DecoderLayer(
            self.build_norm(f"{prefix}.input_layernorm"),
            self.attention(index, f"{prefix}.self_attn"),
            self.build_norm(f"{prefix}.post_attention_layernorm"),
            self.mlp(index, f"{prefix}.{self.mlp_name}"),
        )

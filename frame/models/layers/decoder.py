"""The pre-norm decoder that most architectures share: embedding, layers of attention and
feed-forward, final norm, head.

An architecture derives from `Decoder` and builds the attention and the feed-forward part of each
layer, with their checkpoint names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from frame.core.interfaces.batch import SelectedTokens
from frame.core.interfaces.model import CausalLM, is_classifier
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.models.layers.linear import HeadLinear
from frame.models.layers.moe import MoE
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import load_parameters
from frame.models.layers.rotary import Rotary, read_rope_parameters

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import LazyTensor, ModelContext


BODY = ("embed_tokens.", "layers.", "norm.")  # name prefixes in a checkpoint of the body alone


class DecoderLayer(nn.Module):
    """(x, residual) -> (x, residual). The next norm adds the residual stream, so that one kernel
    does both."""

    def __init__(self, input_norm: RMSNorm, attention: nn.Module, post_norm: RMSNorm, mlp: nn.Module) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.post_norm = post_norm
        self.mlp = mlp
        self._joins_norm = isinstance(mlp, MoE)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rows: torch.Tensor | None,
        batch: ForwardBatch,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`selected`: int64 [n], the tokens whose hidden states are returned; for the others only
        keys and values are computed. None: all tokens."""
        x, residual = self.input_norm.add_residual(x, residual)
        x = self.attention(x, rows, batch)
        if selected is not None:
            x, residual = x.index_select(0, selected), residual.index_select(0, selected)
            if not len(selected):
                return x, residual
        if self._joins_norm:
            joined: tuple[torch.Tensor, torch.Tensor] = self.mlp.forward_normed(self.post_norm, x, residual)  # type: ignore[operator]
            return joined
        x, residual = self.post_norm.add_residual(x, residual)
        return self.mlp(x), residual


class Decoder(CausalLM, nn.Module):
    """A causal decoder of `model_config.num_layers` layers. Subclasses implement `build_attention`
    and `build_mlp`."""

    supports_token_selection: ClassVar[bool] = True
    mlp_name: ClassVar[str] = "mlp"  # the checkpoint's name of a layer's feed-forward part

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        model_config = context.model_config
        self.model_config = model_config
        self.context = context
        self.tied = bool(model_config.config.get("tie_word_embeddings", False))
        self.rotary = self.build_rotary()
        self.embed_tokens = VocabEmbedding(context, "model.embed_tokens", model_config.vocab_size, model_config.hidden_size)
        self.layers = nn.ModuleList(self._layer(index, f"model.layers.{index}") for index in range(model_config.num_layers))
        self.norm = self.build_norm("model.norm")
        self.head = self._head()

    @abstractmethod
    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        """Build a layer's attention. `prefix` is "model.layers.N.self_attn"."""

    @abstractmethod
    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        """Build a layer's feed-forward part. `prefix` is "model.layers.N." + `mlp_name`."""

    def build_rotary(self) -> Rotary:
        """Build the rotary embedding that all layers share."""
        parameters = read_rope_parameters(self.model_config)
        return Rotary(self.context, int(self.model_config.head_dim * parameters["partial_rotary_factor"]), parameters)

    def build_norm(self, name: str) -> RMSNorm:
        """Build an RMSNorm over the hidden size. `name` is the checkpoint name."""
        return RMSNorm(self.context, name, self.model_config.hidden_size, self.model_config.config.get("rms_norm_eps", 1e-6))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        # None: each layer's kernel reads the table by position
        rows = None if self.rotary.fused and not torch.compiler.is_compiling() else self.rotary.gather_rows(batch.positions)
        x, residual = self.embed_tokens(batch.token_ids), None
        *body, last = self.layers
        for layer in body:
            x, residual = layer(x, residual, rows, batch)
        selected = batch.get(SelectedTokens)
        x, residual = last(x, residual, rows, batch, None if selected is None else selected.indices)
        return self.norm.add_residual(x, residual)[0] if len(x) else x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.head is None:
            raise TypeError(f"{type(self).__name__} was built for task embed and has no head")
        return self.head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return load_parameters(self, self._renamed(weights), self.get_ignored())

    def get_ignored(self) -> tuple[str, ...]:
        """Regular expressions of checkpoint names that the model does not load."""
        stored = self.context.weight_format
        unused = (*self.ignored_weights, *(stored.ignored_weights if stored is not None else ()))
        # A checkpoint with tied embeddings may still contain the head; like transformers, use the
        # embedding.
        return unused if self._needs_own_head() else (*unused, r"lm_head\.weight$", r"score\.")

    def _needs_own_head(self) -> bool:
        """Whether the checkpoint must contain a head over the vocabulary."""
        return not self.tied and isinstance(self.head, Head)

    def _head(self) -> nn.Module | None:
        model_config, context = self.model_config, self.context
        if context.task == "embed":
            return None
        if is_classifier(model_config.architecture):
            return HeadLinear(context, "score", model_config.hidden_size, model_config.num_labels, bias=False)
        return Head(context, "lm_head", model_config.vocab_size, model_config.hidden_size, self.embed_tokens if self.tied else None)

    @staticmethod
    def _renamed(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        """Add the prefix `model.` to the names of a checkpoint of the body alone, as embedding
        models are often saved."""
        for name, tensor in weights:
            yield f"model.{name}" if name.startswith(BODY) else name, tensor

    def _layer(self, index: int, prefix: str) -> DecoderLayer:
        return DecoderLayer(
            self.build_norm(f"{prefix}.input_layernorm"),
            self.build_attention(index, f"{prefix}.self_attn"),
            self.build_norm(f"{prefix}.post_attention_layernorm"),
            self.build_mlp(index, f"{prefix}.{self.mlp_name}"),
        )

"""The post-norm encoder of BERT and similar models: bidirectional attention, a two-layer
feed-forward part, absolute positions.

An architecture derives from `Encoder` and names its first position and its classification head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.errors import CheckpointError
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import TokenTypes
from frame.core.interfaces.model import Model
from frame.models.layers.embedding import VocabEmbedding
from frame.models.layers.linear import ColumnLinear, HeadLayout, HeadLinear, QKVLinear, RowLinear
from frame.models.layers.norm import LayerNorm
from frame.models.layers.parameter import ShardedParameter, load_parameters

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import LazyTensor, ModelConfig, ModelContext

Activation = Callable[[torch.Tensor], torch.Tensor]
# names of norm parameters in checkpoints that were converted from TensorFlow
OLD_NAMES = ((".gamma", ".weight"), (".beta", ".bias"))


def get_activation(name: str) -> Activation:
    """The feed-forward activation by its name in `config.json`. Raises CheckpointError for an
    unknown name."""
    if name in ("gelu_new", "gelu_pytorch_tanh"):
        return lambda x: F.gelu(x, approximate="tanh")
    known: dict[str, Activation] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "swish": F.silu}
    if name not in known:
        raise CheckpointError(f"hidden_act is {name!r}; the encoder supports {', '.join(known)} and gelu_new.")
    return known[name]


class LearnedEmbedding(nn.Module):
    """A small table that is replicated on every rank: positions, token types. ids int64 [tokens] ->
    [tokens, hidden]."""

    def __init__(self, context: BuildContext, name: str, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = ShardedParameter(torch.empty(rows, hidden_size, dtype=context.dtype))
        self.weight.bind(f"{name}.weight")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class EncoderLayer(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]: attention and feed-forward, each added to its input and
    then normed."""

    def __init__(self, model_config: ModelConfig, context: BuildContext, layer: int) -> None:
        super().__init__()
        if context.attention is None:
            raise TypeError("the build context of a model needs an attention backend")
        config, prefix, hidden = model_config.config, f"encoder.layer.{layer}", model_config.hidden_size
        inner, eps = config["intermediate_size"], config.get("layer_norm_eps", 1e-12)
        heads = HeadLayout(context, model_config.num_heads, model_config.num_heads, model_config.head_dim)
        self.backend = context.attention
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_heads,
            head_dim=model_config.head_dim,
            v_head_dim=model_config.head_dim,
            scale=model_config.head_dim**-0.5,
            causal=False,
        )
        names = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
        self.qkv_proj = QKVLinear(context, names, hidden, heads, bias=True)
        self.o_proj = RowLinear(context, f"{prefix}.attention.output.dense", hidden, hidden, bias=True)
        self.attention_norm = LayerNorm(context, f"{prefix}.attention.output.LayerNorm", hidden, eps)
        self.up_proj = ColumnLinear(context, (f"{prefix}.intermediate.dense",), hidden, (inner,), bias=True)
        self.down_proj = RowLinear(context, f"{prefix}.output.dense", inner, hidden, bias=True)
        self.output_norm = LayerNorm(context, f"{prefix}.output.LayerNorm", hidden, eps)
        self.activation = get_activation(config.get("hidden_act", "gelu"))

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (-1, self.spec.head_dim)).chunk(3, 1)
        attended = self.backend.run(self.spec, q, k, v, batch).flatten(1)
        x = self.attention_norm(x + self.o_proj(attended))
        return self.output_norm(x + self.down_proj(self.activation(self.up_proj(x))))


class EncoderHead(nn.Module):
    """Hidden states of the first tokens [n, hidden] -> [n, labels]: dense, tanh, projection."""

    def __init__(self, context: BuildContext, names: tuple[str, str], hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.dense = HeadLinear(context, names[0], hidden_size, hidden_size)
        self.projection = HeadLinear(context, names[1], hidden_size, num_labels)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.projection(torch.tanh(self.dense(hidden)))


class Encoder(Model, nn.Module):
    """An encoder for embeddings, or for classification with a head. Checkpoints may put `prefix`
    before the names of the body."""

    prefix: ClassVar[str]  # e.g. "bert.": precedes the body's names in checkpoints with a head
    head_names: ClassVar[tuple[str, str]]  # of the classification head's two layers
    # heads that the model does not load
    ignored_weights: ClassVar[tuple[str, ...]] = (r"embeddings\.position_ids$", r"(?:pooler|cls|lm_head|classifier)\.")

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        model_config = context.model_config
        config, hidden = model_config.config, model_config.hidden_size
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise CheckpointError(f"position_embedding_type is {config['position_embedding_type']!r}; the encoder supports absolute.")
        self.model_config = model_config
        self.context = context
        self.words = VocabEmbedding(context, "embeddings.word_embeddings", model_config.vocab_size, hidden)
        self.positions = LearnedEmbedding(context, "embeddings.position_embeddings", config["max_position_embeddings"], hidden)
        self.num_types = int(config.get("type_vocab_size", 2))
        self.types = LearnedEmbedding(context, "embeddings.token_type_embeddings", self.num_types, hidden)
        self.norm = LayerNorm(context, "embeddings.LayerNorm", hidden, config.get("layer_norm_eps", 1e-12))
        self.layers = nn.ModuleList(EncoderLayer(model_config, context, index) for index in range(model_config.num_layers))
        self.head = EncoderHead(context, self.head_names, hidden, model_config.num_labels) if context.task == "classify" else None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.words(batch.token_ids) + self._types(batch) + self.positions(self.find_positions(batch))
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, batch)
        return x

    def find_positions(self, batch: ForwardBatch) -> torch.Tensor:
        """The rows of the position embeddings, int64 [tokens]."""
        return batch.positions

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.head is None:
            return super().compute_logits(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return load_parameters(self, self.map_weights(weights), self.ignored_weights)

    def _types(self, batch: ForwardBatch) -> torch.Tensor:
        pairs = batch.get(TokenTypes) if self.num_types > 1 else None
        return self.types.weight[0] if pairs is None else self.types(pairs.types)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        """The checkpoint's tensors under the names that the layers bind."""
        for name, tensor in weights:
            name = name.removeprefix(self.prefix)
            for old, new in OLD_NAMES:
                if name.endswith(old):
                    name = name.removesuffix(old) + new
            yield name, tensor

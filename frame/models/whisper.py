"""Whisper (arXiv 2212.04356): an encoder of log-mel spectrograms, and a decoder that reads its
output by cross-attention.

The encoder runs in the step in which a sequence starts. Keys and values of its output are stored in
the cache group `write_once`, once for each decoder layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import AlignedText, EncoderInputs, SelectedTokens
from frame.core.interfaces.cache_groups import CacheTensor, LayerCache
from frame.core.interfaces.model import CausalLM
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.models.layers.encoder import LearnedEmbedding, get_activation
from frame.models.layers.linear import ColumnLinear, HeadLayout, QKVLinear, RowLinear
from frame.models.layers.norm import LayerNorm
from frame.models.layers.parameter import ShardedParameter, load_parameters
from frame.models.layers.weights.tied_head import load_tied

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch, KVCache
    from frame.core.interfaces.build import BuildContext
    from frame.core.interfaces.model import LazyTensor, ModelConfig, ModelContext

EPS = 1e-5  # of all norms
FLOAT16_MAX = torch.finfo(torch.float16).max - 1000  # the bound of the encoder's stream in float16, as in transformers


class Convolution(nn.Module):
    """A convolution of three frames with padding 1, replicated on every rank. [n, inputs, frames]
    -> [n, outputs, frames / stride]."""

    def __init__(self, context: BuildContext, name: str, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.weight = ShardedParameter(torch.empty(outputs, inputs, 3, dtype=context.dtype))
        self.weight.bind(f"{name}.weight")
        self.bias = ShardedParameter(torch.empty(outputs, dtype=context.dtype))
        self.bias.bind(f"{name}.bias")
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x, self.weight, self.bias, self.stride, padding=1)


class FeedForward(nn.Module):
    """[…, hidden] -> […, hidden]."""

    def __init__(self, context: BuildContext, model_config: ModelConfig, prefix: str, inner: int) -> None:
        super().__init__()
        hidden = model_config.hidden_size
        self.up = ColumnLinear(context, (f"{prefix}.fc1",), hidden, (inner,), bias=True)
        self.down = RowLinear(context, f"{prefix}.fc2", inner, hidden, bias=True)
        self.activation = get_activation(model_config.config.get("activation_function", "gelu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.activation(self.up(x)))


class AudioEncoderLayer(nn.Module):
    """[positions, hidden] -> [positions, hidden]: bidirectional attention and feed-forward, with
    norms before both."""

    def __init__(self, context: BuildContext, model_config: ModelConfig, layer: int) -> None:
        super().__init__()
        config, hidden, prefix = model_config.config, model_config.hidden_size, f"model.encoder.layers.{layer}"
        count = config["encoder_attention_heads"]
        self.heads = HeadLayout(context, count, count, hidden // count)
        names = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        self.qkv = QKVLinear(context, names, hidden, self.heads, bias=True)
        self.out = RowLinear(context, f"{prefix}.self_attn.out_proj", hidden, hidden, bias=True)
        self.attention_norm = LayerNorm(context, f"{prefix}.self_attn_layer_norm", hidden, EPS)
        self.mlp = FeedForward(context, model_config, prefix, config["encoder_ffn_dim"])
        self.mlp_norm = LayerNorm(context, f"{prefix}.final_layer_norm", hidden, EPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads.num_heads, self.heads.head_dim))
        q, k, v = qkv.permute(1, 2, 0, 3)[:, None]  # each [1, heads, positions, head_dim]
        attended = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        x = x + self.out(attended)
        x = x + self.mlp(self.mlp_norm(x))
        return x.clamp(-FLOAT16_MAX, FLOAT16_MAX) if x.dtype == torch.float16 else x


class AudioEncoder(nn.Module):
    """Log-mel features [mel bins, frames] -> [positions, hidden], one position for two frames."""

    def __init__(self, context: BuildContext, model_config: ModelConfig) -> None:
        super().__init__()
        config, hidden = model_config.config, model_config.hidden_size
        self.first = Convolution(context, "model.encoder.conv1", config["num_mel_bins"], hidden, 1)
        self.second = Convolution(context, "model.encoder.conv2", hidden, hidden, 2)
        self.positions = LearnedEmbedding(context, "model.encoder.embed_positions", model_config.encoder_length, hidden)
        self.layers = nn.ModuleList(AudioEncoderLayer(context, model_config, index) for index in range(config["encoder_layers"]))
        self.norm = LayerNorm(context, "model.encoder.layer_norm", hidden, EPS)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.second(F.gelu(self.first(features.to(self.first.weight.dtype)[None]))))
        x = x[0].transpose(0, 1) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class CrossAttention(nn.Module):
    """[tokens, hidden] -> [tokens, hidden], over the block of each token's sequence."""

    def __init__(self, context: BuildContext, model_config: ModelConfig, layer: int, prefix: str) -> None:
        super().__init__()
        assert context.attention is not None
        hidden = model_config.hidden_size
        self.backend = context.attention
        self.spec = _make_spec(context, model_config, model_config.num_layers + layer)
        tensor = CacheTensor((self.spec.num_heads, self.spec.head_dim))
        self.cache = LayerCache(self.spec.layer, "write_once", (tensor, tensor), length=model_config.encoder_length)
        self.q = ColumnLinear(context, (f"{prefix}.q_proj",), hidden, (hidden,), bias=True)
        self.kv = ColumnLinear(context, (f"{prefix}.k_proj", f"{prefix}.v_proj"), hidden, (hidden, hidden), bias=True)
        self.out = RowLinear(context, f"{prefix}.out_proj", hidden, hidden, bias=True)
        own = HeadLayout(context, model_config.num_heads, model_config.num_heads, model_config.head_dim).queries
        heads = [head - own.start for each, head in model_config.config.get("alignment_heads", ()) if each == layer]
        self.alignment_heads = [head for head in heads if 0 <= head < own.size]  # of this rank
        self.median_width = int(model_config.config.get("median_filter_width", 7))

    def store(self, encoded: torch.Tensor, kv_slots: torch.Tensor, cache: KVCache) -> None:
        """Write a block. encoded: [positions, hidden]; kv_slots: int64 [positions]."""
        k, v = self.kv(encoded).unflatten(-1, (2, self.spec.num_heads, self.spec.head_dim)).unbind(1)
        cache.store(self.spec, kv_slots, k, v)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.spec.num_heads, self.spec.head_dim))
        # the step has no keys of its own here: the backend reads those of the block
        return self.out(self.backend.run(self.spec, q, q, q, batch.view(self.spec.layer)).flatten(1))

    def align(self, x: torch.Tensor, encoded: torch.Tensor, text: AlignedText) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `forward`, of one sequence and without the block. -> the output, and the sum of the
        weights of this rank's alignment heads, float32 [tokens after the prompt, positions]. They
        are normalized over the tokens and smoothed over the positions, as in transformers."""
        shape = (self.spec.num_heads, self.spec.head_dim)
        q = self.q(x).unflatten(-1, shape).transpose(0, 1)
        k, v = self.kv(encoded).unflatten(-1, (2, *shape)).permute(1, 2, 0, 3)
        total = torch.zeros(len(x) - text.prompt_len, text.positions, device=x.device)
        for head in self.alignment_heads:  # one at a time: sorting takes many times the memory of a head's weights
            weights = (q[head].float() @ k[head].float().T * self.spec.scale).softmax(-1)[text.prompt_len :, : text.positions]
            weights = (weights - weights.mean(0)) / weights.std(0, unbiased=False)
            total += _filter_median(weights, self.median_width)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], scale=self.spec.scale)[0]
        return self.out(attended.transpose(0, 1).flatten(1)), total


class WhisperDecoderLayer(nn.Module):
    """[tokens, hidden] -> [tokens, hidden]: causal attention, cross-attention and feed-forward,
    with norms before each."""

    def __init__(self, context: BuildContext, model_config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert context.attention is not None
        hidden, prefix = model_config.hidden_size, f"model.decoder.layers.{layer}"
        heads = HeadLayout(context, model_config.num_heads, model_config.num_heads, model_config.head_dim)
        self.backend = context.attention
        self.spec = _make_spec(context, model_config, layer)
        self.qkv = QKVLinear(context, [f"{prefix}.self_attn.{name}_proj" for name in "qkv"], hidden, heads, bias=True)
        self.out = RowLinear(context, f"{prefix}.self_attn.out_proj", hidden, hidden, bias=True)
        self.attention_norm = LayerNorm(context, f"{prefix}.self_attn_layer_norm", hidden, EPS)
        self.cross = CrossAttention(context, model_config, layer, f"{prefix}.encoder_attn")
        self.cross_norm = LayerNorm(context, f"{prefix}.encoder_attn_layer_norm", hidden, EPS)
        self.mlp = FeedForward(context, model_config, prefix, model_config.config["decoder_ffn_dim"])
        self.mlp_norm = LayerNorm(context, f"{prefix}.final_layer_norm", hidden, EPS)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.spec.num_heads, self.spec.head_dim)).unbind(1)
        batch.store_kv(self.spec, k, v)
        x = x + self.out(self.backend.run(self.spec, q, k, v, batch).flatten(1))
        x = x + self.cross(self.cross_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))

    def align(self, x: torch.Tensor, encoded: torch.Tensor, text: AlignedText) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `forward`, of one whole sequence and without a cache; see `CrossAttention.align`."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.spec.num_heads, self.spec.head_dim))
        q, k, v = qkv.permute(1, 2, 0, 3)[:, None]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.spec.scale)[0]
        x = x + self.out(attended.transpose(0, 1).flatten(1))
        crossed, weights = self.cross.align(self.cross_norm(x), encoded, text)
        x = x + crossed
        return x + self.mlp(self.mlp_norm(x)), weights


class WhisperForConditionalGeneration(CausalLM, nn.Module):
    """Transcribes or translates speech. Every sequence has an encoder input, `EncoderInputs`."""

    supports_token_selection: ClassVar[bool] = True

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        model_config = context.model_config
        config, hidden = model_config.config, model_config.hidden_size
        if context.attention is None or context.attention.capabilities.stores_kv:
            raise ConfigurationError("cross-attention needs an attention backend that does not store keys itself; try --attention triton")
        self.model_config, self.context = model_config, context
        self.encoder = AudioEncoder(context, model_config)
        self.embed_tokens = VocabEmbedding(context, "model.decoder.embed_tokens", model_config.vocab_size, hidden)
        self.positions = LearnedEmbedding(context, "model.decoder.embed_positions", config["max_target_positions"], hidden)
        self.layers = nn.ModuleList(WhisperDecoderLayer(context, model_config, index) for index in range(model_config.num_layers))
        self.norm = LayerNorm(context, "model.decoder.layer_norm", hidden, EPS)
        tied = self.embed_tokens if config.get("tie_word_embeddings", True) else None
        self.head = Head(context, "proj_out", model_config.vocab_size, hidden, tied)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        encoder_inputs = batch.get(EncoderInputs)
        if encoder_inputs is not None:
            self._encode(encoder_inputs, batch.kv)
        # a request that ended at its limit may run in one more step
        positions = batch.positions.clamp(max=self.positions.weight.shape[0] - 1)
        x = self.embed_tokens(batch.token_ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, batch)
        selected = batch.get(SelectedTokens)
        return self.norm(x if selected is None else x.index_select(0, selected.indices))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        named = _add_biases(weights)
        if self.head.weights is not None:
            return load_parameters(self, named)
        return load_tied(self, self.head, self.embed_tokens, named)

    def _encode(self, encoder_inputs: EncoderInputs, kv: KVCache) -> None:
        """Write the blocks of the sequences that start. One sequence at a time: its positions fill
        the device, and activations stay small."""
        crossing = [layer.cross for layer in self.layers if isinstance(layer, WhisperDecoderLayer)]
        texts = encoder_inputs.aligned or (None,) * len(encoder_inputs.features)
        for features, kv_slots, text in zip(encoder_inputs.features, encoder_inputs.kv_slots, texts, strict=True):
            encoded = self.encoder(features)
            for cross in crossing:
                cross.store(encoded, kv_slots, kv)
            if text is not None:
                encoder_inputs.alignments[text.slot] = self._align(encoded, text)

    def _align(self, encoded: torch.Tensor, text: AlignedText) -> torch.Tensor:
        """How much each token of a text belongs to each position of the audio: the mean over the
        alignment heads, float32 [tokens, positions]."""
        pairs: list[list[int]] = self.model_config.config["alignment_heads"]
        x = self.embed_tokens(text.token_ids) + self.positions.weight[: len(text.token_ids)]
        total = torch.zeros(len(x) - text.prompt_len, text.positions, device=x.device)
        for layer, _ in zip(self.layers, range(max(layer for layer, _ in pairs) + 1), strict=False):
            assert isinstance(layer, WhisperDecoderLayer)
            x, weights = layer.align(x, encoded, text)
            total += weights
        if self.context.tp.size > 1:
            total = self.context.tp.all_reduce(total)
        return total / len(pairs)


def _make_spec(context: BuildContext, model_config: ModelConfig, layer: int) -> AttentionSpec:
    heads = HeadLayout(context, model_config.num_heads, model_config.num_heads, model_config.head_dim)
    dim = model_config.head_dim
    return AttentionSpec(layer, heads.num_heads, heads.num_kv_heads, dim, dim, scale=dim**-0.5)


def _filter_median(values: torch.Tensor, width: int) -> torch.Tensor:
    """The median of each value [n, positions] and its neighbours, `width` (odd) in all."""
    pad = width // 2
    if values.shape[-1] <= pad:
        return values
    padded = F.pad(values[None], (pad, pad), mode="reflect")[0]
    return padded.unfold(-1, width, 1).sort()[0][..., pad]


def _add_biases(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
    """The tensors, and for each key projection, which has none, a bias of zeros."""
    for name, tensor in weights:
        if name.endswith(".k_proj.weight"):
            bias: Any = torch.zeros(tensor.shape[0])
            yield f"{name.removesuffix('weight')}bias", bias
        if not name.endswith(".k_proj.bias"):  # dummy weights have one
            yield name, tensor

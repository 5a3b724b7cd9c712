"""The decoder that most architectures share: embedding, layers of attention and feed-forward, final
norm, head.

An architecture derives from `Decoder` and overrides what differs: options of the attention, the
feed-forward part, checkpoint names. The layers are pre-norm (`DecoderLayer`); `NormedOutputLayer`
and `ParallelLayer` are the other forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from frame.core.interfaces.batch import HiddenStateOutputs, SelectedTokens, StageInput
from frame.core.interfaces.media import MediaRows
from frame.core.interfaces.model import CausalLM, is_classifier
from frame.models.layers.attention import Attention, AttentionOptions
from frame.models.layers.embedding import Head, VocabEmbedding
from frame.models.layers.linear import HeadLinear, RankSum, add_up, defer_sum
from frame.models.layers.mlp import GatedMLP, read_activation
from frame.models.layers.moe import MoE
from frame.models.layers.norm import LayerNorm, RMSNorm
from frame.models.layers.parameter import load_parameters
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.weights.tied_head import load_tied

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.adapter_layers import AdapterLayers
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import LazyTensor, ModelConfig, ModelContext


BODY = ("embed_tokens.", "layers.", "norm.")  # name prefixes in a checkpoint of the body alone
# of the language model in a checkpoint that also has encoders, as transformers 5 and 4 write it
WRAPPERS = {"model.language_model.": "model.", "language_model.model.": "model.", "language_model.lm_head.": "lm_head."}
_ENCODERS = (
    r"(?:model\.)?(?:vision_tower|vision_model|visual|merger|multi_modal_projector|mm_projector|embed_vision|audio_tower|embed_audio)\."
)
_FREQUENCIES = r".*rotary_emb\.inv_freq$"  # transformers stored them until version 4.31

Norm = RMSNorm | LayerNorm


class Layer(nn.Module):
    """(x, residual) -> (x, residual): attention of all tokens, then the feed-forward of those whose
    hidden states are returned, or one of the two, with a norm before it (Nemotron-H). The next norm
    adds the residual stream, so that one kernel does both, and the sum over the ranks where it
    can."""

    attention: Any  # a module, or None
    mlp: Any
    adapters: AdapterLayers | None = None  # of the last layer, to which the selection is told

    def __init__(self, input_norm: Norm | None, attention: nn.Module | None, mlp: nn.Module | None) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.mlp = mlp

    def forward(
        self,
        x: torch.Tensor | RankSum,
        residual: torch.Tensor | None,
        rows: torch.Tensor | None,
        batch: ForwardBatch,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | RankSum, torch.Tensor]:
        """`selected`: int64 [n], the tokens whose hidden states are returned; for the others only
        keys and values are computed. None: all tokens."""
        x, residual = _add_residual(self.input_norm, x, residual)
        x = self.mix_tokens(x, rows, batch)
        if selected is not None:
            x, residual = x.index_select(0, selected), residual.index_select(0, selected)
            if not len(selected):
                return x, residual
            if self.adapters is not None:
                with self.adapters.select_rows(selected):
                    return self.feed_forward(x, residual)
        return self.feed_forward(x, residual)

    def mix_tokens(self, x: torch.Tensor, rows: torch.Tensor | None, batch: ForwardBatch) -> torch.Tensor | RankSum:
        """The result of attention, or of what the layer has in its place."""
        return x if self.attention is None else self.attention(x, rows, batch)

    def feed_forward(self, x: torch.Tensor | RankSum, residual: torch.Tensor) -> tuple[torch.Tensor | RankSum, torch.Tensor]:
        """`x`: the result of `mix_tokens`; `residual`: the stream before it."""
        return x if self.mlp is None or not len(x) else self.mlp(x), residual


class DecoderLayer(Layer):
    """A norm before attention and one before the feed-forward."""

    def __init__(self, input_norm: Norm, attention: nn.Module, post_norm: Norm, mlp: nn.Module) -> None:
        super().__init__(input_norm, attention, mlp)
        self.post_norm = post_norm
        self._joins_norm = isinstance(mlp, MoE)
        for summed in (attention, mlp):
            defer_sum(summed)

    def feed_forward(self, x: torch.Tensor | RankSum, residual: torch.Tensor) -> tuple[torch.Tensor | RankSum, torch.Tensor]:
        if self._joins_norm:
            joined: tuple[torch.Tensor | RankSum, torch.Tensor] = self.mlp.forward_normed(self.post_norm, x, residual)
            return joined
        x, residual = self.post_norm.add_residual(x, residual)
        return self.mlp(x), residual


class NormedOutputLayer(Layer):
    """A layer that also norms the outputs of attention and feed-forward (Gemma 2 and later).
    `input_norm` and `inner_norm` None: it norms these outputs alone (OLMo 2)."""

    def __init__(
        self, attention: nn.Module, mlp: nn.Module, output_norms: tuple[Norm, Norm], input_norms: tuple[Norm, Norm] | None
    ) -> None:
        super().__init__(None if input_norms is None else input_norms[0], attention, mlp)
        self.inner_norm: Norm | None = None if input_norms is None else input_norms[1]
        self.attention_norm, self.mlp_norm = output_norms

    def feed_forward(self, x: torch.Tensor | RankSum, residual: torch.Tensor) -> tuple[torch.Tensor | RankSum, torch.Tensor]:
        x, residual = _add_residual(self.inner_norm, self.attention_norm(x), residual)
        return self.mlp_norm(self.mlp(x)), residual


class ParallelLayer(nn.Module):
    """A layer whose attention and feed-forward have the same input (Cohere)."""

    adapters: AdapterLayers | None = None  # see `Layer`

    def __init__(self, input_norm: Norm, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_norm = input_norm
        self.attention = attention
        self.mlp = mlp

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rows: torch.Tensor | None,
        batch: ForwardBatch,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Layer.forward`."""
        x, residual = self.input_norm.add_residual(x, residual)
        attended = self.attention(x, rows, batch)
        if selected is not None:
            attended, x, residual = (part.index_select(0, selected) for part in (attended, x, residual))
            if not len(selected):
                return attended, residual
            if self.adapters is not None:
                with self.adapters.select_rows(selected):
                    return attended + self.mlp(x), residual
        return attended + self.mlp(x), residual


def _add_residual(norm: Norm | None, x: torch.Tensor | RankSum, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual), or the sum twice without a norm."""
    if norm is not None:
        return norm.add_residual(x, residual)
    x = add_up(x)
    stream = x if residual is None else x + residual
    return stream, stream


def _add_media(
    media: MediaRows | None, layer: int, residual: torch.Tensor | None, selected: SelectedTokens | None = None
) -> torch.Tensor | None:
    """The residual stream after a layer, with further columns of media added to it (DeepStack).
    None: the layer has none, and the model no such columns."""
    if media is None or residual is None or layer >= media.count_layers(hidden_size := residual.shape[1]):
        return residual
    addition = media.get_addition(layer, hidden_size)
    return residual + (addition if selected is None else addition.index_select(0, selected.indices))


@dataclass(frozen=True, slots=True)
class DraftNames:
    """Checkpoint names of a multi-token-prediction module: of its tensors' prefix, the norms of the
    embedding and of the hidden state, the projection of both, the last norm, and its layers."""

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    last_norm: str
    layers: tuple[str, ...]


class Decoder(CausalLM, nn.Module):
    """A causal decoder of `model_config.num_layers` layers, by default those of Llama.

    Class attributes that an architecture may set: `ties_by_default`, whether the head has the
    weights of the embedding where config.json has no `tie_word_embeddings`; `mlp_name`, the
    checkpoint's name of a layer's feed-forward part; `bias_keys`, the fields of config.json that
    add biases.
    """

    supports_token_selection: ClassVar[bool] = True
    ties_by_default: ClassVar[bool] = False  # without `tie_word_embeddings` in the config
    mlp_name: ClassVar[str] = "mlp"  # the checkpoint's name of a layer's feed-forward part
    bias_keys: ClassVar[tuple[str, ...]] = ("attention_bias",)  # those that the architecture reads; others are in many configs

    def __init__(self, context: ModelContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        model_config = context.model_config
        self.model_config = model_config
        self.context = context
        self.tied = bool(model_config.config.get("tie_word_embeddings", self.ties_by_default))
        self.rotary = self.build_rotary()
        stage = context.pipeline
        layer_indices = range(model_config.num_layers) if stage is None else stage.layers
        self.first_layer = layer_indices.start
        self.is_first, self.is_last = stage is None or stage.is_first, stage is None or stage.is_last
        if self.is_first or (self.is_last and self.tied):
            self.embed_tokens = VocabEmbedding(context, "model.embed_tokens", model_config.vocab_size, model_config.hidden_size)
        self.layers = nn.ModuleList(self.build_layer(index, f"model.layers.{index}") for index in layer_indices)
        self.rotaries = tuple(self.get_rotary(index) for index in layer_indices)
        self.norm = self.build_norm("model.norm") if self.is_last else None
        self.head = self._head() if self.is_last else None
        if context.adapters is not None:
            self.layers[-1].adapters = context.adapters  # type: ignore[assignment]
            self.context = replace(context, adapters=None)  # of layers that a drafter builds
        self.foreign_weights = tuple(self._find_foreign_weights(layer_indices))

    def get_attention_options(self, layer: int) -> AttentionOptions:
        """The options of a layer's attention; by default with biases by `attention_bias`."""
        bias = self.has_bias("attention_bias")
        return AttentionOptions(qkv_bias=bias, out_bias=bias)

    def has_bias(self, key: str) -> bool:
        """Whether the config asks for the biases of `key`, and the architecture has them."""
        return key in self.bias_keys and bool(self.model_config.config.get(key, False))

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        """Build a layer's attention; by default multi-head attention with `get_attention_options`.
        `prefix` is "model.layers.N.self_attn"."""
        options = self.get_attention_options(layer)
        return Attention(self.context, self.model_config, layer, prefix, self.get_rotary(layer), options)

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        """Build a layer's feed-forward part; by default a gated one, dense, of `intermediate_size`.
        `prefix` is "model.layers.N." + `mlp_name`."""
        config = self.model_config.config
        bias, activation = self.has_bias("mlp_bias"), read_activation(config)
        return GatedMLP(self.context, prefix, self.model_config.hidden_size, config["intermediate_size"], bias, activation)

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        """Build a layer. `prefix` is "model.layers.N"."""
        return DecoderLayer(
            self.build_norm(f"{prefix}.input_layernorm"),
            self.build_attention(index, f"{prefix}.self_attn"),
            self.build_norm(f"{prefix}.post_attention_layernorm"),
            self.build_mlp(index, f"{prefix}.{self.mlp_name}"),
        )

    def find_draft_names(self) -> DraftNames:
        """The names of the checkpoint's first multi-token-prediction module; by default those of
        DeepSeek-V3, whose module is the layer after the last one."""
        prefix = f"model.layers.{self.model_config.num_layers}"
        return DraftNames(f"{prefix}.", f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.eh_proj", f"{prefix}.shared_head.norm", (prefix,))

    def build_draft_layer(self, index: int, prefix: str) -> nn.Module:
        """Build a layer of that module. `index`: of its cache; `prefix`: of `DraftNames.layers`."""
        return self.build_layer(index, prefix)

    def build_rotary(self) -> Rotary:
        """Build the rotary embedding that all layers share; by default of whole heads, whatever
        `partial_rotary_factor` says."""
        return Rotary(self.context, self.model_config.head_dim, read_rope_parameters(self.model_config))

    def get_rotary(self, layer: int) -> Rotary:
        """The rotary embedding of a layer, for models that have two."""
        return self.rotary

    def build_norm(self, name: str) -> Norm:
        """Build the norm over the hidden size. `name` is the checkpoint name."""
        return RMSNorm(self.context, name, self.model_config.hidden_size, self.model_config.config.get("rms_norm_eps", 1e-6))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """As `Model.forward`; on all stages of a pipeline but the last, the residual stream after
        the stage's layers."""
        rows = {rotary: rotary.prepare_rows(batch) for rotary in dict.fromkeys(self.rotaries)}
        stage_input, media = batch.get(StageInput), batch.get(MediaRows)
        x: torch.Tensor | RankSum = self.embed_inputs(batch) if stage_input is None else stage_input.hidden
        residual: torch.Tensor | None = None
        *body, last = zip(self.layers, self.rotaries, strict=True)
        hidden_outputs, first = batch.get(HiddenStateOutputs), self.first_layer
        for index, (layer, rotary) in enumerate(body, first):
            x = self._add_hidden_output(hidden_outputs, index, x, residual)
            x, residual = layer(x, residual, rows[rotary], batch)
            residual = _add_media(media, index, residual)
        selected = batch.get(SelectedTokens) if self.is_last else None
        x = self._add_hidden_output(hidden_outputs, first + len(body), x, residual)
        x, residual = last[0](x, residual, rows[last[1]], batch, None if selected is None else selected.indices)
        residual = _add_media(media, first + len(body), residual, selected)
        if self.norm is None:
            x = add_up(x)
            assert residual is not None, "stages have layers with a residual stream"
            return (x if x.dim() == 2 else x.sum(1)) + residual
        hidden = self.norm.add_residual(x, residual)[0] if len(x) else add_up(x)
        if hidden_outputs is not None:
            hidden_outputs.add_state(first + len(self.layers), hidden)
        return hidden

    @staticmethod
    def _add_hidden_output(
        hidden_outputs: HiddenStateOutputs | None, layer: int, x: torch.Tensor | RankSum, residual: torch.Tensor | None
    ) -> torch.Tensor | RankSum:
        """Add the stream before the layer, if it is tapped. -> `x`, summed over the ranks if it was
        added."""
        if hidden_outputs is None or layer not in hidden_outputs.layers:
            return x
        x = add_up(x)
        hidden_outputs.add_state(layer, x, residual)
        return x

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Of text: int64 [tokens] -> [tokens, hidden]."""
        embedded: torch.Tensor = self.embed_tokens(token_ids)
        return embedded

    def embed_inputs(self, batch: ForwardBatch) -> torch.Tensor:
        """The input of the first layer, [tokens, hidden]: the embeddings of text, and the rows of
        media in place of placeholders."""
        embedded, media = self.embed(batch.token_ids), batch.get(MediaRows)
        return embedded if media is None else media.place(embedded)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.head is None:
            raise TypeError(f"{type(self).__name__} was built for task embed, or a stage before the last, and has no head")
        return self.head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        named, ignored = self.map_weights(self.rename_weights(weights)), self.get_ignored()
        head = self.head if isinstance(self.head, Head) else None
        if not (self.tied and hasattr(self, "embed_tokens")) or (self.is_last and head is None):
            return load_parameters(self, named, ignored)
        loaded = load_tied(self, head, self.embed_tokens, named, ignored)
        if not self.is_first and head is not None and head.weights is not None:
            del self.embed_tokens  # only the head read it
            loaded.discard("embed_tokens.weight")
        return loaded

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterable[tuple[str, LazyTensor]]:
        """The checkpoint's tensors under the names that the layers bind, for checkpoints that store
        several of them as one."""
        return weights

    def get_ignored(self) -> tuple[str, ...]:
        """Regular expressions of checkpoint names that the model does not load."""
        stored = self.context.weight_format
        unused = (_FREQUENCIES, *self.ignored_weights, *(stored.ignored_weights if stored is not None else ()))
        if self.model_config.architecture.endswith("ForConditionalGeneration"):
            unused = (*unused, _ENCODERS)
        return unused if isinstance(self.head, Head) else (*unused, r"lm_head\.", r"score\.")

    def _find_foreign_weights(self, layer_indices: range) -> Iterator[str]:
        """Regular expressions of the weights that other stages load; see `load_parameters`."""
        others = [str(layer) for layer in range(self.model_config.num_layers) if layer not in layer_indices]
        if others:
            yield rf"model\.layers\.(?:{'|'.join(others)})\."
        if not hasattr(self, "embed_tokens"):
            yield r"model\.embed_tokens\."
        if not self.is_last:
            yield r"(?:model\.norm|lm_head)\."

    def _head(self) -> nn.Module | None:
        model_config, context = self.model_config, self.context
        if context.task == "embed":
            return None
        if is_classifier(model_config.architecture):
            return HeadLinear(context, "score", model_config.hidden_size, model_config.num_labels, bias=False)
        return Head(context, "lm_head", model_config.vocab_size, model_config.hidden_size, self.embed_tokens if self.tied else None)

    @staticmethod
    def rename_weights(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        """Add the prefix `model.` to the names of a checkpoint of the body alone, as embedding
        models are often saved, and remove that of a language model with image or audio encoders."""
        for stored, tensor in weights:
            name = stored.removeprefix("thinker.")  # beside a model that speaks
            for prefix, replacement in WRAPPERS.items():
                if name.startswith(prefix):
                    name = replacement + name.removeprefix(prefix)
                    break
            yield f"model.{name}" if name.startswith(BODY) else name, tensor


def match_draft_layers(model_config: ModelConfig) -> str:
    """A regular expression of the layers after the last one: multi-token-prediction modules, which
    only a drafter uses."""
    layers = "|".join(str(model_config.num_layers + index) for index in range(max(model_config.num_draft_layers, 1)))
    return rf"model\.layers\.(?:{layers})\."

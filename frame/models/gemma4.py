"""Gemma 4: two head sizes, keys and values that later layers share, embeddings for each
layer, and experts beside the feed-forward part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.media import MediaRows
from frame.models.gemma3 import Gemma3ForCausalLM
from frame.models.layers.attention import Attention, AttentionOptions, SharedKVAttention
from frame.models.layers.embedding import VocabEmbedding
from frame.models.layers.linear import ReplicatedLinear
from frame.models.layers.mlp import GatedMLP, choose_gelu, read_activation
from frame.models.layers.moe import ExpertSizes, MoE
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import ShardedParameter
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.router import RoutingRule
from frame.models.layers.weights.expert_activation import gelu_mul
from frame.models.layers.weights.fused_tensors import split_stacked_experts

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import AdapterLayers
    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.model import LazyTensor, ModelConfig, ModelContext

_PATTERN = 6  # every sixth layer has full attention, unless the config lists the layers
_LAYER_INPUT = 256  # width of the embeddings for each layer, unless the config says otherwise
_ROPE: dict[str, dict[str, Any]] = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
_RENAMED = ((".router.proj.", ".gate."), (".router.per_expert_scale", ".gate.per_expert_scale"), (".router.scale", ".router_norm.weight"))
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    """The last `num_kv_shared_layers` layers have no keys of their own: they read those of the last
    layer of their kind before them."""

    def __init__(self, context: ModelContext, options: Any = None) -> None:
        config = context.model_config.config
        if config.get("use_bidirectional_attention") == "all":
            raise ConfigurationError("use_bidirectional_attention 'all' (Gemma 4 as an encoder) is not implemented here.")
        count = context.model_config.num_layers
        kinds = config.get("layer_types") or [_SLIDING if (layer + 1) % _PATTERN else _FULL for layer in range(count)]
        self.kinds = [*kinds[:-1], _FULL]
        self.first_shared = count - int(config.get("num_kv_shared_layers") or 0)
        self.sources: dict[str, Attention] = {}  # by kind; the last layer built that stores keys
        self.width = int(config.get("hidden_size_per_layer_input", _LAYER_INPUT) or 0)
        super().__init__(context, options)

    def build_norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.context, name, self.model_config.hidden_size, self._eps)

    def build_rotary(self) -> Rotary:
        # called before the layers are built, which refer to the layer inputs
        self.layer_inputs = LayerInputs(self.context, self.model_config, self.width, self._eps) if self.width else None
        self.sliding_rotary = self._build_kind(_SLIDING)
        return self._build_kind(_FULL)

    def get_rotary(self, layer: int) -> Rotary:
        return self.rotary if self.kinds[layer] == _FULL or self.sliding_rotary is None else self.sliding_rotary

    def build_layer(self, index: int, prefix: str) -> nn.Module:
        return Gemma4Layer(self, index, prefix)

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        kind, config = self.kinds[layer], self.model_config.config
        sizes = find_layer_sizes(self.model_config, layer, kind)
        if layer >= self.first_shared:
            if kind not in self.sources:
                raise ConfigurationError(f"num_kv_shared_layers leaves no layer of kind {kind} that stores keys: check config.json.")
            return SharedKVAttention(self.context, sizes, prefix, self.get_rotary(layer), self.sources[kind], self._eps)
        bias = bool(config.get("attention_bias", False))
        window = config.get("sliding_window") if kind == _SLIDING else None
        options = AttentionOptions(qkv_bias=bias, out_bias=bias, qk_norm=self._eps, value_norm=self._eps, sliding_window=window, scale=1.0)
        built = Attention(self.context, sizes, layer, prefix, self.get_rotary(layer), options)
        built.spec = replace(built.spec, spans=kind == _SLIDING)  # images attend to themselves in both directions in these layers alone
        self.sources[kind] = built
        return built

    def build_mlp(self, layer: int, prefix: str) -> nn.Module:
        config = self.model_config.config
        wide = 2 if config.get("use_double_wide_mlp") and layer >= self.first_shared else 1
        activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
        return GatedMLP(self.context, prefix, self.model_config.hidden_size, wide * config["intermediate_size"], activation=activation)

    def embed_inputs(self, batch: ForwardBatch) -> torch.Tensor:
        embedded, token_ids, media = super().embed_inputs(batch), batch.token_ids, batch.get(MediaRows)
        if self.layer_inputs is not None:
            if media is not None:  # a placeholder has the token of padding there, and its own row
                token_ids = token_ids.where(media.rows.lt(0), int(self.model_config.config.get("pad_token_id") or 0))
            self.layer_inputs.compute(token_ids, embedded)
        return embedded

    def get_ignored(self) -> tuple[str, ...]:
        shared = "|".join(str(layer) for layer in range(self.first_shared, self.model_config.num_layers))
        unused = (rf"model\.layers\.(?:{shared})\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.",) if shared else ()
        return (*super().get_ignored(), *unused)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        return split_stacked_experts(self._rename_router(super().map_weights(weights)))

    def _rename_router(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
        """The router's tensors under the names of its layers; keys also as values where a layer has
        one projection for both."""
        is_one = bool(self.model_config.config.get("attention_k_eq_v"))
        for name, tensor in weights:
            for stored, sizes_of_layer in _RENAMED:
                name = name.replace(stored, sizes_of_layer)
            yield name, tensor
            head, built, tail = name.partition(".self_attn.k_proj.")
            if built and is_one and head.startswith("model.") and self.kinds[int(head.rpartition(".")[2])] == _FULL:
                yield f"{head}.self_attn.v_proj.{tail}", tensor

    @property
    def _eps(self) -> float:
        return float(self.model_config.config.get("rms_norm_eps", 1e-6))

    def _build_kind(self, kind: str) -> Rotary:
        """The rotary embedding of the layers of a kind, over whole heads."""
        stored = (self.model_config.config.get("rope_parameters") or _ROPE).get(kind) or _ROPE[kind]
        parameters = read_rope_parameters(replace(self.model_config, config={**self.model_config.config, "rope_parameters": stored}))
        layer = self.kinds.index(kind) if kind in self.kinds else 0
        return Rotary(self.context, find_layer_sizes(self.model_config, layer, kind).head_dim, parameters)


class LayerInputs(nn.Module):
    """The embeddings for each layer: a table of the tokens', and a projection of the model's own
    embedding. `compute` keeps those of the step for the layers."""

    def __init__(self, context: ModelContext, model_config: ModelConfig, width: int, eps: float) -> None:
        super().__init__()
        layers, hidden = model_config.num_layers, model_config.hidden_size
        self.shape = (layers, width)
        rows = int(model_config.config.get("vocab_size_per_layer_input") or model_config.vocab_size)
        self.table = VocabEmbedding(context, "model.embed_tokens_per_layer", rows, layers * width)
        self.projection = ReplicatedLinear(context, ("model.per_layer_model_projection",), hidden, (layers * width,))
        self.norm = RMSNorm(context, "model.per_layer_projection_norm", width, eps)
        self.scale = hidden**-0.5
        self.values: torch.Tensor | None = None

    def compute(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> None:
        """Keep [tokens, layers, width] as `values`."""
        tokens = self.table(token_ids)
        tokens = tokens * torch.tensor(self.shape[1] ** 0.5, dtype=tokens.dtype).item()  # rounded, as in training
        projected = self.norm((self.projection(embedded) * self.scale).view(-1, self.shape[1]))
        self.values = ((projected.reshape(tokens.shape) + tokens) * 2.0**-0.5).unflatten(1, self.shape)


class Gemma4Layer(nn.Module):
    """Attention and feed-forward with norms before and after, experts that read the same stream as
    the feed-forward part, the layer's embedding, and one factor of the result."""

    adapters: AdapterLayers | None = None  # see `Layer`

    def __init__(self, model: Gemma4ForCausalLM, index: int, prefix: str) -> None:
        super().__init__()
        context, hidden, config = model.context, model.model_config.hidden_size, model.model_config.config
        self.index = index
        self.gelu = choose_gelu(context)
        self.input_norm = model.build_norm(f"{prefix}.input_layernorm")
        self.attention = model.build_attention(index, f"{prefix}.self_attn")
        self.attention_norm = model.build_norm(f"{prefix}.post_attention_layernorm")
        self.inner_norm = model.build_norm(f"{prefix}.pre_feedforward_layernorm")
        self.mlp = model.build_mlp(index, f"{prefix}.mlp")
        self.mlp_norm = model.build_norm(f"{prefix}.post_feedforward_layernorm")
        self.experts = Gemma4Experts(model, prefix) if config.get("enable_moe_block") else None
        self.factor = ShardedParameter(torch.empty(1, dtype=context.dtype))
        self.factor.bind(f"{prefix}.layer_scalar")
        self.inputs: tuple[LayerInputs, ...] = ()  # a tuple, so that torch does not register it again
        if model.layer_inputs is not None:
            self.inputs = (model.layer_inputs,)
            self.input_gate = ReplicatedLinear(context, (f"{prefix}.per_layer_input_gate",), hidden, (model.width,))
            self.input_projection = ReplicatedLinear(context, (f"{prefix}.per_layer_projection",), model.width, (hidden,))
            self.projection_norm = model.build_norm(f"{prefix}.post_per_layer_input_norm")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        rows: torch.Tensor | None,
        batch: ForwardBatch,
        selected: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `Layer.forward`. The second result is None: the first is the whole stream."""
        x, stream = self.input_norm.add_residual(x, residual)
        x = self.attention(x, rows, batch)
        layer_input = self.inputs[0].values[:, self.index] if self.inputs and self.inputs[0].values is not None else None
        if selected is not None:
            x, stream = x.index_select(0, selected), stream.index_select(0, selected)
            layer_input = None if layer_input is None else layer_input.index_select(0, selected)
            if not len(selected):
                return x, None
            if self.adapters is not None:
                with self.adapters.select_rows(selected):
                    return self._feed_forward(x, stream, layer_input), None
        return self._feed_forward(x, stream, layer_input), None

    def _feed_forward(self, x: torch.Tensor, stream: torch.Tensor, layer_input: torch.Tensor | None) -> torch.Tensor:
        """`x`: the result of attention; `stream`: the residual stream before it. -> the stream
        after the layer."""
        x, stream = self.inner_norm.add_residual(self.attention_norm(x), stream)
        x = self.mlp(x)
        if self.experts is not None:
            x = self.experts(x, stream)
        stream = stream + self.mlp_norm(x)
        if layer_input is not None:
            inner = self.gelu(self.input_gate(stream)) * layer_input
            stream = stream + self.projection_norm(self.input_projection(inner))
        return stream * self.factor


class Gemma4Experts(nn.Module):
    """norm(feed-forward) + norm(experts of the norm of the stream). The router has a norm of its
    own."""

    def __init__(self, model: Gemma4ForCausalLM, prefix: str) -> None:
        super().__init__()
        config, hidden = model.model_config.config, model.model_config.hidden_size
        read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
        sizes = ExpertSizes(model.model_config.num_experts, hidden, config["moe_intermediate_size"], activation=gelu_mul)
        rule = RoutingRule(config["top_k_experts"], renormalize=True, expert_scale=True)
        self.moe = MoE(model.context, prefix, sizes, rule)
        self.router_norm = model.build_norm(f"{prefix}.router_norm")
        self.input_norm = model.build_norm(f"{prefix}.pre_feedforward_layernorm_2")
        self.mlp_norm = model.build_norm(f"{prefix}.post_feedforward_layernorm_1")
        self.expert_norm = model.build_norm(f"{prefix}.post_feedforward_layernorm_2")
        self.scale = hidden**-0.5

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        """x: the feed-forward part's result; both [tokens, hidden]."""
        logits = self.moe.router.multiply(self.router_norm(stream) * self.scale)
        return self.mlp_norm(x) + self.expert_norm(self.moe(self.input_norm(stream), logits))


def find_layer_sizes(model_config: ModelConfig, layer: int, kind: str) -> ModelConfig:
    """The configuration with the head size and the number of key-value heads of one layer.
    Published files name those of full attention; transformers writes them layer by layer."""
    config = model_config.config
    sizes_of_layer = (config.get("per_layer_config") or {}).get(str(layer))
    if sizes_of_layer is None and kind == _FULL and "per_layer_config" not in config:
        kv_heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        sizes_of_layer = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": kv_heads}
    sizes_of_layer = sizes_of_layer or {}
    head_dim, kv_heads = (
        sizes_of_layer.get("head_dim") or model_config.head_dim,
        sizes_of_layer.get("num_key_value_heads") or model_config.num_kv_heads,
    )
    return replace(model_config, head_dim=head_dim, v_head_dim=head_dim, num_kv_heads=kv_heads)

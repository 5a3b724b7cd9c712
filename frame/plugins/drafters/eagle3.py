"""`eagle3`: drafts with an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840).

The head is one decoder layer over two inputs: the embedding of the next token, and three hidden
states of the target, projected to one. For further tokens it reads its own hidden state in place of
the target's. It has its own head over a part of the vocabulary; `d2t` maps it to the target's.
Used by the model runner. Must not know a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import ForwardBatch, SelectedTokens
from frame.core.interfaces.device_drafter import DeviceDrafter, DraftModel, DraftModelContext
from frame.core.interfaces.model import LazyTensor, ModelConfig
from frame.models.layers.attention import Attention, AttentionOptions
from frame.models.layers.decoder import Decoder
from frame.models.layers.embedding import Head
from frame.models.layers.linear import ReplicatedLinear
from frame.models.layers.mlp import GatedMLP
from frame.models.layers.norm import RMSNorm
from frame.models.layers.parameter import Range, ShardedParameter, ShardRule, load_parameters
from frame.models.layers.rotary import Rotary, read_rope_parameters
from frame.models.layers.weights.layer_weight import set_buffer
from frame.plugins.drafters.draft_config import read_draft_config


class Eagle3Drafter(DeviceDrafter):
    """Uses the head in `speculative.draft_model_path`."""

    def read_config(self, target: ModelConfig) -> ModelConfig:
        config = read_draft_config(self.context.draft_model_path, "eagle3")
        if config.get("num_hidden_layers", 1) != 1 or config["hidden_size"] != target.hidden_size:
            raise ConfigurationError(
                "speculative.draft_model_path: an EAGLE-3 head has num_hidden_layers 1 and the target's hidden_size"
                f" {target.hidden_size}, not {config.get('num_hidden_layers', 1)} and {config['hidden_size']}; use the head of this model"
            )
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return replace(
            target, architecture="LlamaForCausalLMEagle3", num_layers=1, num_heads=heads, head_dim=head_dim, v_head_dim=head_dim,
            num_kv_heads=config.get("num_key_value_heads") or heads, kind="mha", latent=None, num_experts=0, sliding_window=None,
            config=config,
        )  # fmt: skip

    def build_model(self, context: DraftModelContext) -> Eagle3Head:
        return Eagle3Head(context)


class Eagle3Head(DraftModel, nn.Module):
    """The names of the tensors are those of the published heads, whose layer is `midlayer`."""

    def __init__(self, context: DraftModelContext) -> None:
        super().__init__()
        target = context.target
        if not isinstance(target, Decoder):
            raise ConfigurationError(f"{type(target).__name__} has no hidden states for eagle3; choose another speculative.algorithm")
        model_config = context.context.model_config
        build = context.context
        config, hidden, eps = model_config.config, model_config.hidden_size, model_config.config.get("rms_norm_eps", 1e-6)
        self._layers = _read_tapped_layers(config, target.model_config.num_layers)
        self.tapped_layers = frozenset(self._layers)
        self.fc = ReplicatedLinear(build, ("fc",), len(self._layers) * hidden, (hidden,), bool(config.get("fc_bias", False)))
        self.input_norm = RMSNorm(build, "midlayer.input_layernorm", hidden, eps)
        self.hidden_norm = RMSNorm(build, "midlayer.hidden_norm", hidden, eps)
        self.rotary = Rotary(build, model_config.head_dim, read_rope_parameters(model_config))
        options = AttentionOptions(qkv_bias=bool(config.get("attention_bias", False)), input_size=2 * hidden)
        self.attention = Attention(build, model_config, context.first_layer, "midlayer.self_attn", self.rotary, options)
        self.post_norm = RMSNorm(build, "midlayer.post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP(build, "midlayer.mlp", hidden, config["intermediate_size"], bool(config.get("mlp_bias", False)))
        self.norm = RMSNorm(build, "norm", hidden, eps)
        size = config.get("draft_vocab_size") or model_config.vocab_size
        self.head = Head(build, "lm_head", size, hidden)
        self.d2t = ShardedParameter(torch.zeros(size, dtype=torch.int64), ShardRule(output=0), optional=size == model_config.vocab_size)
        self.d2t.bind("d2t", Range.whole(size))
        self.targets: torch.Tensor
        self._target = (target,)  # in a tuple, so that its parameters are not those of this module
        self._vocab_size = model_config.vocab_size

    def read_states(self, hidden: torch.Tensor, hidden_outputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        return torch.cat([hidden_outputs[layer] for layer in self._layers], -1)

    def forward(self, batch: ForwardBatch, states: torch.Tensor) -> torch.Tensor:
        if states.shape[-1] > self._target[0].model_config.hidden_size:  # the first pass, which steps without drafts leave out
            states = self.fc(states)
        embedded = self.input_norm(self._target[0].embed_inputs(batch))
        rows = self.rotary.prepare_rows(batch)
        x = self.attention(torch.cat((embedded, self.hidden_norm(states)), -1), rows, batch)
        selected = batch.get(SelectedTokens)
        if selected is not None:
            x, states = x.index_select(0, selected.indices), states.index_select(0, selected.indices)
        if not len(x):
            return x
        x, residual = self.post_norm.add_residual(x, states)
        return self.mlp(x) + residual

    def compute_logits(self, states: torch.Tensor, place: int) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(states))
        if logits.shape[1] == self._vocab_size:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return whole.index_copy_(1, self.targets, logits)

    def process_weights_after_loading(self) -> None:
        """Compute the target's ids of the head's vocabulary: `d2t` holds their differences."""
        ids = torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        set_buffer(self, "targets", ids.clamp_(0, self._vocab_size - 1))

    def load_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> set[str]:
        return load_parameters(self, _rename(weights), (r"t2d$", r"embed_tokens\.", r".*rotary_emb\.inv_freq$"))


def _rename(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
    """Heads by other trainers call the layer `layers.0`, or have a prefix."""
    for name, tensor in weights:
        name = name.removeprefix("model.")
        yield name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name, tensor


def _read_tapped_layers(config: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    """The layers whose input the head reads. The config names those whose output it is."""
    eagle_config = config.get("eagle_config")
    listed = eagle_config.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle_config, Mapping) else None
    layers = tuple(int(layer) + 1 for layer in listed) if listed else (2, num_layers // 2, num_layers - 3)
    if len(set(layers)) != 3 or not 0 <= min(layers) <= max(layers) < num_layers:
        raise ConfigurationError(
            f"speculative.draft_model_path: the EAGLE-3 head reads the layers {layers}, and the target has {num_layers};"
            " use the head of this model"
        )
    return layers

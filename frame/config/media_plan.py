"""`MediaPlan`: how a model with encoders reads media, and what its encoders cost.

Part of `Resolved`; `frame.media` reads it. Must not know a modality's files or a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from frame.core.interfaces.model import ModelConfig

_LONGEST = 8192  # patches that one of them attends to, at most: pictures of a video and tiles attend to themselves
# Seconds for an operation of an encoder over those for one of a prompt: 80 ms for 8,160 patches of
# Qwen3-VL-8B on an H200, beside 30 ms for 2,056 prompt tokens
_SLOWNESS = 6.0
_LAYERS = ("depth", "num_hidden_layers", "encoder_layers")  # names of an encoder's sizes in config.json
_HIDDEN = ("embed_dim", "hidden_size", "d_model")
_INNER = ("intermediate_size", "encoder_ffn_dim")


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """What encoding costs, in prompt tokens that take as long."""

    num_layers: int
    patch: float  # tokens for a patch in all layers, without attention
    pair: float  # tokens for two patches of which one attends to the other

    def count_tokens(self, patches: int) -> float:
        return patches * (self.patch + self.pair * min(patches, _LONGEST))

    def find_patches(self, tokens: float) -> int:
        """The most patches that cost so many tokens."""
        count = 2 * tokens / (self.patch + math.sqrt(self.patch**2 + 4 * self.pair * tokens))
        return int(count if count <= _LONGEST else tokens / (self.patch + self.pair * _LONGEST))


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """How a model with encoders reads media."""

    table_rows: int  # of the device's table of encoded media
    encode_budget: int  # positions of the encoder in a step; an item with more is encoded alone, or by layers beside decodes
    modalities: tuple[str, ...]
    whole_items: bool = False  # a chunk holds an item's consecutive placeholders together, see `MediaSpans`
    rotary_positions: bool = False  # positions of three components, see `RotaryPositions`
    costs: Mapping[str, EncoderCost] = field(default_factory=dict)  # by modality, of encoders that steps can divide

    @property
    def held_patches(self) -> int:
        """Most patches of an item whose encoding several steps divide: what it has computed stays
        on the device between them. One of 4K pixels has fewer at the default budget."""
        return 4 * self.encode_budget if self.costs else 0


def find_cost(section: Mapping[str, Any], model_config: ModelConfig) -> EncoderCost | None:
    """section: the encoder's configuration. None: it does not name its sizes."""
    num_layers, hidden = (next((int(section[name]) for name in names if section.get(name)), 0) for names in (_LAYERS, _HIDDEN))
    if not (num_layers and hidden):
        return None
    inner = next((int(section[name]) for name in _INNER if section.get(name)), 0) or int(float(section.get("mlp_ratio") or 4) * hidden)
    share = _SLOWNESS * num_layers / _count_products(model_config)
    return EncoderCost(num_layers, share * (4 * hidden**2 + 2 * hidden * inner), share * 2 * hidden)


def _count_products(model_config: ModelConfig) -> int:
    """Multiplications of the decoder for a token, as a model with plain layers has them."""
    stored, hidden = model_config.config, model_config.hidden_size
    inner = int(stored.get("intermediate_size") or 4 * hidden)
    if model_config.num_experts:
        inner = int(stored.get("moe_intermediate_size") or inner) * int(stored.get("num_experts_per_tok") or 1)
    heads = 2 * (model_config.num_heads + model_config.num_kv_heads) * model_config.head_dim
    return model_config.num_layers * hidden * (heads + 3 * inner)

"""DeepSeek-V3 (arXiv 2412.19437), V3.1, R1 and Kimi-K2: V2's layers, with sigmoid routing, a
correction bias, and group scores that are the sum of the two best experts."""

from __future__ import annotations

from typing import ClassVar

from frame.models.deepseek_v2 import DeepseekV2ForCausalLM
from frame.models.layers.decoder import match_draft_layers
from frame.models.layers.router import RoutingRule, read_sigmoid_rule


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """The weights after the last layer (multi-token-prediction modules) are ignored."""

    bias_keys: ClassVar[tuple[str, ...]] = ("attention_bias",)

    def get_ignored(self) -> tuple[str, ...]:
        return (*super().get_ignored(), match_draft_layers(self.model_config))

    def build_routing(self) -> RoutingRule:
        return read_sigmoid_rule(self.model_config.config)

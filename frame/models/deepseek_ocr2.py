"""DeepSeek-OCR 2: DeepSeek-V2's experts with plain attention, and an encoder that reads an image
as a whole and in tiles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from frame.models.deepseek_v2 import DeepseekV2ForCausalLM
from frame.models.encoders import ReadsMedia
from frame.models.layers.decoder import Decoder
from frame.models.layers.rotary import Rotary

if TYPE_CHECKING:
    from frame.core.interfaces.model import LazyTensor

_SAM = "vision_tower.sam_encoder"
_NAMES = tuple(  # the publisher's, and those of transformers' modules
    (re.compile(rf"(?:model\.)?{stored}"), renamed)
    for stored, renamed in (
        (r"sam_model\.blocks\.(\d+)\.norm(\d)\.", rf"{_SAM}.layers.\1.layer_norm\2."),
        (r"sam_model\.blocks\.", f"{_SAM}.layers."),
        (r"sam_model\.patch_embed\.proj\.", f"{_SAM}.patch_embed.projection."),
        (r"sam_model\.neck\.0\.", f"{_SAM}.neck.conv1."),
        (r"sam_model\.neck\.1\.", f"{_SAM}.neck.layer_norm1."),
        (r"sam_model\.neck\.2\.", f"{_SAM}.neck.conv2."),
        (r"sam_model\.neck\.3\.", f"{_SAM}.neck.layer_norm2."),
        (r"sam_model\.net_2\.", f"{_SAM}.proj.conv1."),
        (r"sam_model\.net_3\.", f"{_SAM}.proj.conv2."),
        (r"sam_model\.", f"{_SAM}."),
        (r"qwen2_model\.model\.model\.", "vision_tower.vision_encoder."),
        (r"qwen2_model\.query_(\d+)\.", r"vision_tower.query_\1_resolution."),
        (r"projector\.layers\.", "multi_modal_projector."),
        (r"view_seperator$", "view_separator"),
    )
)
_ENCODER = r"(?:model\.)?(?:sam_model\.|qwen2_model\.|projector\.|view_sep[ae]rator$)"


class DeepseekOcr2ForConditionalGeneration(ReadsMedia, DeepseekV2ForCausalLM):
    """Layers are dense where `mlp_layer_types` says so."""

    def build_rotary(self) -> Rotary:
        return Decoder.build_rotary(self)

    def build_attention(self, layer: int, prefix: str) -> nn.Module:
        return Decoder.build_attention(self, layer, prefix)

    def is_dense(self, layer: int) -> bool:
        kinds = self.model_config.config.get("mlp_layer_types")
        return kinds[layer] == "dense" if kinds else super().is_dense(layer)

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterable[tuple[str, LazyTensor]]:
        return super().map_weights(weights if self.encoders is None else _rename(weights))

    def get_ignored(self) -> tuple[str, ...]:
        return (*super().get_ignored(), _ENCODER)


def _rename(weights: Iterable[tuple[str, LazyTensor]]) -> Iterator[tuple[str, LazyTensor]]:
    for name, tensor in weights:
        renamed = next((pattern.sub(new, name) for pattern, new in _NAMES if pattern.match(name)), name)
        yield renamed, tensor

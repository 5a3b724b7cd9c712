"""Kimi-K2.5 and K2.6: DeepSeek-V3's layers, and MoonViT as the encoder of images."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from frame.models.deepseek_v3 import DeepseekV3ForCausalLM
from frame.models.encoders import ReadsMedia
from frame.models.layers.weights.fused_tensors import TensorPart, TensorView

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.model import LazyTensor

_BLOCK = re.compile(r"(?:model\.)?vision_tower\.encoder\.blocks\.(\d+)\.(.+)\.(weight|bias)$")
_LAYERS = {"norm0": "norm1", "norm1": "norm2", "mlp.fc0": "mlp.fc1", "mlp.fc1": "mlp.fc2", "wo": "attn.proj"}  # transformers' names
_HEADS = ("num_attention_heads", "vt_num_attention_heads")  # in config.json of transformers and of the publisher
_OTHERS = {
    "vision_tower.encoder.final_layernorm.": "vision_tower.final_layernorm.",
    "vision_tower.patch_embed.pos_emb.weight": "vision_tower.patch_embed.pos_emb.position_embeddings",
    "mm_projector.proj.0.": "mm_projector.in_proj.",
    "mm_projector.proj.2.": "mm_projector.out_proj.",
}


class KimiK25ForConditionalGeneration(ReadsMedia, DeepseekV3ForCausalLM):
    """Videos are not read: their prompts and pixels need the processor's torchvision form."""

    def map_weights(self, weights: Iterable[tuple[str, LazyTensor]]) -> Iterable[tuple[str, LazyTensor]]:
        if self.encoders is None:
            return super().map_weights(weights)
        vision = self.model_config.full_config["vision_config"]
        heads = next(int(vision[name]) for name in _HEADS if name in vision)
        return super().map_weights(_rename(weights, heads))


def _rename(weights: Iterable[tuple[str, LazyTensor]], heads: int) -> Iterator[tuple[str, LazyTensor]]:
    """The encoder's tensors as transformers' modules have them: queries, keys and values apart, and
    the pairs of entries that rotate as halves of a head instead of as neighbours."""
    for name, tensor in weights:
        if (block := _BLOCK.match(name)) is None:
            for stored, renamed in _OTHERS.items():
                name = name.replace(stored, renamed)
            yield name, tensor
            continue
        layer, part, kind = block.groups()
        prefix = f"vision_tower.layers.{layer}"
        if part != "wqkv":
            yield f"{prefix}.{_LAYERS.get(part, part)}.{kind}", tensor
            continue
        size = tensor.shape[0] // 3
        for place, letter in enumerate("qkv"):
            third = TensorPart(tensor, place * size, size)
            yield f"{prefix}.attn.{letter}_proj.{kind}", third if letter == "v" else _split_pairs(third, heads)


def _split_pairs(tensor: LazyTensor, heads: int) -> TensorView:
    """The rows of a tensor [heads * pairs * 2, ...], those of a head by their place in the pair."""

    def read(index: tuple[slice, ...]) -> torch.Tensor:
        whole = tensor[...]
        return whole.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)[index]

    return TensorView(tuple(tensor.shape), read)

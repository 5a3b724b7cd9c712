"""`replace_attention`: the attention layers of transformers' encoders of packed images, by frame's
kernels.

transformers turns queries and keys by fourteen operations, and attends to one image after another,
whose lengths it reads back in each layer. Here a layer is two products and two kernels. Used by
`TransformersEncoders` on GPUs; elsewhere transformers' own layers run. Must not know an
architecture.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from frame import kernels

_ARGUMENTS = {"hidden_states", "cu_seqlens", "position_embeddings"}
_CHILDREN = {"qkv", "proj"}


class LongestSequences:
    """The longest sequence of each division into sequences, read from the device once: the layers
    of an encoder share one or two divisions."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, int]] = []

    def find(self, starts: torch.Tensor) -> int:
        for known, longest in self._known:
            if known is starts:
                return longest
        longest = int(starts.diff().max())
        self._known = [*self._known[-1:], (starts, longest)]
        return longest


class PackedAttention(nn.Module):
    """Takes the place of a layer `attention` of transformers, with its products and their names."""

    def __init__(self, attention: nn.Module, longest: LongestSequences) -> None:
        super().__init__()
        self.qkv: Any = attention.qkv
        self.proj: Any = attention.proj
        self.num_heads = int(attention.num_heads)  # type: ignore[arg-type]
        self._longest = longest

    def forward(
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """hidden_states: [tokens, width]; cu_seqlens: int32 [sequences + 1]; position_embeddings:
        cosines and sines, [tokens, size of a head]. -> [tokens, width]."""
        from frame.kernels import packed_attention

        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
        cos, sin = position_embeddings
        packed_attention.turn_heads(qkv, cos.contiguous(), sin.contiguous())
        attended = packed_attention.attend(*qkv.unbind(1), cu_seqlens, self._longest.find(cu_seqlens), qkv.shape[-1] ** -0.5)
        return self.proj(attended.flatten(1))  # type: ignore[no-any-return]


def replace_attention(tower: nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """-> the number of layers replaced: those of sequences packed one after another, with one
    product for queries, keys and values, if their heads fit the kernel. Computes in 16 bits alone:
    a product of float32 numbers would round them."""
    if dtype.itemsize != 2 or not kernels.can_use_triton(device):
        return 0
    longest, count = LongestSequences(), 0
    for module in list(tower.modules()):
        for name, layer in list(module.named_children()):
            if _fits(layer):
                setattr(module, name, PackedAttention(layer, longest))
                count += 1
    return count


def _fits(layer: nn.Module) -> bool:
    from frame.kernels.packed_attention import MAX_HEAD_DIM

    if {name for name, _ in layer.named_children()} != _CHILDREN or not inspect.signature(layer.forward).parameters.keys() >= _ARGUMENTS:
        return False
    size = layer.proj.in_features // layer.num_heads  # type: ignore[operator, union-attr]
    return size <= MAX_HEAD_DIM and size % 8 == 0 and layer.qkv.out_features == 3 * layer.proj.in_features  # type: ignore[operator, union-attr]

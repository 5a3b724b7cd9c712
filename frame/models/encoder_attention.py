"""`replace_attention`: attention layers of transformers' encoders of packed images, with fewer
operations.

transformers rotates queries and keys by fourteen operations, attends to one image after another,
and reads the lengths of images from the device in each layer. Here one kernel rotates, images of
one length are attended to together, and lengths are read once. Used by `TransformersEncoders` where
Triton kernels run; elsewhere transformers' own layers compute. Must not know an architecture.
"""

from __future__ import annotations

import inspect
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels

_ARGUMENTS = {"hidden_states", "cu_seqlens", "position_embeddings"}
_CHILDREN = {"qkv", "proj"}

Runs = list[tuple[int, int]]  # lengths of sequences, and how many follow each other with this length


class SequenceRuns:
    """The lengths of the sequences of a batch, on the host. The layers of an encoder share one or
    two divisions into sequences, each of which is read from the device once."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, Runs]] = []

    def find(self, starts: torch.Tensor) -> Runs:
        for known, runs in self._known:
            if known is starts:
                return runs
        new = [(length, len(list(run))) for length, run in groupby(starts.diff().tolist()) if length]
        self._known = [*self._known[-1:], (starts, new)]
        return new


class PackedAttention(nn.Module):
    """Takes the place of a layer `attention` of transformers, with its products and their names."""

    def __init__(self, attention: nn.Module, runs: SequenceRuns) -> None:
        super().__init__()
        self.qkv: Any = attention.qkv
        self.proj: Any = attention.proj
        self.num_heads = int(attention.num_heads)  # type: ignore[arg-type]
        self._runs = runs

    def forward(
        self, hidden_states: torch.Tensor, cu_seqlens: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: Any
    ) -> torch.Tensor:
        """hidden_states: [tokens, width]; cu_seqlens: int32 [sequences + 1]; position_embeddings:
        cosines and sines, [tokens, size of a head]. -> [tokens, width]."""
        from frame.kernels.rotary_heads import rotate_heads

        qkv = self.qkv(hidden_states).view(len(hidden_states), 3, self.num_heads, -1)
        cos, sin = position_embeddings
        rotate_heads(qkv, cos.contiguous(), sin.contiguous())
        attended, begin = [], 0
        for length, count in self._runs.find(cu_seqlens):
            run = qkv[begin : begin + length * count].view(count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
            attended.append(F.scaled_dot_product_attention(*run.unbind()).transpose(1, 2).flatten(2).flatten(0, 1))
            begin += length * count
        return self.proj(attended[0] if len(attended) == 1 else torch.cat(attended))  # type: ignore[no-any-return]


def replace_attention(tower: nn.Module, device: torch.device) -> int:
    """-> the number of layers replaced: those of sequences packed one after another, with one
    product for queries, keys and values."""
    if not kernels.can_use_triton(device):
        return 0
    runs, count = SequenceRuns(), 0
    for module in list(tower.modules()):
        for name, layer in list(module.named_children()):
            if _fits(layer):
                setattr(module, name, PackedAttention(layer, runs))
                count += 1
    return count


def _fits(layer: nn.Module) -> bool:
    if {name for name, _ in layer.named_children()} != _CHILDREN or not inspect.signature(layer.forward).parameters.keys() >= _ARGUMENTS:
        return False
    width = layer.proj.in_features  # type: ignore[union-attr]
    return layer.qkv.out_features == 3 * width and not width % (2 * layer.num_heads)  # type: ignore[operator, union-attr]

"""`replace_modules`: replaces modules of transformers' encoders that are slow on a GPU, with the
same results.

Patches are embedded by a product. Where Triton kernels run, attention layers of images that follow
each other change too: transformers rotates queries and keys by fourteen operations, attends to one
image after another, and reads the lengths of images from the device in each layer. Here one kernel
rotates, images of one length are attended to together, and lengths are read once. Used by
`TransformersEncoders`. Must not know an architecture.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from frame import kernels

_ARGUMENTS = {"hidden_states", "cu_seqlens", "position_embeddings"}
_CHILDREN = {"qkv", "proj"}
_PLAN_SECONDS = 0.07  # of cuDNN for one shape of attention in one thread: 55 to 75 ms beside an H200
# What cuDNN saves beside flash attention for a pair of positions and an entry of a head: 0.48 ms
# for 8,160 positions of 16 heads of 72
_SAVED_SECONDS = 0.48e-3 / (8160**2 * 16 * 72)
_MAX_SHAPES = 128  # that a thread plans, and others whose losses it remembers


class Run(NamedTuple):
    """Sequences of one length that follow each other."""

    length: int
    num_sequences: int  # that are attended to together
    is_planned: bool  # by the kernel that PyTorch prefers, else by flash attention


def replace_modules(encoders: nn.Module, device: torch.device, *, deterministic: bool = False) -> None:
    """deterministic: one kernel for all shapes. Attention layers are known by their arguments and
    products alone: a family whose heads rotate in another way must be tested
    (tests/kernels/encoder_modules.py lists those that are)."""
    runs = SequenceRuns(deterministic=deterministic)
    for module in list(encoders.modules()):
        if type(module) is nn.Conv3d and _covers_patches(module):
            module.__class__ = PatchEmbedding
        for name, layer in list(module.named_children()):
            if kernels.can_use_triton(device) and _fits(layer):
                packed = PackedAttention(layer, runs)
                setattr(module, name, packed)
                runs.num_entries += packed.qkv.out_features // 3


class PatchEmbedding(nn.Conv3d):
    """A convolution whose kernel covers each patch once: a matrix product. For the 8,160 patches of
    a large image, the convolution takes an H200 1.9 ms, and the product 0.06."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - of torch
        if input.shape[2:] != self.weight.shape[2:]:
            return super().forward(input)
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


class PlannedShapes(threading.local):
    """The shapes of attention for which this thread has plans of cuDNN. PyTorch keeps plans for
    each thread and without a bound, and makes one while the engine waits. So a shape is computed
    by flash attention until cuDNN would have saved the time of its plan."""

    def __init__(self) -> None:
        self._planned: set[tuple[int, int]] = set()
        self._losses: OrderedDict[tuple[int, int], float] = OrderedDict()  # seconds by other shape, those used last at the end

    def is_planned(self, length: int, count: int, num_entries: int) -> bool:
        """Whether to use cuDNN now. num_entries: of the heads of all layers."""
        shape = length, count
        if shape in self._planned:
            return True
        loss = self._losses.pop(shape, 0.0)
        if loss >= _PLAN_SECONDS and len(self._planned) < _MAX_SHAPES:
            self._planned.add(shape)
            return True
        self._losses[shape] = loss + count * length**2 * num_entries * _SAVED_SECONDS
        if len(self._losses) > _MAX_SHAPES:
            self._losses.popitem(last=False)
        return False


class SequenceRuns:
    """The lengths of the sequences of a batch, on the host. The layers of an encoder share one or
    two divisions into sequences, each of which is read from the device once."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self.num_entries = 0  # of the heads of all layers
        self._shapes = None if deterministic else PlannedShapes()
        self._known: list[tuple[torch.Tensor, list[Run]]] = []

    def find(self, starts: torch.Tensor) -> list[Run]:
        for known, runs in self._known:
            if known is starts:
                return runs
        pairs = [(length, count) for length, run in groupby(starts.diff().tolist()) if length for count in _split(len(list(run)))]
        new = [Run(*pair, self._shapes is not None and self._shapes.is_planned(*pair, self.num_entries)) for pair in pairs]
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
        for length, count, is_planned in self._runs.find(cu_seqlens):
            run = qkv[begin : begin + length * count].view(count, length, *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
            attended.append(_attend(*run.unbind(), is_planned=is_planned).transpose(1, 2).flatten(2).flatten(0, 1))
            begin += length * count
        return self.proj(attended[0] if len(attended) == 1 else torch.cat(attended))  # type: ignore[no-any-return]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_planned: bool) -> torch.Tensor:
    """Each tensor: [sequences, heads, positions, size of a head]. Flash attention is called by its
    own name: PyTorch's choice of kernels holds for all threads."""
    able = torch.backends.cuda.can_use_flash_attention  # by device, dtype and size of the heads
    if is_planned or not able(torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False)):
        return F.scaled_dot_product_attention(query, key, value)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]  # type: ignore[no-any-return]  # noqa: SLF001


def _split(count: int) -> list[int]:
    """Powers of two, so that a length has few shapes."""
    return [1 << place for place in reversed(range(count.bit_length())) if count >> place & 1]


def _covers_patches(module: nn.Conv3d) -> bool:
    is_plain = module.groups == 1 and set(module.padding) == {0} and set(module.dilation) == {1}
    return is_plain and tuple(module.stride) == tuple(module.kernel_size)


def _fits(layer: nn.Module) -> bool:
    if {name for name, _ in layer.named_children()} != _CHILDREN or not inspect.signature(layer.forward).parameters.keys() >= _ARGUMENTS:
        return False
    width = layer.proj.in_features  # type: ignore[union-attr]
    return layer.qkv.out_features == 3 * width and not width % (2 * layer.num_heads)  # type: ignore[operator, union-attr]

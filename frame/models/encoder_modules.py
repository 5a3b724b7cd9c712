"""`replace_modules`: changes modules of transformers' encoders that would keep a step waiting on a
GPU. Their results stay.

Used by `TransformersEncoders`. Must not know an architecture or a modality.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

_LENGTHS = "cu_seqlens"  # argument of an attention module: where sequences begin and end


def replace_modules(encoders: nn.Module) -> None:
    """Replace the embeddings of patches, and let attention find lengths on the host."""
    lengths = HostLengths()
    for module in encoders.modules():
        if type(module) is nn.Conv3d and _covers_patches(module):
            module.__class__ = PatchEmbedding
        if _takes_lengths(module) and not any(map(_takes_lengths, module.children())):  # not the layer around it
            module.register_forward_pre_hook(lengths.move, with_kwargs=True)


class PatchEmbedding(nn.Conv3d):
    """A convolution whose kernel covers each patch once: a matrix product. As a convolution of as
    many images as there are patches it takes longer than layers of the encoder, before the first of
    them, and cuDNN plans it anew in each thread."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - of torch
        if input.shape[2:] != self.weight.shape[2:]:
            return super().forward(input)
        return F.linear(input.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


class HostLengths:
    """The bounds of sequences on the host. Attention reads them there three times in each layer,
    and each time a device would first compute all that was launched before."""

    def __init__(self) -> None:
        self._on_host = WeakTensorKeyDictionary()  # by the encoder's tensor, of the calls that go on

    def move(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A hook before a module's call."""
        bounds = named.get(_LENGTHS)
        if not isinstance(bounds, torch.Tensor):
            return None
        if bounds not in self._on_host:
            self._on_host[bounds] = torch.tensor(bounds.tolist(), dtype=bounds.dtype)
        return arguments, {**named, _LENGTHS: self._on_host[bounds]}


def _takes_lengths(module: nn.Module) -> bool:
    return _LENGTHS in inspect.signature(module.forward).parameters


def _covers_patches(module: nn.Conv3d) -> bool:
    is_plain = module.groups == 1 and set(module.padding) == {0} and set(module.dilation) == {1}
    return is_plain and tuple(module.stride) == tuple(module.kernel_size)

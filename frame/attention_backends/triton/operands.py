"""What the kernels are launched with: queries, keys and values as the kernels see them. Knows the shapes of one layer, no cache and no
plan of a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from frame.attention_backends.triton.tile_sizes import padded
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels import INTERPRETED

MAX_BOX = 256  # columns that are copied at once
ALIGNMENT = 16  # bytes, at multiples of which the rows of a box begin


class Operands(NamedTuple):
    """Queries [tokens, heads, …] and keys [places, kv_heads, …] in two parts each (the second may be None), and values
    [places, kv_heads, width]; without values the keys' first part is the values. Last dimensions are contiguous."""

    q1: torch.Tensor
    q2: torch.Tensor | None
    k1: torch.Tensor
    k2: torch.Tensor | None
    v: torch.Tensor | None
    page_size: int  # 0: a row's keys lie side by side
    has_all_keys: bool = False  # side by side lie all keys of a row, not only this step's

    @property
    def group(self) -> int:
        return self.q1.shape[1] // self.k1.shape[1]

    @property
    def value_width(self) -> int:
        return int((self.k1 if self.v is None else self.v).shape[2])

    @property
    def block_widths(self) -> tuple[int, int, int]:
        """Padded widths of both key parts and of the values."""
        return padded(self.k1.shape[2]), 16 if self.k2 is None else padded(self.k2.shape[2]), padded(self.value_width)

    @property
    def loaded_widths(self) -> tuple[int, int, int]:
        """The same without what is not there."""
        first, second, value = self.block_widths
        return first, 0 if self.k2 is None else second, 0 if self.v is None else value

    @property
    def wide(self) -> bool:
        """Whether a number's place among the keys or values does not fit into an int32."""
        return any(part.shape[0] * part.stride(0) >= 1 << 31 for part in (self.k1, self.k2, self.v) if part is not None)

    def get_tensors(self) -> tuple[torch.Tensor, ...]:
        return self.q1, or_unused(self.q2, self.q1), self.k1, or_unused(self.k2, self.k1), or_unused(self.v, self.k1)

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The strides of all tensors that there are."""
        return tuple([part.stride() for part in self[:5] if part is not None])

    @property
    def can_use_tma(self) -> bool:
        """Whether keys and values can be copied as boxes, if they begin at a multiple of 16 bytes: no padding, and rows at such too."""
        parts = [part for part in (self.k1, self.k2, self.v) if part is not None]
        fits = all(part.shape[2] == padded(part.shape[2]) <= MAX_BOX and part.element_size() == 2 for part in parts)
        return fits and all(part.stride(0) * 2 % ALIGNMENT == 0 for part in parts)

    @property
    def is_aligned(self) -> bool:
        places = self.k1.data_ptr() | (0 if self.k2 is None else self.k2.data_ptr()) | (0 if self.v is None else self.v.data_ptr())
        return places % ALIGNMENT == 0

    def make_descriptors(self, rows: int) -> tuple[TensorDescriptor | None, ...]:
        """Of both key parts and of values, as [tokens, columns of all heads], to be copied `rows` at a time."""
        return tuple(None if part is None else _make_descriptor(part, rows) for part in self[2:5])

    def get_strides(self) -> tuple[int, ...]:
        """Of tokens or places, and of heads, in the order of `get_tensors`."""
        return tuple(stride for part in self.get_tensors() for stride in (part.stride(0), part.stride(1)))

    def make_constants(self, spec: AttentionSpec, out: torch.Tensor) -> dict[str, Any]:
        """The compile-time arguments that both kernels have, but for those of a tile."""
        first, second, value = self.block_widths
        names = [f"{part}_{what}" for part in ("Q1", "Q2", "K1", "K2", "V") for what in ("STRIDE", "HEAD")]
        return {
            **dict(zip(names, self.get_strides(), strict=True)),
            "OUT_STRIDE": out.stride(0),
            "OUT_HEAD": out.stride(1),
            "GROUP": self.group,
            "PAGE_SIZE": self.page_size,
            "WIDTH1": self.k1.shape[2],
            "WIDTH2": 0 if self.k2 is None else self.k2.shape[2],
            "VALUE": self.value_width,
            "BLOCK1": first,
            "BLOCK2": second,
            "BLOCK_VALUE": value,
            "SOFT_CAP": spec.soft_cap or 0.0,
            "HAS_SINKS": spec.sinks is not None,
            "VALUES_IN_KEYS": self.v is None,
            "WIDE": self.wide,
            "UPCAST": INTERPRETED,
        }


def _make_descriptor(part: torch.Tensor, rows: int) -> TensorDescriptor:
    width = part.shape[2]
    columns = (part.shape[1] - 1) * part.stride(1) + width
    return TensorDescriptor(part, [part.shape[0], columns], [part.stride(0), 1], [rows, width])


def attention_scales(spec: AttentionSpec, operands: Operands) -> tuple[float, float]:
    """What scores and results are multiplied by: the layer's scale, and what keys and values of an fp8 cache stand for."""
    if operands.k1.element_size() > 1:
        return spec.scale, 1.0
    return spec.scale * spec.k_scale, spec.k_scale if operands.v is None else spec.v_scale


def or_unused(tensor: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """A pointer for an argument that the kernel will not use."""
    return instead if tensor is None else tensor

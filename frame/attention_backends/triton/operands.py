"""The tensor arguments of the kernels: queries, keys and values as the kernels see them.

Depends on the shapes of one layer, not on the cache or a step's plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from frame.attention_backends.triton.online_softmax import VALUE_UNIT
from frame.attention_backends.triton.tile_sizes import pad_width
from frame.core.interfaces.attention import AttentionSpec
from frame.kernels import INTERPRETED

MAX_BOX = 256  # columns of a TMA box at most
ALIGNMENT = 16  # bytes: alignment that TMA requires


class Operands(NamedTuple):
    """Queries [tokens, heads, …], keys [slots, kv_heads, …] and values [slots, kv_heads, width] of
    one layer.

    Queries and keys are split into two pieces (`q1`/`q2`, `k1`/`k2`; the second may be None):
    latent and rotated, or a width that is no power of two. `v` None: the values are the first piece
    of the keys (MLA). Last dimensions are contiguous.
    """

    q1: torch.Tensor
    q2: torch.Tensor | None
    k1: torch.Tensor
    k2: torch.Tensor | None
    v: torch.Tensor | None
    page_size: int  # 0: contiguous ("ragged") keys
    has_all_keys: bool = False  # the ragged keys are all keys of a row, not only this step's
    scales: tuple[torch.Tensor, ...] = ()  # of an int8 cache: of keys, and of values unless they are in the keys; [slots, kv_heads]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q1.shape[1] // self.k1.shape[1]

    @property
    def value_width(self) -> int:
        return int((self.k1 if self.v is None else self.v).shape[2])

    @property
    def block_widths(self) -> tuple[int, int, int]:
        """Padded widths of both key pieces and of the values."""
        return pad_width(self.k1.shape[2]), 16 if self.k2 is None else pad_width(self.k2.shape[2]), pad_width(self.value_width)

    @property
    def loaded_widths(self) -> tuple[int, int, int]:
        """As `block_widths`, with 0 for tensors that are not loaded."""
        first, second, value = self.block_widths
        return first, 0 if self.k2 is None else second, 0 if self.v is None else value

    @property
    def wide(self) -> bool:
        """Whether an element offset in the keys or values exceeds int32."""
        return any(piece.shape[0] * piece.stride(0) >= 1 << 31 for piece in (self.k1, self.k2, self.v) if piece is not None)

    def get_tensors(self) -> tuple[torch.Tensor, ...]:
        """The kernel arguments, with placeholders for missing pieces."""
        return self.q1, or_unused(self.q2, self.q1), self.k1, or_unused(self.k2, self.k1), or_unused(self.v, self.k1)

    def get_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales of keys and of values, or placeholders."""
        return (self.scales[0], self.scales[-1]) if self.scales else (self.k1, self.k1)

    @property
    def layout(self) -> tuple[tuple[int, ...], ...]:
        """The strides of all present tensors."""
        return tuple([piece.stride() for piece in self[:5] if piece is not None])

    @property
    def can_use_tma(self) -> bool:
        """Whether TMA can load keys and values, if they are aligned: 16-bit types, no padding, and
        row strides that are multiples of 16 bytes."""
        pieces = [piece for piece in (self.k1, self.k2, self.v) if piece is not None]
        fits = all(piece.shape[2] == pad_width(piece.shape[2]) <= MAX_BOX and piece.element_size() == 2 for piece in pieces)
        return fits and all(piece.stride(0) * 2 % ALIGNMENT == 0 for piece in pieces)

    @property
    def is_aligned(self) -> bool:
        """Whether keys and values start at multiples of 16 bytes."""
        places = self.k1.data_ptr() | (0 if self.k2 is None else self.k2.data_ptr()) | (0 if self.v is None else self.v.data_ptr())
        return places % ALIGNMENT == 0

    def make_descriptors(self, rows: int) -> tuple[TensorDescriptor | None, ...]:
        """TMA descriptors of both key pieces and of the values, as [tokens, columns of all heads]
        with boxes of `rows` rows."""
        return tuple(None if piece is None else _make_descriptor(piece, rows) for piece in self[2:5])

    def get_strides(self) -> tuple[int, ...]:
        """Strides of tokens (or slots) and of heads, in the order of `get_tensors`."""
        return tuple(stride for piece in self.get_tensors() for stride in (piece.stride(0), piece.stride(1)))

    def make_constants(self, spec: AttentionSpec, out: torch.Tensor) -> dict[str, Any]:
        """The constexpr arguments that both kernels have, except those of a tile."""
        first, second, value = self.block_widths
        names = [f"{piece}_{what}" for piece in ("Q1", "Q2", "K1", "K2", "V") for what in ("STRIDE", "HEAD")]
        return {
            **dict(zip(names, self.get_strides(), strict=True)),
            "SCALE_STRIDE": self.scales[0].stride(0) if self.scales else 0,
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


def _make_descriptor(piece: torch.Tensor, rows: int) -> TensorDescriptor:
    width = piece.shape[2]
    columns = (piece.shape[1] - 1) * piece.stride(1) + width
    return TensorDescriptor(piece, [piece.shape[0], columns], [piece.stride(0), 1], [rows, width])


def compute_scales(spec: AttentionSpec, operands: Operands) -> tuple[float, float]:
    """(factor of the scores, factor of the result): the layer's scale, and the key and value scales
    of an fp8 cache."""
    if operands.scales:
        return spec.scale, 1.0 / VALUE_UNIT.value
    if operands.k1.element_size() > 1:
        return spec.scale, 1.0
    return spec.scale * spec.k_scale, spec.k_scale if operands.v is None else spec.v_scale


def or_unused(tensor: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """The tensor, or a placeholder for an argument that the kernel does not use."""
    return instead if tensor is None else tensor


def get_window(spec: AttentionSpec) -> int:
    """The kernels' WINDOW: tokens, or negative for chunks of so many tokens, or 0."""
    window = spec.sliding_window or 0
    return -window if spec.chunked else window

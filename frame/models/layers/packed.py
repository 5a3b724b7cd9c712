"""bfloat16 matrices in oneDNN's own layout, for the CPU: PyTorch's plain product lays a weight out anew in every call.

The operators are those that torch.compile uses for constant weights. Knows no layer; float32 gains nothing and stays plain.

oneDNN compiles a kernel for every number of rows that it meets, half a millisecond to two for each weight's size, and keeps 1,024 of
them. So batches are padded to numbers of rows of which there are few (`padded_rows`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS = 32  # the batch that the layout is chosen for; others run as well
_EXACT_ROWS = 32  # small numbers come again and again, and padding would cost more of the product
_SIZES_PER_DOUBLING = 8


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this PyTorch and this CPU multiply `weight` [outputs, inputs] faster when it is packed."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """An opaque tensor of the same size."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)  # noqa: SLF001


def padded_rows(rows: int) -> int:
    """The number of rows, at least `rows` and an eighth more at most, that a product of as many rows is computed with."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _SIZES_PER_DOUBLING)
    return -(-rows // step) * step


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., inputs] -> [..., outputs]."""
    if torch.compiler.is_compiling():  # torch.compile takes such weights for constants; behind an operator of ours it looks no further
        return torch.ops.frame.packed_linear(x, packed, bias)
    return _product(x, packed, bias)


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.shape[0]
    wanted = padded_rows(rows)
    if wanted == rows or x.dim() != 2:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return torch.ops.mkldnn._linear_pointwise(F.pad(x, (0, 0, 0, wanted - rows)), packed, bias, "none", [], "")[:rows]  # noqa: SLF001


@torch.library.custom_op("frame::packed_linear", mutates_args=())
def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _product(x, packed, bias)


@_packed_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])

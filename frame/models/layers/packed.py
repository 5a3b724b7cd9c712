"""bfloat16 weights in oneDNN's blocked layout, for the CPU; PyTorch's plain GEMM reorders the
weight in every call.

Uses the operators that torch.compile uses for constant weights. float32 gains nothing and stays
unpacked. oneDNN compiles a kernel for each number of rows, 0.5 to 2 ms for each weight size, and
caches 1,024 of them; batches are therefore padded to few distinct numbers of rows
(`pad_row_count`). Depends on no layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS = 32  # batch size for which the layout is chosen; others work too
_EXACT_ROWS = 32  # small batches are not padded: they recur often, and padding would cost a larger share
_SIZES_PER_DOUBLING = 8


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this PyTorch and CPU multiply `weight` [outputs, inputs] faster when it is packed."""
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
    """The weight in oneDNN's layout: an opaque tensor of the same size."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)  # noqa: SLF001


def pad_row_count(rows: int) -> int:
    """The number of rows with which a GEMM of `rows` rows is computed: at least `rows`, and at
    most an eighth more."""
    if rows <= _EXACT_ROWS:
        return rows
    step = (1 << (rows - 1).bit_length()) // (2 * _SIZES_PER_DOUBLING)
    return -(-rows // step) * step


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., inputs] -> [..., outputs]."""
    # torch.compile would treat such weights as constants; it does not look inside a custom operator
    if torch.compiler.is_compiling():
        return torch.ops.frame.packed_linear(x, packed, bias)
    return _multiply(x, packed, bias)


def _multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.shape[0]
    padded = pad_row_count(rows)
    if padded == rows or x.dim() != 2:
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001
    return torch.ops.mkldnn._linear_pointwise(F.pad(x, (0, 0, 0, padded - rows)), packed, bias, "none", [], "")[:rows]  # noqa: SLF001


@torch.library.custom_op("frame::packed_linear", mutates_args=())
def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return _multiply(x, packed, bias)


@_packed_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])

"""bfloat16 matrices in oneDNN's own layout, for the CPU: PyTorch's plain product lays a weight out anew in every call.

The operators are those that torch.compile uses for constant weights. Knows no layer; float32 gains nothing and stays plain.
"""

from __future__ import annotations

import torch

_ROWS = 32  # the batch that the layout is chosen for; others run as well


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


def pack(weight: torch.Tensor) -> torch.Tensor:
    """An opaque tensor of the same size."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)  # noqa: SLF001


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[..., inputs] -> [..., outputs]."""
    if torch.compiler.is_compiling():  # torch.compile takes such weights for constants; behind an operator of ours it looks no further
        return torch.ops.frame.packed_linear(x, packed, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001


@torch.library.custom_op("frame::packed_linear", mutates_args=())
def _packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # noqa: SLF001


@_packed_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])

"""Expert GEMMs by DeepGEMM, in bfloat16 or float8 blocks: tokens sorted by expert, in blocks of 128
rows.

The library compiles each shape on first use, which needs nvcc. Knows no routing and no rank.
"""

from __future__ import annotations

from typing import Literal

import deep_gemm
import torch
from pydantic import BaseModel
from torch import nn

from frame.core.interfaces.build import BuildContext
from frame.core.interfaces.moe import DispatchOutput, MoERunner
from frame.kernels.elementwise.activation import silu_mul
from frame.kernels.linear.fp8_quantize import quantize_groups
from frame.kernels.moe.align import Alignment, align_tokens
from frame.kernels.moe.grouped_gemm import combine_pairs


class DeepGemm(MoERunner):
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner], plain or with
    `_fp8_scale` by blocks of 128 x 128."""

    takes_fp8 = ("block",)

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._block = int(deep_gemm.get_mk_alignment_for_contiguous_layout())

    def run(self, tokens: DispatchOutput, experts: nn.Module) -> torch.Tensor:
        top, count = tokens.ids.shape[1], tokens.ids.numel()
        if count == 0:
            return tokens.x.clone()
        order = align_tokens(tokens.ids.contiguous(), len(experts.gate_up), self._block)  # type: ignore[arg-type]
        pairs, owners = _rows(order, count)
        source = pairs.clamp_max(count - 1).div(top, rounding_mode="floor")
        x = tuple(operand.index_select(0, source) for operand in _operand(tokens.x, experts, "gate_up"))
        act = silu_mul(_multiply(x, experts, "gate_up", owners, tokens.x.dtype))
        rows = _multiply(_operand(act, experts, "down"), experts, "down", owners, tokens.x.dtype)
        return combine_pairs(rows, top, tokens.weights.contiguous(), _places(pairs, count))

    def multiply_pairs(self, x: torch.Tensor, ids: torch.Tensor, experts: nn.Module, name: Literal["gate_up", "down"]) -> torch.Tensor:
        """See `SupportsPairMatmul`."""
        order = align_tokens(ids.contiguous(), len(experts.gate_up), self._block)  # type: ignore[arg-type]
        pairs, owners = _rows(order, ids.numel())
        source = pairs.clamp_max(ids.numel() - 1).div(ids.shape[1], rounding_mode="floor")
        operand = tuple(part.index_select(0, source) for part in _operand(x, experts, name))
        return _multiply(operand, experts, name, owners, x.dtype).index_select(0, _places(pairs, ids.numel()))


def _rows(order: Alignment, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (each row's pair, int64, `num_pairs` for padding; each row's expert, int32, -1 in
    unused blocks)."""
    blocks = torch.arange(len(order.experts), device=order.used.device)
    owners = torch.where(blocks < order.used, order.experts, -1).repeat_interleave(order.block, output_size=len(order.pairs))
    return torch.where(owners >= 0, order.pairs, num_pairs).long(), owners


def _places(pairs: torch.Tensor, count: int) -> torch.Tensor:
    """The row of each of `count` pairs, int64."""
    places = torch.empty(count + 1, dtype=torch.int64, device=pairs.device)  # the last entry takes padding rows
    return places.index_copy_(0, pairs, torch.arange(len(pairs), device=pairs.device))[:-1]


def _operand(x: torch.Tensor, experts: nn.Module, name: str) -> tuple[torch.Tensor, ...]:
    """Rows in the form that these weights need: plain, or float8 (viewed as bytes, which can be
    gathered) with scales."""
    if getattr(experts, f"{name}_fp8_scale", None) is None:
        return (x,)
    values, scale = quantize_groups(x)
    return values.view(torch.uint8), scale.contiguous()


def _multiply(x: tuple[torch.Tensor, ...], experts: nn.Module, name: str, owners: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply each row by its expert's transposed weights."""
    weights: torch.Tensor = getattr(experts, name)
    out = torch.empty(len(owners), weights.shape[1], dtype=dtype, device=owners.device)
    try:
        if len(x) == 1:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x[0], weights, out, owners)
        else:
            left = x[0].view(torch.float8_e4m3fn), x[1]
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(left, (weights, getattr(experts, f"{name}_fp8_scale")), out, owners)
    except RuntimeError as error:
        remedy = f"is its wheel built for PyTorch {torch.__version__}, and nvcc there? If not, set moe.runner: triton"
        raise RuntimeError(f"DeepGEMM does not multiply {list(x[0].shape)} by {list(weights.shape)} ({error}); {remedy}") from error
    return out

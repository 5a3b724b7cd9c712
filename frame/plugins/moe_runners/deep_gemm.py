"""Expert multiplications by DeepGEMM, in bfloat16 or in float8 blocks: tokens sorted by expert, in blocks of 128 rows.

The library compiles each shape when it first meets it, and needs nvcc for that. Knows no routing and no rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import deep_gemm
import torch
from torch import nn

from frame.core.interfaces.moe import Dispatched, MoERunner
from frame.kernels.activation import silu_mul
from frame.kernels.align import Alignment, align

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.build import BuildContext

_GROUP = 128  # inputs that share one scale of a row


class DeepGemm(MoERunner):
    """`gate_up` [experts, 2 * inner, hidden] and `down` [experts, hidden, inner], plain or with `_scale_inv` by blocks of 128 x 128."""

    takes_fp8 = True

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self._block = int(deep_gemm.get_mk_alignment_for_contiguous_layout())

    def run(self, tokens: Dispatched, experts: nn.Module) -> torch.Tensor:
        (count, top), gate_up = tokens.ids.shape, experts.gate_up
        order = align(tokens.ids.contiguous(), len(gate_up), self._block)  # type: ignore[arg-type]
        pairs, owners = _rows(order, tokens.ids.numel())
        x = tokens.x.index_select(0, pairs.clamp_max(tokens.ids.numel() - 1).div(top, rounding_mode="floor"))
        act = silu_mul(_product(x, experts, "gate_up", owners))
        rows = _product(act, experts, "down", owners)
        places = torch.empty(tokens.ids.numel() + 1, dtype=torch.int64, device=x.device)  # the last takes rows that pad
        places.index_copy_(0, pairs, torch.arange(len(pairs), device=x.device))
        chosen = rows.index_select(0, places[:-1]).view(count, top, -1)
        return torch.einsum("tkh,tk->th", chosen.float(), tokens.weights).to(tokens.x.dtype)


def _rows(order: Alignment, num_pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the pair of each row int64, `num_pairs` where there is none; its expert int32, -1 in blocks that are not used)."""
    blocks = torch.arange(len(order.experts), device=order.used.device)
    is_used = blocks < order.used
    owners = torch.where(is_used, order.experts, -1).repeat_interleave(order.block, output_size=len(order.pairs))
    pairs = torch.where(owners >= 0, order.pairs, num_pairs)
    return pairs.long(), owners


def _product(x: torch.Tensor, experts: nn.Module, name: str, owners: torch.Tensor) -> torch.Tensor:
    """Each row times its expert's weights, transposed."""
    weights: torch.Tensor = getattr(experts, name)
    out = torch.empty(len(x), weights.shape[1], dtype=x.dtype, device=x.device)
    if weights.dtype != torch.float8_e4m3fn:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(x, weights, out, owners)
    else:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(_quantized(x), (weights, getattr(experts, f"{name}_scale_inv")), out, owners)
    return out


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 and float32 [rows, inputs / 128]."""
    groups = x.float().unflatten(-1, (-1, _GROUP))
    scale = (groups.abs().amax(-1) / 448).clamp_min(1e-12)
    return (groups / scale[..., None]).to(torch.float8_e4m3fn).flatten(1), scale

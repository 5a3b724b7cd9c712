"""The two products of a mixture of experts and their sum, as functions of tensors: `experts` kernels with their strides and grids.

Weights of all experts are [experts, outputs, inputs], inputs contiguous; float8 ones come with `scale`, float32 [experts, blocks of
outputs, blocks of inputs], of blocks of 128 x 128. Knows neither routing nor the choice of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from frame import kernels
from frame.kernels.align import Alignment
from frame.kernels.expert_tiles import Tile, Vector
from frame.kernels.experts import combine_kernel, experts_kernel, vector_down_kernel, vector_gate_up_kernel
from frame.kernels.launch import options


@dataclass(frozen=True, slots=True)
class Weights:
    """Of all experts; `scale` is None for plain ones."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens, or what `gate_up` made of them; float8 ones come with a float32 `scale` [rows, inputs / 128], rows side by side."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """ids int64 and weights float32, [tokens, k], contiguous."""

    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def count(self) -> int:
        return self.ids.numel()


def gate_up(x: Rows, weights: Weights, pairs: Pairs, order: Alignment, tile: Tile) -> Rows:
    """SiLU(gate) * up of each row of the alignment: x [tokens, hidden] -> [rows, inner], in the type of x."""
    rows, inner, device = len(order.pairs), weights.values.shape[1] // 2, x.values.device
    act = Rows(torch.empty((rows, inner), dtype=x.values.dtype, device=device))
    if x.scale is not None:
        act = Rows(act.values, torch.empty((inner // 128, rows), dtype=torch.float32, device=device).t())
    _launch(x, weights, act, pairs, order, tile, gated=True)
    return act


def down(act: Rows, weights: Weights, pairs: Pairs, order: Alignment, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
    """What `gate_up` gave -> [pairs, hidden], each row times the pair's weight."""
    rows = torch.empty((pairs.count, weights.values.shape[1]), dtype=dtype, device=act.values.device)
    _launch(act, weights, Rows(rows), pairs, order, tile, gated=False)
    return rows


def combine(rows: torch.Tensor, top: int) -> torch.Tensor:
    """[tokens * top, hidden] -> [tokens, hidden]: the sum over each token's pairs."""
    tokens, hidden = len(rows) // top, rows.shape[1]
    out = torch.empty((tokens, hidden), dtype=rows.dtype, device=rows.device)
    bm = triton.next_power_of_2(tokens) if kernels.INTERPRETED else 1
    bn = min(1024, triton.next_power_of_2(hidden))
    grid = (triton.cdiv(tokens, bm), triton.cdiv(hidden, bn))
    combine_kernel[grid](rows, out, tokens, N=hidden, TOP=top, BM=bm, BN=bn, **options(rows.device, 4))
    return out


def vector_gate_up(x: torch.Tensor, weights: torch.Tensor, pairs: Pairs, size: Vector) -> torch.Tensor:
    """`gate_up` for a token or a few, times the pairs' weights: each pair reads its expert by itself."""
    inner, hidden = weights.shape[1] // 2, weights.shape[2]
    act = torch.empty((pairs.count, inner), dtype=x.dtype, device=x.device)
    vector_gate_up_kernel[(triton.cdiv(inner, size.bn), pairs.count)](
        x, weights, act, pairs.ids, pairs.weights, x.stride(0), weights.stride(0), weights.stride(1),
        INNER=inner, HIDDEN=hidden, TOP=pairs.ids.shape[1], BN=size.bn,
        BK=min(size.bk, triton.next_power_of_2(hidden)), **options(x.device, size.warps),
    )  # fmt: skip
    return act


def vector_down(act: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, size: Vector) -> torch.Tensor:
    """What `vector_gate_up` gave -> [tokens, hidden], the sum over each token's experts."""
    (tokens, top), (hidden, inner) = ids.shape, weights.shape[1:]
    out = torch.empty((tokens, hidden), dtype=act.dtype, device=act.device)
    vector_down_kernel[(triton.cdiv(hidden, size.bn), tokens)](
        act, weights, out, ids, weights.stride(0), weights.stride(1),
        INNER=inner, HIDDEN=hidden, TOP=top, PLACES=min(size.places, top & -top), BN=size.bn,
        BK=min(size.bk, triton.next_power_of_2(inner)), **options(act.device, size.warps),
    )  # fmt: skip
    return out


def _launch(rows: Rows, weights: Weights, out: Rows, pairs: Pairs, order: Alignment, tile: Tile, *, gated: bool) -> None:
    x, values = rows.values, weights.values
    outputs, inputs = values.shape[1] // 2 if gated else values.shape[1], values.shape[2]
    w: Any = values
    if tile.tma:
        w = TensorDescriptor(values, [values.shape[0] * values.shape[1], inputs], [values.stride(1), 1], [tile.bn, tile.bk])
    x_scale, w_scale, out_scale = _or(rows.scale, x), _or(weights.scale, values), _or(out.scale, out.values)
    experts_kernel[(len(order.experts) * triton.cdiv(outputs, tile.bn),)](
        x, w, out.values, pairs.weights, order.pairs, order.experts, order.used, x_scale, w_scale, out_scale,
        pairs.count, x.stride(0), x_scale.stride(1), out_scale.stride(1), values.stride(0), values.stride(1),
        N=outputs, K=inputs, TOP=pairs.ids.shape[1], GATED=gated, SCALED=weights.scale is not None, BM=tile.bm, BN=tile.bn, BK=tile.bk,
        TMA=tile.tma, SWAP=tile.swap, HALVES=tile.halves, UPCAST=kernels.INTERPRETED, num_stages=tile.stages,
        **options(x.device, tile.warps),
    )  # fmt: skip


def _or(scale: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """A kernel's argument is there even when it reads nothing of it."""
    return instead if scale is None else scale

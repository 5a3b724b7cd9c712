"""Grouped GEMM of a mixture of experts: gate and up, down, and the sum over each token's experts.

Public functions that launch the kernels of `expert_kernels` and `expert_prefill`. The weights of
all experts are [experts, outputs, inputs], inputs contiguous; float8 weights have a float32
`scale`, [experts, outputs] or [experts, blocks of outputs, blocks of inputs] with blocks of 128 x
128. Depends neither on routing nor on the choice of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from frame import kernels
from frame.kernels.launch import PreparedLaunch, ceil_div, next_power_of_2
from frame.kernels.moe.align import Alignment
from frame.kernels.moe.expert_kernels import (
    combine_kernel,
    experts_kernel,
    persistent_down_kernel,
    vector_down_kernel,
    vector_gate_up_kernel,
)
from frame.kernels.moe.expert_tiles import Tile, Vector
from frame.kernels.nvidia import count_multiprocessors

_NARROW = torch.bfloat16, torch.float16
_PIECE = 16  # bytes per asynchronous copy


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of all experts; `scale` is None for unquantized ones."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens, or the result of `compute_gate_up`. float8 rows have a float32 `scale` [rows, inputs
    / 128] with stride(0) 1."""

    values: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """The selected experts: ids int64 and weights float32, both [tokens, k], contiguous."""

    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def count(self) -> int:
        return self.ids.numel()


def compute_gate_up(x: Rows, weights: Weights, pairs: Pairs, order: Alignment, tile: Tile, dtype: torch.dtype) -> Rows:
    """SiLU(gate) * up of each row of the alignment: x [tokens, hidden] -> [rows, inner] in `dtype`.
    In float8, with scales, if the tile's BN is 128."""
    if tile.use_gluon and _can_use_gluon(x, weights, dtype):
        return Rows(_prefill().compute_gate_up(x.values, weights.values, pairs.count, pairs.ids.shape[1], order))
    rows, inner, device = len(order.pairs), weights.values.shape[1] // 2, x.values.device
    act = Rows(torch.empty((rows, inner), dtype=dtype, device=device))
    if dtype == torch.float8_e4m3fn:
        act = Rows(act.values, torch.empty((inner // 128, rows), dtype=torch.float32, device=device).t())
    _launch(x, weights, act, pairs, order, tile, gated=True)
    return act


def compute_down(act: Rows, weights: Weights, pairs: Pairs, order: Alignment, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
    """`compute_gate_up`'s result times down -> [pairs, hidden], each row times its pair's
    weight."""
    if tile.use_gluon and _can_use_gluon(act, weights, dtype):
        return _prefill().compute_down(act.values, weights.values, pairs.weights, order)
    rows = torch.empty((pairs.count, weights.values.shape[1]), dtype=dtype, device=act.values.device)
    if tile.persistent and tile.tma and weights.scale is None:
        _launch_persistent(act.values, weights.values, rows, pairs, order, tile)
    else:
        _launch(act, weights, Rows(rows), pairs, order, tile, gated=False)
    return rows


def combine_pairs(rows: torch.Tensor, top: int, placed: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """[tokens * top, hidden] -> [tokens, hidden]: the sum over each token's pairs.

    `placed`, for rows that are in another order and not yet weighted: the row of each pair (int64)
    and the pairs' weights (float32), both [tokens * top].
    """
    places, weights = placed if placed is not None else (rows, rows)
    tokens, hidden = (len(rows) if placed is None else places.numel()) // top, rows.shape[1]
    out = torch.empty((tokens, hidden), dtype=rows.dtype, device=rows.device)
    bm = next_power_of_2(tokens) if kernels.INTERPRETED else 1
    bn = min(1024, next_power_of_2(hidden))
    launch = _prepared_combine(hidden, top, placed is not None, bm, bn, rows.dtype, rows.device)
    launch((ceil_div(tokens, bm), ceil_div(hidden, bn), 1), (rows, out, places, weights), (tokens,))
    return out


def compute_gate_up_vector(x: torch.Tensor, weights: torch.Tensor, pairs: Pairs, size: Vector) -> torch.Tensor:
    """`compute_gate_up` for one token or a few, times the pairs' weights: each pair reads its
    expert separately."""
    inner, hidden = weights.shape[1] // 2, weights.shape[2]
    act = torch.empty((pairs.count, inner), dtype=x.dtype, device=x.device)
    strides = x.stride(0), weights.stride(0), weights.stride(1)
    launch = _prepared_vector(True, inner, hidden, pairs.ids.shape[1], size, (x.dtype, weights.dtype), strides, x.device)
    launch((ceil_div(inner, size.bn), pairs.count, 1), (x, weights, act, pairs.ids, pairs.weights), strides)
    return act


def compute_down_vector(act: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, size: Vector) -> torch.Tensor:
    """`compute_gate_up_vector`'s result -> [tokens, hidden], the sum over each token's experts."""
    (tokens, top), (hidden, inner) = ids.shape, weights.shape[1:]
    out = torch.empty((tokens, hidden), dtype=act.dtype, device=act.device)
    strides = weights.stride(0), weights.stride(1)
    launch = _prepared_vector(False, inner, hidden, top, size, (act.dtype, weights.dtype), strides, act.device)
    launch((ceil_div(hidden, size.bn), tokens, 1), (act, weights, out, ids), strides)
    return out


def _can_use_gluon(rows: Rows, weights: Weights, dtype: torch.dtype) -> bool:
    """Whether `expert_prefill` runs with both: unquantized, with rows that TMA and 16-byte copies
    can read."""
    x, values = rows.values, weights.values
    if dtype not in _NARROW or not x.dtype == values.dtype == dtype or not (values.is_contiguous() and _supports_tma_streaming(x.device)):
        return False
    starts = x.data_ptr() | values.data_ptr() | x.stride(0) * x.element_size()
    return starts % _PIECE == 0 and x.stride(1) == 1 and _prefill().can_tile(values.shape[1], values.shape[2])


_supports_tma_streaming = cache(kernels.supports_tma_streaming)


@cache
def _prefill() -> ModuleType:
    from frame.kernels.moe import expert_prefill

    return expert_prefill


def _launch(rows: Rows, weights: Weights, out: Rows, pairs: Pairs, order: Alignment, tile: Tile, *, gated: bool) -> None:
    x, values = rows.values, weights.values
    x_scale, w_scale, out_scale = _or(rows.scale, x), _or(weights.scale, values), _or(out.scale, out.values)
    outputs, inputs, top = values.shape[1] // 2 if gated else values.shape[1], values.shape[2], pairs.ids.shape[1]
    types = tuple(each.dtype for each in (x, values, out.values, x_scale, w_scale, out_scale))
    strides = x.stride(0), values.stride(0), values.stride(1)
    scales = 0 if weights.scale is None else weights.scale.dim()
    launch = _prepared_experts(gated, outputs, inputs, top, scales, tile, types, strides, x.device)
    w: Any = values
    if tile.tma:
        w = TensorDescriptor(values, [values.shape[0] * values.shape[1], inputs], [values.stride(1), 1], [tile.bn, tile.bk])
    tensors = x, w, out.values, pairs.weights, order.pairs, order.experts, order.used, x_scale, w_scale, out_scale
    numbers = pairs.count, x_scale.stride(1), out_scale.stride(1), *strides
    launch((len(order.experts) * ceil_div(outputs, tile.bn), 1, 1), tensors, numbers)


def _launch_persistent(x: torch.Tensor, values: torch.Tensor, out: torch.Tensor, pairs: Pairs, order: Alignment, tile: Tile) -> None:
    outputs, inputs = values.shape[1:]
    rows = TensorDescriptor(x, [len(x), inputs], [x.stride(0), 1], [tile.bm, tile.bk])
    w = TensorDescriptor(values, [values.shape[0] * outputs, inputs], [values.stride(1), 1], [tile.bn, tile.bk])
    launch = _prepared_persistent(outputs, inputs, tile, (x.dtype, values.dtype, out.dtype), x.device)
    tensors = rows, w, out, pairs.weights, order.pairs, order.experts, order.used
    launch((launch.constants["PROGRAMS"], 1, 1), tensors, (pairs.count,))


def _or(scale: torch.Tensor | None, instead: torch.Tensor) -> torch.Tensor:
    """A placeholder for a kernel argument that the kernel does not read."""
    return instead if scale is None else scale


@lru_cache(maxsize=256)
def _prepared_experts(
    gated: bool,
    outputs: int,
    inputs: int,
    top: int,
    scales: int,  # dimensions of the weights' scales, 0 without scales
    tile: Tile,
    types: tuple[torch.dtype, ...],
    strides: tuple[int, ...],
    device: torch.device,
) -> PreparedLaunch:
    x, w, out, x_scale, w_scale, out_scale = types
    weights = _descriptor(w, tile.bn, tile.bk, device) if tile.tma else w
    example = x, weights, out, torch.float32, torch.int32, torch.int32, torch.int32, x_scale, w_scale, out_scale, 0, 0, 0, *strides
    constants = {"N": outputs, "K": inputs, "TOP": top, "GATED": gated, "SCALED": scales > 0, "BY_OUTPUT": scales == 2}
    constants |= {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "TMA": tile.tma, "SWAP": tile.swap, "HALF_BLOCKS": tile.half_blocks}
    constants |= {"UPCAST": kernels.INTERPRETED, "num_stages": tile.stages}
    return PreparedLaunch(experts_kernel, example, constants, device, tile.warps)


@lru_cache(maxsize=64)
def _prepared_persistent(outputs: int, inputs: int, tile: Tile, types: tuple[torch.dtype, ...], device: torch.device) -> PreparedLaunch:
    x, w, out = types
    programs = count_multiprocessors(device) if device.type == "cuda" else 2
    example = _descriptor(x, tile.bm, tile.bk, device), _descriptor(w, tile.bn, tile.bk, device), out, torch.float32, *[torch.int32] * 3, 0
    constants = {"N": outputs, "K": inputs, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "PROGRAMS": programs}
    constants |= {"UPCAST": kernels.INTERPRETED, "num_stages": tile.stages}
    return PreparedLaunch(persistent_down_kernel, example, constants, device, tile.warps)


def _descriptor(dtype: torch.dtype, rows: int, columns: int, device: torch.device) -> Any:
    """An example descriptor with these block sizes; the kernel is compiled for them."""
    return TensorDescriptor(torch.empty(16, dtype=dtype, device=device), [16, 16], [16, 1], [rows, columns])


@lru_cache(maxsize=64)
def _prepared_combine(hidden: int, top: int, placed: bool, bm: int, bn: int, dtype: torch.dtype, device: torch.device) -> PreparedLaunch:
    example = dtype, dtype, *((torch.int64, torch.float32) if placed else (dtype, dtype)), 0
    return PreparedLaunch(combine_kernel, example, {"N": hidden, "TOP": top, "PLACED": placed, "BM": bm, "BN": bn}, device, 4)


@lru_cache(maxsize=64)
def _prepared_vector(
    gated: bool,
    inner: int,
    hidden: int,
    top: int,
    size: Vector,
    types: tuple[torch.dtype, torch.dtype],
    strides: tuple[int, ...],
    device: torch.device,
) -> PreparedLaunch:
    x, w = types
    constants = {
        "INNER": inner,
        "HIDDEN": hidden,
        "TOP": top,
        "BN": size.bn,
        "BK": min(size.bk, next_power_of_2(hidden if gated else inner)),
    }
    if gated:
        return PreparedLaunch(vector_gate_up_kernel, (x, w, x, torch.int64, torch.float32, *strides), constants, device, size.warps)
    constants["PLACES"] = min(size.places, top & -top)
    return PreparedLaunch(vector_down_kernel, (x, w, x, torch.int64, *strides), constants, device, size.warps)

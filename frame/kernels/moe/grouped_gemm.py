"""Grouped GEMM of a mixture of experts: the first GEMM with its activation, down, and the sum
over each token's experts.

Public functions that launch the kernels of `expert_kernels`, `expert_prefill` and
`expert_prefill_fp8`. The weights of all experts are [experts, outputs, inputs], inputs contiguous;
float8 weights have a float32 `scale`, [experts, outputs] or [experts, blocks of outputs, blocks of
inputs] with blocks of 128 x 128. Depends neither on routing nor on the choice of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

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

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import PairDelta

_NARROW = torch.bfloat16, torch.float16
_PIECE = 16  # bytes per asynchronous copy


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of all experts; `scale` is None for unquantized ones. `bias`: [experts, outputs],
    contiguous."""

    values: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Activation:
    """What the first GEMM's result becomes. "none": the results of all outputs, without an
    activation. `alpha` and `limit`: see `ClampedSwiGLU`."""

    name: Literal["silu", "gelu_tanh", "clamped_swiglu", "squared_relu", "none"] = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    @property
    def is_gated(self) -> bool:
        """Whether the weights are gates, then ups."""
        return self.name not in ("squared_relu", "none")

    def count_inner(self, weights: Weights) -> int:
        """Columns of the result."""
        outputs = weights.values.shape[1]
        return outputs // 2 if self.is_gated else outputs

    @property
    def constants(self) -> dict[str, Any]:
        """The kernels' constants."""
        return {"GATED": self.is_gated, "ACTIVATION": self.name, "ALPHA": self.alpha, "LIMIT": self.limit}


SILU, _PLAIN = Activation(), Activation("none")


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


def compute_gate_up(
    x: Rows, weights: Weights, pairs: Pairs, order: Alignment, tile: Tile, dtype: torch.dtype, activation: Activation = SILU,
    delta: PairDelta | None = None,
) -> Rows:  # fmt: skip
    """The activated result of the first GEMM for each row of the alignment: x [tokens, hidden] ->
    [rows, inner] in `dtype`; in float8, with scales, if that is `dtype` and the tile's BN is 128,
    or if `expert_prefill_fp8` computes it."""
    top, use_gluon = pairs.ids.shape[1], tile.use_gluon and activation == SILU and delta is None
    if use_gluon and _can_use_gluon(x, weights, dtype):
        return Rows(_prefill().compute_gate_up(x.values, weights.values, pairs.count, top, order))
    if use_gluon and can_prefill_fp8(weights):
        return Rows(*_prefill_fp8().compute_gate_up(x.values, x.scale, weights.values, weights.scale, pairs.count, top, order))
    rows, inner, device = len(order.pairs), activation.count_inner(weights), x.values.device
    act = Rows(torch.empty((rows, inner), dtype=dtype, device=device))
    if dtype == torch.float8_e4m3fn:
        act = Rows(act.values, torch.empty((inner // 128, rows), dtype=torch.float32, device=device).t())
    _launch(x, weights, act, pairs, order, tile, activation, delta=delta)
    return act


def compute_pairs(x: Rows, weights: Weights, pairs: Pairs, order: Alignment, tile: Tile, dtype: torch.dtype) -> torch.Tensor:
    """x [tokens, inputs] times the weights of each token's experts, without an activation and the
    pairs' weights -> [pairs, outputs]."""
    out = torch.empty((pairs.count, weights.values.shape[1]), dtype=dtype, device=x.values.device)
    _launch(x, weights, Rows(out), pairs, order, tile, _PLAIN, by_pair=True)
    return out


def compute_down(
    act: Rows, weights: Weights, pairs: Pairs, order: Alignment, tile: Tile, dtype: torch.dtype, delta: PairDelta | None = None
) -> torch.Tensor:
    """`compute_gate_up`'s result times down -> [pairs, hidden], each row times its pair's
    weight."""
    use_gluon = tile.use_gluon and delta is None
    if use_gluon and _can_use_gluon(act, weights, dtype):
        return _prefill().compute_down(act.values, weights.values, pairs.weights, order)
    if use_gluon and dtype in _NARROW and can_prefill_fp8(weights):
        return _prefill_fp8().compute_down(act.values, act.scale, weights.values, weights.scale, pairs.weights, order, dtype)
    rows = torch.empty((pairs.count, weights.values.shape[1]), dtype=dtype, device=act.values.device)
    if tile.persistent and tile.tma and delta is None and weights.scale is None and weights.bias is None:
        _launch_persistent(act.values, weights.values, rows, pairs, order, tile)
    else:
        _launch(act, weights, Rows(rows), pairs, order, tile, None, delta=delta)
    return rows


def combine_pairs(rows: torch.Tensor, top: int, weights: torch.Tensor | None = None, places: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens * top, hidden] -> [tokens, hidden]: the sum over each token's pairs.

    `weights` float32 [tokens * top] of pairs whose rows are not yet weighted; `places` int64
    [tokens * top]: the row of each pair, if rows are in another order.
    """
    tokens, hidden = (len(rows) if places is None else places.numel()) // top, rows.shape[1]
    out = torch.empty((tokens, hidden), dtype=rows.dtype, device=rows.device)
    bm = next_power_of_2(tokens) if kernels.INTERPRETED else 1
    bn = min(1024, next_power_of_2(hidden))
    launch = _prepared_combine(hidden, top, (places is not None, weights is not None), bm, bn, rows.dtype, rows.device)
    tensors = rows, out, rows if places is None else places, rows if weights is None else weights
    launch((ceil_div(tokens, bm), ceil_div(hidden, bn), 1), tensors, (tokens,))
    return out


def compute_gate_up_vector(
    x: torch.Tensor, weights: Weights, pairs: Pairs, size: Vector, activation: Activation = SILU, delta: PairDelta | None = None
) -> torch.Tensor:
    """`compute_gate_up` for one token or a few, times the pairs' weights: each pair reads its
    expert separately."""
    values, inner, hidden = weights.values, activation.count_inner(weights), x.shape[1]
    act = torch.empty((pairs.count, inner), dtype=x.dtype, device=x.device)
    strides = x.stride(0), values.stride(0), values.stride(1)
    types = x.dtype, values.dtype, None if weights.bias is None else weights.bias.dtype
    deltas, numbers = _list_delta(delta, x)
    launch = _prepared_vector(activation, inner, hidden, pairs.ids.shape[1], size, types, (*strides, *numbers), x.device)
    tensors = x, values, act, pairs.ids, pairs.weights, _or(weights.bias, x), *deltas
    launch((ceil_div(inner, size.bn), pairs.count, 1), tensors, (*strides, *numbers[1:], pairs.count))
    return act


def compute_down_vector(act: torch.Tensor, weights: Weights, pairs: Pairs, size: Vector, delta: PairDelta | None = None) -> torch.Tensor:
    """`compute_gate_up_vector`'s result -> [tokens, hidden], the sum over each token's experts."""
    values, (tokens, top), (hidden, inner) = weights.values, pairs.ids.shape, weights.values.shape[1:]
    out = torch.empty((tokens, hidden), dtype=act.dtype, device=act.device)
    strides = values.stride(0), values.stride(1)
    types = act.dtype, values.dtype, None if weights.bias is None else weights.bias.dtype
    deltas, numbers = _list_delta(delta, act)
    launch = _prepared_vector(None, inner, hidden, top, size, types, (*strides, *numbers), act.device)
    tensors = act, values, out, pairs.ids, pairs.weights, _or(weights.bias, act), *deltas
    launch((ceil_div(hidden, size.bn), tokens, 1), tensors, (*strides, *numbers[1:], pairs.count))
    return out


def _list_delta(delta: PairDelta | None, instead: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], tuple[int, int, int]]:
    """The tensors of a delta, or placeholders; and (splits or 0, stride of pages, pages of an
    adapter)."""
    if delta is None:
        return (instead,) * 5, (0, 0, 0)
    tensors = delta.shrunk, delta.b, delta.places, delta.place_pages, delta.counts
    return tensors, (len(delta.shrunk), delta.b.stride(0), delta.place_pages.shape[1])


def _list_types(dtype: torch.dtype, splits: int) -> tuple[torch.dtype, ...]:
    """Of the tensors of `_list_delta`."""
    return (torch.float32, dtype, *[torch.int32] * 3) if splits else (dtype,) * 5


def _can_use_gluon(rows: Rows, weights: Weights, dtype: torch.dtype) -> bool:
    """Whether `expert_prefill` runs with both: unquantized, with rows that TMA and 16-byte copies
    can read."""
    is_plain = dtype in _NARROW and rows.values.dtype == weights.values.dtype == dtype
    return is_plain and _can_stream(rows.values, weights) and _prefill().can_tile(*weights.values.shape[1:])


def can_prefill_fp8(weights: Weights) -> bool:
    """Whether `expert_prefill_fp8` runs with rows of `quantize_groups` and these weights: float8,
    with scales by blocks."""
    scale = weights.scale
    if scale is None or scale.dim() != 3 or not scale.is_contiguous():
        return False
    return _can_stream(weights.values, weights) and _prefill_fp8().can_tile(*weights.values.shape[1:])


def _can_stream(x: torch.Tensor, weights: Weights) -> bool:
    """Whether TMA and 16-byte copies can read rows and weights, on this device."""
    values = weights.values
    if weights.bias is not None or not (values.is_contiguous() and _supports_tma_streaming(x.device)):
        return False
    starts = x.data_ptr() | values.data_ptr() | x.stride(-2) * x.element_size()
    return starts % _PIECE == 0 and x.stride(-1) == 1


_supports_tma_streaming = cache(kernels.supports_tma_streaming)


@cache
def _prefill() -> ModuleType:
    from frame.kernels.moe import expert_prefill

    return expert_prefill


@cache
def _prefill_fp8() -> ModuleType:
    from frame.kernels.moe import expert_prefill_fp8

    return expert_prefill_fp8


def _launch(
    rows: Rows,
    weights: Weights,
    out: Rows,
    pairs: Pairs,
    order: Alignment,
    tile: Tile,
    activation: Activation | None,
    by_pair: bool = False,
    delta: PairDelta | None = None,
) -> None:
    """`activation` None: the second GEMM. `by_pair`: the rows of `out` are pairs, as always of the
    second."""
    x, values = rows.values, weights.values
    x_scale, w_scale, out_scale, bias = _or(rows.scale, x), _or(weights.scale, values), _or(out.scale, out.values), _or(weights.bias, x)
    outputs, inputs, top = out.values.shape[1], values.shape[2], pairs.ids.shape[1]
    types = tuple(each.dtype for each in (x, values, out.values, x_scale, w_scale, out_scale, bias))
    strides = x.stride(0), values.stride(0), values.stride(1)
    scales = 0 if weights.scale is None else weights.scale.dim()
    form = activation, weights.bias is not None, by_pair
    deltas, numbers = _list_delta(delta, out.values)
    launch = _prepared_experts(form, outputs, inputs, top, scales, tile, types, (*strides, *numbers), x.device)
    w: Any = values
    if tile.tma:
        w = TensorDescriptor(values, [values.shape[0] * values.shape[1], inputs], [values.stride(1), 1], [tile.bn, tile.bk])
    tensors = x, w, out.values, pairs.weights, order.pairs, order.experts, order.used, x_scale, w_scale, out_scale, bias
    values_of = pairs.count, x_scale.stride(1), out_scale.stride(1), *strides, *numbers[1:]
    launch((len(order.experts) * ceil_div(outputs, tile.bn), 1, 1), (*tensors, *deltas), values_of)


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
    form: tuple[Activation | None, bool, bool],  # see `_launch`; whether there is a bias; `by_pair`
    outputs: int,
    inputs: int,
    top: int,
    scales: int,  # dimensions of the weights' scales, 0 without scales
    tile: Tile,
    types: tuple[torch.dtype, ...],
    numbers: tuple[int, ...],  # strides, then those of `_list_delta`
    device: torch.device,
) -> PreparedLaunch:
    x, w, out, x_scale, w_scale, out_scale, bias = types
    activation, biased, by_pair = form
    weights = _descriptor(w, tile.bn, tile.bk, device) if tile.tma else w
    *strides, splits, b_stride, max_pages = numbers
    deltas = _list_types(out, splits)
    example = x, weights, out, torch.float32, *[torch.int32] * 3, x_scale, w_scale, out_scale, bias, *deltas, 0, 0, 0, *strides
    example = *example, b_stride, max_pages
    constants = {"N": outputs, "K": inputs, "TOP": top, "FIRST": activation is not None, **(activation or _PLAIN).constants}
    constants |= {"BIASED": biased, "BY_PAIR": by_pair, "SCALED": scales > 0, "BY_OUTPUT": scales == 2}
    constants |= {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "TMA": tile.tma, "SWAP": tile.swap, "HALF_BLOCKS": tile.half_blocks}
    constants |= {"UPCAST": kernels.INTERPRETED, "num_stages": tile.stages}
    constants |= {"SPLITS": splits, "PAGES": min(4, next_power_of_2(max_pages))}
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
def _prepared_combine(
    hidden: int, top: int, present: tuple[bool, bool], bm: int, bn: int, dtype: torch.dtype, device: torch.device
) -> PreparedLaunch:
    placed, weighted = present
    example = dtype, dtype, torch.int64 if placed else dtype, torch.float32 if weighted else dtype, 0
    constants = {"N": hidden, "TOP": top, "PLACED": placed, "WEIGHTED": weighted, "BM": bm, "BN": bn}
    return PreparedLaunch(combine_kernel, example, constants, device, 4)


@lru_cache(maxsize=64)
def _prepared_vector(
    activation: Activation | None,  # None: the second GEMM
    inner: int,
    hidden: int,
    top: int,
    size: Vector,
    types: tuple[torch.dtype, torch.dtype, torch.dtype | None],  # of x, weights and bias
    numbers: tuple[int, ...],  # strides, then those of `_list_delta`
    device: torch.device,
) -> PreparedLaunch:
    x, w, bias = types
    *strides, splits, b_stride, max_pages = numbers
    deltas = _list_types(x, splits)
    example = x, w, x, torch.int64, torch.float32, bias or x, *deltas, *strides, b_stride, max_pages, 0
    constants: dict[str, Any] = {"INNER": inner, "HIDDEN": hidden, "TOP": top, "BN": size.bn, "BIASED": bias is not None, "SPLITS": splits}
    constants["BK"] = min(size.bk, next_power_of_2(inner if activation is None else hidden))
    if activation is not None:
        return PreparedLaunch(vector_gate_up_kernel, example, constants | activation.constants, device, size.warps)
    constants["PLACES"] = min(size.places, top & -top)
    return PreparedLaunch(vector_down_kernel, example, constants, device, size.warps)

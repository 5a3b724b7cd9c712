"""Expert GEMMs with MXFP4 weights by CUDA kernels for compute capability 9.0, in a layout of their
own: gate and up with their activation, then down times the weights of the pairs.

`cuda/mxfp4.cuh` describes the layout, `mxfp4_experts.cu` and `mxfp4_rows.cu` the kernels. Depends
on no routing and no checkpoint format.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import torch.nn.functional as F

from frame.core.interfaces.weight_format import CanonicalWeight, unpack_nibbles
from frame.kernels import cuda_source, nvidia
from frame.kernels.cuda_source import CudaLaunch, TensorMap
from frame.kernels.launch import ceil_div
from frame.kernels.linear.blocked_int4 import align_rows, read_text, write_multiply
from frame.kernels.moe.align import CHUNKS, Alignment
from frame.kernels.moe.grouped_gemm import Activation, Pairs

GROUP = 32  # inputs that share a scale
MAX_FEW_PAIRS = 8  # that each read their expert, without an alignment
_UNIT, _BLOCK = 64, 64  # inputs of a unit, outputs of each half of a block
_UNIT_BYTES = 4352
_MAX_EXPONENT = 128  # of a scale, with a bias of 127: above it the kernel's factor is no bfloat16
_FACTOR = 126  # the kernel multiplies by 2**126 times the scale
_THREADS = 384, 288  # of a block alone on a multiprocessor, of others
_MEMORY = 227 << 10  # bytes of shared memory of a multiprocessor
_STATIC_MEMORY = 6 << 10  # of a block, with what the device reserves
_PLACES = 6, 7, 8, 15  # of an e2m1 value's bits in a bfloat16 that is 2**-126 times it
_TURNS = (0,) * 4, (4,) * 4, (-6,) * 4, (-2, 6, 6, 6)  # by which the kernel turns the bits of each register back
_ARCHITECTURE, _TYPE = "90a", (("HALF", 0), ("GROUP", 0))  # bfloat16
_PARAMETERS: dict[str, list[Any]] = {  # the kinds of a kernel's parameters, in their order
    "rows": [*[c_void_p] * 6, *[c_int] * 5, *[c_float] * 2],
    "experts": [TensorMap, *[c_void_p] * 9, *[c_int] * 3, *[c_float] * 2],
}
_FEW_THREADS = 128  # of a block of the kernel for a few pairs


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """The rows of a tile, and the blocks that share a multiprocessor."""

    rows: int
    blocks: int


PLANS = (  # (pairs per expert on average, at most; plan); measured on an H200
    (4.5, RowsPlan(8, 3)),
    (10.0, RowsPlan(16, 3)),
    (18.0, RowsPlan(32, 2)),
    (44.0, RowsPlan(64, 1)),
    (80.0, RowsPlan(96, 1)),
    (400.0, RowsPlan(128, 1)),
    (float("inf"), RowsPlan(256, 1)),
)


def choose_plan(pairs: int, experts: int) -> RowsPlan:
    """The plan for so many pairs over so many experts."""
    return next(plan for limit, plan in PLANS if pairs / experts <= limit)


def list_thresholds(experts: int, top: int, maximum: int) -> list[int]:
    """Numbers of tokens that together use every variant of the kernel."""
    limits = [MAX_FEW_PAIRS // top, *(int(rows * experts) // top for rows, _ in PLANS[:-1])]
    return sorted({min(maximum, max(1, count)) for limit in limits for count in (limit, limit + 1)})


def find_obstacle(weight: CanonicalWeight, dtype: torch.dtype) -> str | None:
    """Why the kernel does not multiply this weight by activations of `dtype`; None: it does."""
    scheme, scales = weight.scheme, weight.scales
    if weight.quantized.dim() < 3:
        return "it multiplies experts only"
    if scheme.quant_type != "e2m1" or scheme.group != (1, GROUP) or scales is None or weight.outer is not None or weight.order is not None:
        return f"it multiplies e2m1 with one scale per {GROUP} inputs, not {scheme}"
    if dtype != torch.bfloat16:
        return "it multiplies bfloat16 activations"
    if weight.outputs % 16 or weight.columns % 8:
        return "its sizes are not multiples of 16 outputs and of 8 inputs"
    if scales.is_meta:
        return None
    exponents = _list_exponents(scales)
    if not torch.equal(torch.exp2(exponents.float() - 127).to(scales.dtype), scales) or int(exponents.max()) > _MAX_EXPONENT:
        return "its scales are not powers of two up to 2"
    return None


def count_bytes(experts: int, outputs: int, inputs: int) -> int:
    """The bytes of a weight in the kernel's layout."""
    return experts * ceil_div(outputs // 2, _BLOCK) * ceil_div(inputs, _UNIT) * _UNIT_BYTES


def pack_weight(weight: CanonicalWeight) -> torch.Tensor:
    """The weight in the kernel's layout: uint8 [experts, blocks, units, 4352]."""
    experts, units = len(weight.quantized), ceil_div(weight.columns, _UNIT)
    blocks = ceil_div(weight.outputs // 2, _BLOCK)
    packed = torch.empty(experts, blocks, units, _UNIT_BYTES, dtype=torch.uint8, device=weight.quantized.device)
    scales = weight.scales
    assert scales is not None
    for expert, out in enumerate(packed):  # one after another, to need little memory besides
        values = _pad(unpack_nibbles(weight.quantized[expert])[:, : weight.columns], blocks, units * _UNIT)
        out[..., :4096] = _pack_values(values, blocks, units)
        exponents = _list_exponents(scales[expert]) + _FACTOR
        out[..., 4096:] = _pack_scales(_pad(exponents.to(torch.uint8), blocks, units * 2), blocks, units)
    return packed


def _list_exponents(scales: torch.Tensor) -> torch.Tensor:
    """The exponents of positive powers of two, with a bias of 127: int16."""
    return scales.to(torch.bfloat16).view(torch.int16) >> 7 & 0xFF


def _pad(values: torch.Tensor, blocks: int, columns: int) -> torch.Tensor:
    """[outputs, columns] -> [halves, blocks * 64, columns], with zeros."""
    halves = values.unflatten(0, (2, -1))
    return F.pad(halves, (0, columns - values.shape[1], 0, blocks * _BLOCK - halves.shape[1]))


def _pack_values(values: torch.Tensor, blocks: int, units: int) -> torch.Tensor:
    """[halves, outputs, inputs] of values below 16 -> uint8 [blocks, units, 4096]."""
    # half, block, tile, g, unit, word, half of its inputs, t, input
    pieces = values.view(2, blocks, 8, 8, units, 4, 2, 4, 2).to(torch.int32)
    words = torch.zeros(blocks, units, 8, 8, 4, 4, dtype=torch.int32, device=values.device)
    for register in range(4):
        for place in range(2):
            value = pieces[register % 2, :, :, :, :, :, register // 2, :, place]
            words |= _place_bits(value, register, 16 * place).permute(0, 3, 1, 2, 5, 4)
    return words.reshape(blocks, units, -1).view(torch.uint8)


def _place_bits(value: torch.Tensor, register: int, low: int) -> torch.Tensor:
    """The bits of e2m1 values where the kernel extracts those of one half, from bit `low` on, of a
    register."""
    bits = torch.zeros_like(value)
    for bit, (place, turn) in enumerate(zip(_PLACES, _TURNS[register], strict=True)):
        bits |= (value >> bit & 1) << (place + turn + low) % 32
    return bits


def _pack_scales(exponents: torch.Tensor, blocks: int, units: int) -> torch.Tensor:
    """[halves, outputs, groups] -> uint8 [blocks, units, 256]."""
    return exponents.view(2, blocks, 8, 8, units, 2).permute(1, 4, 2, 3, 5, 0).reshape(blocks, units, 256)


class ExpertGemm:
    """The GEMM with one weight of all experts, for one stream at a time. `counter`: of arrivals at
    divided tiles."""

    def __init__(self, weight: CanonicalWeight) -> None:
        self.values, self.inputs, self.outputs = pack_weight(weight), weight.columns, weight.outputs
        device = self.values.device
        self._processors = nvidia.count_multiprocessors(device)
        self._counter = torch.zeros(4 * self._processors, dtype=torch.int32, device=device)
        self._launches: dict[tuple[str, tuple[tuple[str, int], ...]], CudaLaunch] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.values, self._counter]

    def multiply_few(self, x: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, activation: Activation | None = None) -> torch.Tensor:
        """As `multiply` for up to MAX_FEW_PAIRS pairs, without an order: x [tokens, inputs] ->
        [pairs, inner], or x [pairs, inputs] -> [pairs, outputs]."""
        half, count = self.outputs // 2, pairs.count
        out = x.new_empty(count, self.outputs if activation is None else half)
        launch = self._prepare("rows", _list_constants(bias, activation), _FEW_THREADS, 0)
        x = align_rows(x)
        numbers = pairs.ids.shape[1], half, self.values.shape[2], self.inputs, x.stride(0), *_list_factors(activation)
        launch((count * (half // 8), 1), x, self.values, x if bias is None else bias, out, pairs.weights, pairs.ids, *numbers)
        return out

    def multiply(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        pairs: Pairs,
        order: Alignment,
        plan: RowsPlan,
        activation: Activation | None = None,
        is_weighted: bool = True,
    ) -> torch.Tensor:
        """x [rows, inputs], in the order, which has blocks of `plan.rows` -> with an activation
        [rows, inner]; without one [pairs, outputs], times the pairs' weights if `is_weighted`."""
        half, count, is_first = self.outputs // 2, pairs.count, activation is not None
        out = x.new_empty((len(order.pairs), half) if is_first else (count, self.outputs))
        stages, is_split = count_stages(plan), count <= CHUNKS[-1]  # above that, the order of an expert's pairs differs from run to run
        constants = (
            *(("ROWS", plan.rows), ("STAGES", stages), ("BLOCKS", plan.blocks), ("SPLIT", int(is_split)), ("EARLY", int(not is_first))),
            *(("WEIGHTED", int(is_weighted and not is_first)), *_list_constants(bias, activation)),
        )
        launch = self._prepare("experts", constants, _THREADS[plan.blocks > 1], count_shared_bytes(plan.rows, stages))
        x = align_rows(x)
        box = cuda_source.make_tensor_map(x, plan.rows, _UNIT)
        blocks = self._processors * plan.blocks
        partial = torch.empty(2 * blocks * plan.rows * 2 * _BLOCK if is_split else 0, dtype=torch.float32, device=x.device)
        tensors = (
            self.values,
            x if bias is None else bias,
            out,
            pairs.weights,
            order.pairs,
            order.experts,
            order.used,
            partial,
            self._counter,
        )
        launch((blocks, 1), box, *tensors, count, half, self.values.shape[2], *_list_factors(activation))
        return out

    def _prepare(self, kind: str, constants: tuple[tuple[str, int], ...], threads: int, shared_bytes: int) -> CudaLaunch:
        launch = self._launches.get((kind, constants))
        if launch is None:
            device = self.values.device
            cubin = cuda_source.start_compilation(read_source(kind, dict(constants).get("ROWS", 0)), (*constants, *_TYPE), _ARCHITECTURE)
            function = cuda_source.load_function(cubin, f"mxfp4_{kind}", shared_bytes, nvidia.get_index(device))
            launch = self._launches[kind, constants] = CudaLaunch(function, _PARAMETERS[kind], threads, shared_bytes, device)
        return launch


def _list_constants(bias: torch.Tensor | None, activation: Activation | None) -> tuple[tuple[str, int], ...]:
    is_clamped = activation is not None and activation.name == "clamped_swiglu"
    return ("FIRST", int(activation is not None)), ("BIAS", int(bias is not None)), ("CLAMPED", int(is_clamped))


def _list_factors(activation: Activation | None) -> tuple[float, float]:
    return (0.0, 0.0) if activation is None else (activation.alpha, activation.limit)


def count_stages(plan: RowsPlan) -> int:
    """As many stages as fit, up to 12."""
    room = _MEMORY // plan.blocks - _STATIC_MEMORY - count_shared_bytes(plan.rows, 0)
    return min(12, room // (plan.rows * 128 + 5120))


def count_shared_bytes(rows: int, stages: int) -> int:
    """Dynamic shared memory of a block: the stages, the staged results, and their alignment."""
    return stages * (rows * 128 + 5120) + 8 * min(rows, 32) * 80 + 1024


@cache
def read_source(kind: str, rows: int) -> str:
    """The text of a kernel: `rows`, or `experts` for tiles of so many rows."""
    folder = files("frame.kernels.moe") / "cuda"
    middle = read_text("pipeline.cuh") + write_multiply(rows) if kind == "experts" else ""
    return read_text("common.cuh") + middle + (folder / "mxfp4.cuh").read_text() + (folder / f"mxfp4_{kind}.cu").read_text()

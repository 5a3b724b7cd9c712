"""GEMMs with int4 weights in groups by CUDA kernels for compute capability 9.0, in a layout of
their own.

Three kernels share the layout (`cuda/common.cuh` describes it): for up to 16 rows, for more, and
the dequantization for PyTorch's GEMM of very many. Depends on no layer and no checkpoint format.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from ctypes import c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from frame.core.interfaces.weight_format import CanonicalWeight, unpack_nibbles
from frame.kernels import cuda_source, nvidia
from frame.kernels.cuda_source import CudaLaunch, TensorMap
from frame.kernels.launch import ceil_div

UNIT, TILE, BLOCK = 64, 16, 128  # inputs of a unit, outputs of a tile and of a block
MAX_FEW_ROWS = 16  # of the kernel for few rows
MAX_ROWS = 2048  # above which the GEMM of the dequantized weight is faster
_ARCHITECTURE = "90a"
_MAX_ROWS_OF_TILE, _ROW_STEP = 256, 32
_MAX_ROW_TILES = MAX_ROWS // _MAX_ROWS_OF_TILE
_OFFSETS = {torch.bfloat16: 128, torch.float16: 1024}  # what a code in the mantissa adds to it
# the kinds of a kernel's parameters, in their order
_PARAMETERS: dict[str, list[Any]] = {
    "rows": [*[c_void_p] * 5, *[c_int] * 4],
    "tiles": [TensorMap, *[c_void_p] * 6, *[c_int] * 4],
    "dequantize": [*[c_void_p] * 3, c_int],
}
# measured divisions: blocks of a thread block cluster, tiles that it divides among them
_DIVISIONS = (1, 1), (1, 2), (2, 1), (2, 3), (3, 1), (4, 3), (8, 3)
_TILE_THREADS = 384
# of the kernel for few rows: tiles of a pass, of the only pass, and of all passes
_MAX_TILES, _MAX_TILES_OF_ONE_PASS, _MAX_SUMS = 9, 6, 18
_MEMORY = 227 << 10  # bytes of shared memory of a multiprocessor


@dataclass(frozen=True, slots=True)
class BlockedWeight:
    """A weight [outputs, inputs] in the kernels' layout: `quantized` uint8 [blocks, units, 8, 32,
    16], `scales` [blocks, groups, 8, 8, 4] in the type of the activations. `group`: units that
    share a scale; 0: all."""

    quantized: torch.Tensor
    scales: torch.Tensor
    outputs: int
    inputs: int
    group: int


def find_obstacle(weight: CanonicalWeight, dtype: torch.dtype) -> str | None:
    """Why the kernels do not multiply this weight by activations of `dtype`; None: they do."""
    scheme = weight.scheme
    if weight.quantized.dim() > 2:
        return "it multiplies no experts"
    if scheme.quant_type != "int4" or weight.scales is None or weight.outer is not None:
        return f"it multiplies int4 weights with one scale, not {scheme}"
    if weight.scales.dtype != dtype:
        return f"scales are not in the model's dtype, {dtype}"
    if scheme.group[0] != 1 or scheme.group[1] % UNIT:
        return f"it takes scales for multiples of {UNIT} inputs of one output, not for {scheme.group}"
    if weight.outputs % TILE or weight.columns % (scheme.group[1] or UNIT) or weight.columns % UNIT:
        return f"its sizes are not multiples of {TILE} outputs and of {UNIT} inputs or a group"
    return None


def pack_weight(weight: CanonicalWeight) -> BlockedWeight:
    """The weight in the kernels' layout, without its order."""
    scales, columns = weight.scales, weight.columns
    assert scales is not None
    rows = ceil_div(weight.outputs, BLOCK) * BLOCK
    quantized = unpack_nibbles(weight.quantized)[:, :columns]
    zeros = weight.zeros if weight.zeros is not None else torch.full_like(scales, 8)
    both = torch.stack((scales, zeros.to(scales.dtype) + _OFFSETS[scales.dtype]))
    quantized = torch.nn.functional.pad(quantized, (0, 0, 0, rows - len(quantized)))
    both = torch.nn.functional.pad(both, (0, 0, 0, rows - both.shape[1]))
    return BlockedWeight(_pack_values(quantized), _pack_scales(both), weight.outputs, columns, weight.scheme.group[1] // UNIT)


def count_bytes(outputs: int, inputs: int, group: int) -> int:
    """The bytes of a weight in the kernels' layout, and of what its GEMMs keep beside."""
    blocks, groups = ceil_div(outputs, BLOCK), inputs // (group or inputs)
    return blocks * (BLOCK * inputs // 2 + groups * BLOCK * 4 + _MAX_ROW_TILES * 4)


def _pack_values(quantized: torch.Tensor) -> torch.Tensor:
    """Quantized values [rows, columns] -> uint8 [blocks, units, 8, 32, 16]."""
    rows, columns = quantized.shape
    # block, tile, half of its outputs, g, unit, word, half of its inputs, t, input
    pieces = quantized.view(rows // BLOCK, 8, 2, 8, columns // UNIT, 4, 2, 4, 2)
    # a word's nibbles: inputs, then halves of the inputs, then halves of the outputs
    words = pieces.permute(0, 4, 1, 3, 7, 5, 8, 6, 2).reshape(rows // BLOCK, columns // UNIT, 8, 32, 16, 2)
    return words[..., 0] | words[..., 1] << 4


def _pack_scales(both: torch.Tensor) -> torch.Tensor:
    """Scales and zero points [2, rows, groups] -> [blocks, groups, 8, 8, 4]."""
    _, rows, groups = both.shape
    return both.view(2, rows // BLOCK, 8, 2, 8, groups).permute(1, 5, 2, 4, 0, 3).reshape(rows // BLOCK, groups, 8, 8, 4)


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """Of the kernel for few rows: tiles of 16 outputs a pass, stages of a warp, warps, passes."""

    tiles: int
    stages: int
    warps: int
    passes: int


def choose_rows_plan(outputs: int, rows: int, is_gated: bool, processors: int) -> RowsPlan:
    """The plan for a weight with so many outputs: the one that leaves the fewest tiles idle; each
    start takes as long as 0.75 tiles, a pass 0.25. Measured on an H200, warps and stages too."""
    halves = 2 if is_gated else 1
    each = ceil_div(outputs // TILE // halves, processors)

    def count_tiles(size: tuple[int, int]) -> float:
        passes, tiles = size
        return ceil_div(each, passes * tiles) * (passes * tiles + 0.75 + 0.25 * passes)

    sizes = [
        (passes, tiles)
        for passes, maximum in ((1, _MAX_TILES_OF_ONE_PASS), (2, _MAX_TILES), (3, _MAX_SUMS // 3))
        for tiles in range(1, maximum // halves + 1)
    ]
    passes, tiles = min(sizes, key=count_tiles)
    tiles *= halves
    if passes > 1:
        return RowsPlan(tiles, passes + 1, 8, passes)
    if rows <= 8 or tiles <= 2:
        return RowsPlan(tiles, 2, 16, 1)
    return RowsPlan(tiles, 4, 8, 1) if tiles == 3 else RowsPlan(tiles, 2, 12, 1)


def count_shared_bytes(plan: RowsPlan, rows: int) -> int:
    """Shared memory of a block for few rows: more than half of a multiprocessor's, so that no two
    blocks share one while others have none."""
    return max(plan.warps * plan.stages * (plan.tiles * 576 + ceil_div(rows, 8) * 1024), _MEMORY // 2)


@dataclass(frozen=True, slots=True)
class TilesPlan:
    """The rows of a tile of the kernel for many rows, the blocks of a cluster and the tiles that it
    divides among them; without clusters, 0, the grid divides all tiles."""

    rows: int
    cluster: int = 0
    tiles: int = 0


def choose_tiles_plan(rows: int, outputs: int, inputs: int, processors: int, clusters: Mapping[int, int]) -> TilesPlan:
    """The fastest plan by a model of its time, fitted to measurements on an H200. `clusters`: how
    many of each size, from two blocks on, the device runs at a time. More clusters than these take
    a second wave, for which the whole grid was always faster."""
    units = inputs // UNIT

    def estimate(tile_rows: int, length: float, sums: float) -> float:
        """Nanoseconds of a block with so many units and of its sums, less what all plans take."""
        return length * (115 + 2.25 * tile_rows) + sums

    max_rows = choose_tile_rows(rows)
    length = count_tiles(rows, outputs, max_rows) * units / processors
    candidates = [(estimate(max_rows, length, 2100 + 48 * max_rows), TilesPlan(max_rows))]
    # clusters with tiles of 32 rows were not measured
    for tile_rows in sorted({max_rows, choose_tile_rows(rows, _MAX_ROWS_OF_TILE // 2)} - {_ROW_STEP}):
        tiles = count_tiles(rows, outputs, tile_rows)
        for cluster, each in _DIVISIONS:
            maximum = processors if cluster == 1 else clusters.get(cluster, 0)
            if cluster <= units and ceil_div(tiles, each) <= maximum:  # each block has work, also if the last cluster has one tile
                sums = 2800 if each % cluster else 3 * tile_rows
                candidates.append((estimate(tile_rows, ceil_div(each * units, cluster), sums), TilesPlan(tile_rows, cluster, each)))
    return min(candidates, key=lambda entry: entry[0])[1]


def choose_tile_rows(rows: int, maximum: int = _MAX_ROWS_OF_TILE) -> int:
    """The rows of a tile of the kernel for many rows."""
    return ceil_div(ceil_div(rows, ceil_div(rows, maximum)), _ROW_STEP) * _ROW_STEP


def count_tiles(rows: int, outputs: int, tile_rows: int) -> int:
    """The tiles of a GEMM of the kernel for many rows."""
    return ceil_div(rows, tile_rows) * ceil_div(outputs, BLOCK)


class BlockedGemms:
    """The kernels for one weight. `partial` sums of the kernel for many rows are as large as a tile
    or two for each block."""

    def __init__(self, weight: BlockedWeight) -> None:
        self.weight, device = weight, weight.quantized.device
        self._processors = nvidia.count_multiprocessors(device)
        self._counter = torch.zeros(ceil_div(weight.outputs, BLOCK) * _MAX_ROW_TILES, dtype=torch.int32, device=device)
        self._traits = ("HALF", int(weight.scales.dtype == torch.float16)), ("GROUP", weight.group)
        self._launches: dict[tuple[str, tuple[tuple[str, int], ...], int], CudaLaunch] = {}
        self._plans: dict[int, TilesPlan] = {}
        for rows in range(_ROW_STEP, _MAX_ROWS_OF_TILE + 1, _ROW_STEP):
            for cluster in (0, 1):
                self._start("tiles", self._list_tile_constants(TilesPlan(rows, cluster), False))
        for rows in (1, MAX_FEW_ROWS):
            self._start("rows", self._list_row_constants(rows, False, False)[1])

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.weight.quantized, self.weight.scales, self._counter]

    def multiply_few(self, x: torch.Tensor, bias: torch.Tensor | None, is_gated: bool = False) -> torch.Tensor:
        """x [rows, inputs], up to MAX_FEW_ROWS -> [rows, outputs]; gated: SiLU of the first half
        of the outputs times the second."""
        weight, rows = self.weight, len(x)
        plan, constants = self._list_row_constants(rows, is_gated, bias is not None)
        columns = weight.outputs // TILE // (2 if is_gated else 1)
        out = x.new_empty(rows, columns * TILE)
        launch = self._prepare("rows", constants, plan.warps * 32, count_shared_bytes(plan, rows))
        x = align_rows(x)
        grid = min(self._processors, columns), 1
        launch(grid, x, weight.quantized, weight.scales, x if bias is None else bias, out, rows, weight.outputs, weight.inputs, x.stride(0))
        return out

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [rows, inputs], up to MAX_ROWS -> [rows, outputs]."""
        weight, rows = self.weight, len(x)
        plan = self._plan_tiles(rows)
        launch = self.prepare_tiles(plan, bias is not None)
        out, x = x.new_empty(rows, weight.outputs), align_rows(x)
        tiles = count_tiles(rows, weight.outputs, plan.rows)
        if plan.cluster:
            blocks = pieces = ceil_div(tiles, plan.tiles) * plan.cluster
        else:  # the sums of a tile are counted by blocks, so none is without work
            blocks, pieces = min(self._processors, tiles * (weight.inputs // UNIT)), 2 * self._processors
        partial = torch.empty(pieces * BLOCK * plan.rows, dtype=torch.float32, device=x.device)
        box = cuda_source.make_tensor_map(x, plan.rows, UNIT)
        others = weight.quantized, weight.scales, x if bias is None else bias, out, partial, self._counter
        launch((blocks, 1), box, *others, rows, weight.outputs, weight.inputs, plan.tiles)
        return out

    def dequantize(self) -> torch.Tensor:
        """The weight [outputs, inputs] in the type of its scales."""
        weight = self.weight
        out = weight.scales.new_empty(weight.outputs, weight.inputs)
        launch = self._prepare("dequantize", self._traits, 256, 0)
        launch((weight.outputs // TILE, max(1, min(8, weight.inputs // 512))), weight.quantized, weight.scales, out, weight.inputs)
        return out

    def _list_row_constants(self, rows: int, is_gated: bool, has_bias: bool) -> tuple[RowsPlan, tuple[tuple[str, int], ...]]:
        plan = choose_rows_plan(self.weight.outputs, rows, is_gated, self._processors)
        sizes = ("TILES", plan.tiles), ("WARPS", plan.warps), ("STAGES", plan.stages), ("PASSES", plan.passes)
        return plan, (*self._traits, *sizes, ("COLUMNS", ceil_div(rows, 8)), ("GATED", int(is_gated)), ("BIAS", int(has_bias)))

    def _plan_tiles(self, rows: int) -> TilesPlan:
        if rows not in self._plans:
            weight, clusters = self.weight, _count_clusters(nvidia.get_index(self.weight.quantized.device), self)
            self._plans[rows] = choose_tiles_plan(rows, weight.outputs, weight.inputs, self._processors, clusters)
        return self._plans[rows]

    def prepare_tiles(self, plan: TilesPlan, has_bias: bool) -> CudaLaunch:
        """Launches of the kernel for many rows."""
        constants = self._list_tile_constants(plan, has_bias)
        shared_bytes = dict(constants)["STAGES"] * (plan.rows * 128 + 5120) + 8 * 512 + 1024
        return self._prepare("tiles", constants, _TILE_THREADS, shared_bytes, max(1, plan.cluster))

    def _list_tile_constants(self, plan: TilesPlan, has_bias: bool) -> tuple[tuple[str, int], ...]:
        sizes = ("ROWS", plan.rows), ("STAGES", 5 if plan.rows > 192 else 6)
        return (*self._traits, *sizes, ("BIAS", int(has_bias)), ("CLUSTERED", int(plan.cluster > 0)))

    def _start(self, kind: str, constants: tuple[tuple[str, int], ...]) -> Future[bytes]:
        return cuda_source.start_compilation(read_source(kind, constants), constants, _ARCHITECTURE)

    def _prepare(self, kind: str, constants: tuple[tuple[str, int], ...], threads: int, shared_bytes: int, cluster: int = 1) -> CudaLaunch:
        candidates = self._launches.get((kind, constants, cluster))
        if candidates is None:
            device = self.weight.quantized.device
            function = cuda_source.load_function(self._start(kind, constants), f"int4_{kind}", shared_bytes, nvidia.get_index(device))
            candidates = CudaLaunch(function, _PARAMETERS[kind], threads, shared_bytes, device, cluster)
            self._launches[kind, constants, cluster] = candidates
        return candidates


_clusters: dict[int, dict[int, int]] = {}  # by device


def _count_clusters(device: int, gemms: BlockedGemms) -> dict[int, int]:
    """How many clusters of each size a device runs at a time."""
    if device not in _clusters:
        sizes = {cluster for cluster, _ in _DIVISIONS} - {1}
        _clusters[device] = {size: gemms.prepare_tiles(TilesPlan(_MAX_ROWS_OF_TILE, size), False).count_clusters() for size in sizes}
    return _clusters[device]


def read_source(kind: str, constants: tuple[tuple[str, int], ...]) -> str:
    """The text of a kernel: `rows`, `tiles` or `dequantize`."""
    middle = read_text("pipeline.cuh") + write_multiply(dict(constants)["ROWS"]) if kind == "tiles" else ""
    return read_text("common.cuh") + middle + read_text(f"int4_{kind}.cu")


@cache
def read_text(name: str) -> str:
    """A file of `cuda`, which kernels of experts share."""
    return (files("frame.kernels.linear") / "cuda" / name).read_text()


def write_multiply(rows: int) -> str:
    """`multiply` of the tiles: an MMA of m64n`rows`k16. Its sums are operands of the instruction,
    so that their number is part of the text."""
    count = rows // 2
    sums = ", ".join(f"%{number}" for number in range(count))
    operands = ", ".join(f'"+f"(sums[{number // 4}][{number % 4}])' for number in range(count))
    left = ", ".join(f"%{count + number}" for number in range(4))
    return (
        "__device__ __forceinline__ void multiply(float (*sums)[4], const u32* left, u64 right, int keeps) {\n"
        f'  asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 5}, 0;\\n"\n'
        f'    "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32." TYPE "." TYPE " {{{sums}}}, {{{left}}}, %{count + 4}, p, 1, 1, 0;}}"\n'
        f'    : {operands} : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(keeps));\n}}\n'
    )


def align_rows(x: torch.Tensor) -> torch.Tensor:
    """x with rows that can be read by 16 bytes."""
    return x.clone(memory_format=torch.contiguous_format) if x.stride(0) % 8 or x.data_ptr() % 16 else x

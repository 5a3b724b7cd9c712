"""The GEMM kernel `cuda_int4` without a GPU: which weights it takes, the layout that its CUDA
kernels read, and their plans. `tests/gpu/test_cuda_int4.py` runs the products."""

from __future__ import annotations

import json
import re
from concurrent.futures import Future
from ctypes import c_int, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmRequirements
from frame.core.interfaces.weight_format import WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.kernels import cuda_source, nvidia
from frame.kernels.cuda_source import TensorMap
from frame.kernels.linear import blocked_int4
from frame.plugins.loader import load_registry
from frame.quantization.gemm.cuda_int4 import CudaInt4Kernel
from frame.testing.weights.canonical_weights import make_weight

GROUPED = WeightScheme("int4", (1, 64), zeros=True)
MACROS = {
    "rows": ("TILES", "PASSES", "COLUMNS", "WARPS", "STAGES", "GATED", "BIAS"),
    "tiles": ("ROWS", "STAGES", "BIAS", "CLUSTERED"),
    "dequantize": (),
}


@pytest.mark.parametrize(
    ("scheme", "outputs", "inputs", "sentence"),
    [
        (GROUPED, 48, 192, None),
        (WeightScheme("int4", (1, 0)), 128, 128, None),
        (WeightScheme("int4", (1, 128), ordered=True), 128, 256, None),
        (GROUPED, 40, 192, "not multiples of 16 outputs"),
        (WeightScheme("int4", (1, 0)), 128, 96, "of 64 inputs"),
        (WeightScheme("int4", (1, 32)), 128, 256, "multiples of 64 inputs of one output, not for (1, 32)"),
        (WeightScheme("int8", (1, 0)), 128, 256, "int4 weights"),
    ],
)
def test_the_weights_that_it_takes(scheme: WeightScheme, outputs: int, inputs: int, sentence: str | None) -> None:
    obstacle = blocked_int4.find_obstacle(make_weight(scheme, outputs, inputs, dtype=torch.bfloat16), torch.bfloat16)
    assert obstacle == sentence if sentence is None else sentence in str(obstacle)


def test_experts_and_scales_of_another_type_are_left_to_others() -> None:
    assert "no experts" in str(blocked_int4.find_obstacle(make_weight(GROUPED, 64, 128, experts=2, dtype=torch.bfloat16), torch.bfloat16))
    assert "dtype" in str(blocked_int4.find_obstacle(make_weight(GROUPED, 64, 128, dtype=torch.float16), torch.bfloat16))
    kernel = CudaInt4Kernel(build_context("cpu", torch.bfloat16, 16))
    assert kernel.find_obstacle(make_weight(GROUPED, 64, 128, dtype=torch.bfloat16)) == "the device does not have compute capability 9.0"


@pytest.mark.parametrize(("chip", "is_able"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_other_chips_get_other_kernels(chip: tuple[int, int], is_able: bool) -> None:
    record = next(each for each in load_registry(installed=False).records("gemm_kernel") if each.name == "cuda_int4")
    assert isinstance(record.capabilities, GemmCapabilities)
    assert (not record.capabilities.unsupported(GemmRequirements("cuda", chip, "bfloat16"))) == is_able


@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 128), (torch.float16, 1024)])
def test_threads_find_the_values_of_their_mma_operands(dtype: torch.dtype, offset: int) -> None:
    outputs, inputs = 144, 256  # the second block has one tile
    weight = make_weight(GROUPED, outputs, inputs, dtype=dtype)
    packed = blocked_int4.pack_weight(weight)
    words = packed.quantized.view(torch.int32).flatten(0, 1)  # [blocks * units, 8, 32, 4]
    assert packed.quantized.shape == (2, 4, 8, 32, 16)
    found = torch.full((2 * 128, inputs), -1)
    for thread in range(32):
        g, t = thread // 4, thread % 4
        for word in range(4):
            for nibble in range(8):
                # the rule of cuda/common.cuh
                output = g + 8 * (nibble % 4 % 2)
                column = 16 * word + 2 * t + 8 * (nibble % 4 // 2) + nibble // 4
                quantized = (words[:, :, thread, word] >> (4 * nibble) & 15).view(2, 4, 8)
                for tile in range(8):
                    found.view(2, 8, 16, 4, 64)[:, tile, output, :, column] = quantized[:, :, tile].long()
    assert torch.equal(found[:outputs].float(), weight.numbers())
    assert packed.quantized.nbytes + packed.scales.nbytes + 2 * 8 * 4 == blocked_int4.count_bytes(outputs, inputs, 64)
    assert not found[outputs:].any(), "outputs after the last have other values than zeros"
    assert weight.scales is not None
    assert weight.zeros is not None
    scales = packed.scales[:, :, :, :, :2].permute(0, 2, 4, 3, 1).reshape(256, 4)
    zeros = packed.scales[:, :, :, :, 2:].permute(0, 2, 4, 3, 1).reshape(256, 4)
    assert torch.equal(scales[:outputs], weight.scales)
    assert torch.equal(zeros[:outputs].float(), weight.zeros.float() + offset)
    assert not scales[outputs:].any(), "outputs after the last have scales"


@pytest.mark.parametrize("processors", [78, 114, 132])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_plans_for_few_rows_fit_registers_and_shared_memory(rows: int, is_gated: bool, processors: int) -> None:
    columns = -(-rows // 8)
    for outputs in (*range(32, 8192, 96), 28672, 34816, 151936):
        plan = blocked_int4.choose_rows_plan(outputs, rows, is_gated, processors)
        assert (227 << 10) // 2 <= blocked_int4.count_shared_bytes(plan, rows) <= 227 << 10
        assert not is_gated or plan.tiles % 2 == 0
        stages = plan.stages * (plan.tiles * 576 + columns * 1024)
        assert stages >= plan.passes * plan.tiles * columns * 512, "no room for the sums of a warp"
        # sums, the inputs of a unit and a tile's quantized values and sums; the rest are addresses
        assert plan.passes * plan.tiles * columns * 4 + columns * 16 <= 65536 // (plan.warps * 32)


@pytest.mark.parametrize(
    ("outputs", "rows", "is_gated", "plan"),
    [
        (4096, 1, False, (2, 2, 16, 1)),
        (5120, 8, False, (3, 2, 16, 1)),
        (5120, 16, False, (3, 4, 8, 1)),
        (7168, 1, False, (4, 2, 16, 1)),
        (7168, 16, False, (4, 2, 12, 1)),
        (28672, 16, False, (7, 3, 8, 2)),
        (28672, 1, True, (8, 3, 8, 2)),
        (34816, 1, False, (9, 3, 8, 2)),
        (34816, 16, True, (6, 4, 8, 3)),
    ],
)
def test_plans_for_few_rows_are_those_of_the_measurements(outputs: int, rows: int, is_gated: bool, plan: tuple[int, ...]) -> None:
    assert blocked_int4.choose_rows_plan(outputs, rows, is_gated, 132) == blocked_int4.RowsPlan(*plan)


def test_tiles_cover_the_rows_with_less_than_a_step_each() -> None:
    for rows in range(17, 2049, 61):
        each = blocked_int4.choose_tile_rows(rows)
        tiles = -(-rows // each)
        assert each % 32 == 0
        assert each <= 256
        assert tiles == -(-rows // 256)
        assert each * tiles - rows < 32 * tiles


CLUSTERS = {2: 66, 3: 39, 4: 30, 8: 15}  # of an H200
SHAPES = [(4096, 4096), (5120, 5120), (6144, 4096), (7168, 5120), (4096, 14336), (5120, 17408), (28672, 4096), (34816, 5120)]
ODD_SHAPES = [(48, 128), (128, 64), (16, 64), (1296, 1024), (2064, 448), (151936, 5120)]


def divide_cluster(blocks: int, tiles: int, units: int, tile_rows: int) -> None:
    """The work of the blocks of a cluster with so many tiles, by the rules of `int4_tiles.cu`."""
    total = tiles * units
    begins = [total * rank // blocks for rank in range(blocks + 1)]
    left = set[int]()  # blocks that leave the end of a tile in `partial`
    for rank in range(blocks):
        work, stop = begins[rank], begins[rank + 1]
        assert work < stop, "a block without work does not reach the barriers"
        while work < stop:
            length = min(stop, (work // units + 1) * units) - work
            work += length
            if length < units and work < stop:
                assert rank not in left, "a block has room for one part"
                left.add(rank)
    found = set[int]()
    for rank in range(blocks):  # the last piece of each block
        tile = (begins[rank + 1] - 1) // units
        first = last = rank
        if begins[rank] > tile * units or begins[rank + 1] < (tile + 1) * units:
            while first > 0 and begins[first] > tile * units:
                first -= 1
            while last + 1 < blocks and begins[last + 2] <= (tile + 1) * units:
                last += 1
        has_end = begins[last + 1] < (tile + 1) * units
        assert begins[first] <= tile * units, "the blocks have the tile from its first unit on"
        if has_end:
            found.add(last + 1)
        holders = last - first + 1
        received = (holders - 1 + has_end) * -(-tile_rows // 16 // holders) * 8192
        assert received <= (5 if tile_rows > 192 else 6) * (tile_rows * 128 + 5120), "no room for the sums of others"
    assert found == left, "each part that is left is read"


@pytest.mark.parametrize("clusters", [CLUSTERS, {2: 64, 3: 40, 4: 0, 8: 0}, {}], ids=["H200", "small clusters", "no clusters"])
def test_there_is_a_plan_for_all_rows_and_its_clusters_divide_the_units(clusters: dict[int, int]) -> None:
    divisions = set[tuple[int, int, int, int]]()
    for outputs, inputs in SHAPES + ODD_SHAPES:
        for rows in range(17, blocked_int4.MAX_ROWS + 1):
            plan = blocked_int4.choose_tiles_plan(rows, outputs, inputs, 132, clusters)
            tiles = blocked_int4.count_tiles(rows, outputs, plan.rows)
            assert plan.rows % 32 == 0
            assert 32 <= plan.rows <= 256
            assert (plan.cluster > 0) == (plan.tiles > 0)
            if not plan.cluster:  # which has a counter for each tile of so many rows
                assert -(-rows // plan.rows) <= blocked_int4._MAX_ROW_TILES
                continue
            assert -(-tiles // plan.tiles) <= (132 if plan.cluster == 1 else clusters.get(plan.cluster, 0)), "a second wave"
            last = tiles - (-(-tiles // plan.tiles) - 1) * plan.tiles
            assert 0 < last <= plan.tiles
            divisions |= {(plan.cluster, each, inputs // 64, plan.rows) for each in (plan.tiles, last)}
    for division in divisions:
        divide_cluster(*division)
    sizes = {cluster for cluster, *_ in divisions}
    assert sizes == {1} | {size for size, count in clusters.items() if count}


def test_plans_for_many_rows_are_those_of_the_measurements() -> None:
    results = json.loads((Path(__file__).parents[2] / "benchmarks/results/2026-11-23-int4-cluster-sums-h200.json").read_text())
    losses = []
    for each in results["many_rows"]:
        plan = blocked_int4.choose_tiles_plan(each["rows"], each["outputs"], each["inputs"], 132, CLUSTERS)
        name = f"C{plan.cluster} T{plan.tiles} R{plan.rows}" if plan.cluster else "old"
        times = each["us"]
        losses.append(times[name] / min(time for name, time in times.items() if name != "bf16"))
        assert times[name] <= 1.01 * times["old"], (each["layer"], each["rows"], name)
    assert len(losses) == 56
    assert sum(losses) / len(losses) < 1.01
    for each in results["few_rows"]:
        row_plan = blocked_int4.choose_rows_plan(each["outputs"], each["rows"], bool(each["gated"]), 132)
        name = f"v2 t{row_plan.tiles}x{row_plan.passes} w{row_plan.warps} s{row_plan.stages}"
        assert each["us"][name] <= 1.05 * each["us"]["old"], (each["layer"], each["rows"], name)


class Driver:
    """The functions of the CUDA driver that products call. `counts`: clusters by size; another size
    is refused. `launches`: what each launch gets."""

    def __init__(self, counts: dict[int, int]) -> None:
        self.counts = counts
        self.kinds: list[Any] = []
        self.launches: list[tuple[Any, ...]] = []
        self.boxes: list[tuple[int, ...]] = []

    def cuModuleLoadData(self, *_: Any) -> int:
        return 0

    def cuModuleGetFunction(self, *_: Any) -> int:
        return 0

    def cuFuncSetAttribute(self, _function: Any, attribute: int, shared_bytes: int) -> int:
        return int(attribute != 8 or shared_bytes > 226 << 10)

    def cuTensorMapEncodeTiled(self, _place: Any, kind: int, _rank: int, address: Any, sizes: Any, steps: Any, box: Any, *_: Any) -> int:
        self.boxes.append((kind, address.value, *sizes, *steps, *box))
        return 0

    def cuOccupancyMaxActiveClusters(self, count: Any, _function: Any, configuration: Any) -> int:
        size = configuration._obj.attributes[1].value[0]
        count._obj.value = self.counts.get(size, 0)
        return 0 if size in self.counts else 912

    def cuLaunchKernelEx(self, configuration: Any, _function: Any, arguments: Any, _extra: Any) -> int:
        given = configuration._obj
        attributes = [(given.attributes[i].id, tuple(given.attributes[i].value)) for i in range(given.count)]
        values = [kind.from_address(place).value for kind, place in zip(self.kinds, arguments, strict=True) if kind is not TensorMap]
        self.launches.append((tuple(given.grid), tuple(given.block), given.shared_bytes, attributes, values))
        return 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Without a compiler and a device. -> the sizes of tensors of `torch.empty`, by address."""
    sizes: dict[int, int] = {}
    empty = torch.empty

    def keep(*args: Any, **options: Any) -> torch.Tensor:
        result = empty(*args, **options)
        sizes[result.data_ptr()] = result.numel()
        return result

    def start(_source: str, _constants: Any, _architecture: str) -> Future[bytes]:
        cubin: Future[bytes] = Future()
        cubin.set_result(b"cubin")
        return cubin

    monkeypatch.setattr(cuda_source, "start_compilation", start)
    monkeypatch.setattr(nvidia, "count_multiprocessors", lambda _: 132)
    monkeypatch.setattr(nvidia, "get_index", lambda _: 0)
    monkeypatch.setattr(nvidia, "get_stream", lambda _: 77)
    monkeypatch.setattr(blocked_int4, "_clusters", {})
    monkeypatch.setattr(torch, "empty", keep)
    return sizes


@pytest.mark.parametrize("counts", [CLUSTERS, {2: 66, 3: 0}], ids=["H200", "pairs"])
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES[:4], (28672, 4096), *ODD_SHAPES[:4]])
def test_launches_for_many_rows(
    outputs: int, inputs: int, counts: dict[int, int], made: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(counts)
    driver.kinds = blocked_int4._PARAMETERS["tiles"]
    monkeypatch.setattr(cuda_source, "_load_driver", lambda: driver)
    weight = blocked_int4.BlockedWeight(torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.bfloat16), outputs, inputs, 1)
    gemms, bias = blocked_int4.BlockedGemms(weight), torch.zeros(outputs, dtype=torch.bfloat16)
    for rows in (17, 64, 65, 100, 128, 255, 256, 257, 512, 1024, 2048):
        x = torch.zeros(rows, inputs, dtype=torch.bfloat16)
        for use in (None, bias):
            out = gemms.multiply(x, use)
            grid, block, shared_bytes, attributes, values = driver.launches.pop()
            plan = blocked_int4.choose_tiles_plan(rows, outputs, inputs, 132, counts)
            tiles, stages = -(-rows // plan.rows) * -(-outputs // 128), 5 if plan.rows > 192 else 6
            assert block == (384, 1, 1)
            assert shared_bytes == stages * (plan.rows * 128 + 5120) + 4096 + 1024 <= 226 << 10
            assert attributes == [(6, (1, 0, 0)), *([(4, (plan.cluster, 1, 1))] if plan.cluster > 1 else [])]
            if plan.cluster:
                assert grid == (-(-tiles // plan.tiles) * plan.cluster, 1, 1)
            else:
                assert grid == (min(132, tiles * inputs // 64), 1, 1)
            quantized, scales, added, to, partial, counter, *numbers = values
            assert numbers == [rows, outputs, inputs, plan.tiles]
            assert (quantized, scales, counter) == tuple(tensor.data_ptr() for tensor in gemms.tensors)
            assert added == (x if use is None else use).data_ptr()
            assert to == out.data_ptr()
            assert out.shape == (rows, outputs)
            assert made[partial] == (grid[0] if plan.cluster else 2 * 132) * 128 * plan.rows
            assert driver.boxes.pop() == (9, x.data_ptr(), inputs, rows, inputs * 2, 64, plan.rows)
            constants = dict(gemms._list_tile_constants(plan, use is not None))
            assert constants == {
                "HALF": 0, "GROUP": 1, "ROWS": plan.rows, "STAGES": stages,
                "BIAS": int(use is not None), "CLUSTERED": int(plan.cluster > 0),
            }  # fmt: skip


@pytest.mark.parametrize("is_gated", [False, True])
def test_launches_for_few_rows(is_gated: bool, made: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({})
    driver.kinds = blocked_int4._PARAMETERS["rows"]
    monkeypatch.setattr(cuda_source, "_load_driver", lambda: driver)
    for outputs, inputs in (*SHAPES, (32, 64), (1312, 1024)):
        weight = blocked_int4.BlockedWeight(torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.float16), outputs, inputs, 2)
        gemms = blocked_int4.BlockedGemms(weight)
        for rows in (1, 2, 8, 9, 16):
            x = torch.zeros(rows, inputs + 8, dtype=torch.float16)[:, :inputs]
            out = gemms.multiply_few(x, None, is_gated)
            grid, block, shared_bytes, attributes, values = driver.launches.pop()
            plan = blocked_int4.choose_rows_plan(outputs, rows, is_gated, 132)
            columns = -(-rows // 8)
            assert grid == (min(132, outputs // (32 if is_gated else 16)), 1, 1)
            assert block == (plan.warps * 32, 1, 1)
            assert shared_bytes == max(plan.warps * plan.stages * (plan.tiles * 576 + columns * 1024), 116224)
            assert attributes == [(6, (1, 0, 0))]
            quantized, scales, _ = (tensor.data_ptr() for tensor in gemms.tensors)
            assert values[:5] == [x.data_ptr(), quantized, scales, x.data_ptr(), out.data_ptr()]
            assert values[5:] == [rows, outputs, inputs, inputs + 8]
            assert out.shape == (rows, outputs // (2 if is_gated else 1))
            assert dict(gemms._list_row_constants(rows, is_gated, False)[1]) == {
                "HALF": 1, "GROUP": 2, "TILES": plan.tiles, "WARPS": plan.warps, "STAGES": plan.stages, "PASSES": plan.passes,
                "COLUMNS": columns, "GATED": int(is_gated), "BIAS": 0,
            }  # fmt: skip


@pytest.mark.parametrize("kind", MACROS)
def test_a_source_uses_no_macro_that_it_is_not_given(kind: str) -> None:
    """Names in capitals are macros: given ones, or defined in the text."""
    text = blocked_int4.read_source(kind, (("ROWS", 64),))
    text = re.sub(r"//[^\n]*|\"[^\"\n]*\"", "", text)
    used = set(re.findall(r"\b[A-Z][A-Z_0-9]*\b", text))
    defined = set(re.findall(r"#define ([A-Z_0-9]+)", text))
    operands = {"M", "N", "K", "C"}  # sizes of a product, and the language of `extern`
    assert used - defined - operands == {"HALF", "GROUP", *MACROS[kind]}


@pytest.mark.parametrize("kind", MACROS)
def test_launches_pass_what_the_kernel_takes(kind: str) -> None:
    text = blocked_int4.read_source(kind, (("ROWS", 64),))
    found = re.search(rf"int4_{kind}\(\s*([^)]*)\)", text)
    assert found is not None
    kinds = [c_void_p if "*" in each else TensorMap if "TensorMap" in each else c_int for each in found[1].split(",")]
    assert kinds == blocked_int4._PARAMETERS[kind]

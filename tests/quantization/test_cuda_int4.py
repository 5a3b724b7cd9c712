"""The GEMM kernel `cuda_int4` without a GPU: which weights it takes, the layout that its CUDA
kernels read, and their plans. `tests/gpu/test_cuda_int4.py` runs the products."""

from __future__ import annotations

import re
from ctypes import c_int, c_void_p

import pytest
import torch

from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmRequirements
from frame.core.interfaces.weight_format import WeightScheme
from frame.kernels.cuda_source import TensorMap
from frame.kernels.linear import blocked_int4
from frame.plugins.loader import load_registry
from frame.quantization.gemm.cuda_int4 import CudaInt4Kernel
from frame.testing.attention_cases import build_context
from frame.testing.packed_weights import make_weight

GROUPED = WeightScheme("int4", (1, 64), zeros=True)
MACROS = {
    "rows": ("TILES", "PASSES", "COLUMNS", "WARPS", "BLOCKS", "STAGES", "GATED", "BIAS"),
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
        (WeightScheme("int8", (1, 0)), 128, 256, "int4 codes"),
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
def test_threads_find_the_codes_of_their_mma_operands(dtype: torch.dtype, offset: int) -> None:
    outputs, inputs = 144, 256  # the second block has one tile
    weight = make_weight(GROUPED, outputs, inputs, dtype=dtype)
    packed = blocked_int4.pack_weight(weight)
    words = packed.codes.view(torch.int32).flatten(0, 1)  # [blocks * units, 8, 32, 4]
    assert packed.codes.shape == (2, 4, 8, 32, 16)
    found = torch.full((2 * 128, inputs), -1)
    for thread in range(32):
        g, t = thread // 4, thread % 4
        for word in range(4):
            for nibble in range(8):
                # the rule of cuda/common.cuh
                output = g + 8 * (nibble % 4 % 2)
                column = 16 * word + 2 * t + 8 * (nibble % 4 // 2) + nibble // 4
                codes = (words[:, :, thread, word] >> (4 * nibble) & 15).view(2, 4, 8)
                for tile in range(8):
                    found.view(2, 8, 16, 4, 64)[:, tile, output, :, column] = codes[:, :, tile].long()
    assert torch.equal(found[:outputs].float(), weight.numbers())
    assert packed.codes.nbytes + packed.scales.nbytes + 2 * 8 * 4 == blocked_int4.count_bytes(outputs, inputs, 64)
    assert not found[outputs:].any(), "outputs after the last have other codes than zeros"
    assert weight.scales is not None
    assert weight.zeros is not None
    scales = packed.scales[:, :, :, :, :2].permute(0, 2, 4, 3, 1).reshape(256, 4)
    zeros = packed.scales[:, :, :, :, 2:].permute(0, 2, 4, 3, 1).reshape(256, 4)
    assert torch.equal(scales[:outputs], weight.scales)
    assert torch.equal(zeros[:outputs].float(), weight.zeros.float() + offset)
    assert not scales[outputs:].any(), "outputs after the last have scales"


@pytest.mark.parametrize("outputs", [32, 4096, 5120, 7168, 28672, 34816, 151936])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("rows", [1, 16])
def test_plans_fit_the_shared_memory(outputs: int, is_gated: bool, rows: int) -> None:
    plan = blocked_int4.choose_rows_plan(outputs, rows, is_gated, 132)
    assert (227 << 10) // 2 <= blocked_int4.count_shared_bytes(plan, rows) <= 227 << 10
    assert not is_gated or plan.tiles % 2 == 0
    columns = -(-rows // 8)
    assert plan.stages * (plan.tiles * 576 + columns * 1024) >= plan.passes * plan.tiles * columns * 512, "no room for the sums of a warp"


def test_tiles_cover_the_rows_with_less_than_a_step_each() -> None:
    for rows in range(17, 2049, 61):
        each = blocked_int4.choose_tile_rows(rows)
        tiles = -(-rows // each)
        assert each % 32 == 0
        assert each <= 256
        assert tiles == -(-rows // 256)
        assert each * tiles - rows < 32 * tiles


CLUSTERS = {1: 132, 2: 66, 3: 42, 4: 32, 5: 24, 6: 16, 7: 16, 8: 16}


@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (5120, 5120), (6144, 4096), (34816, 5120), (48, 128), (128, 64)])
def test_clusters_divide_few_tiles_and_each_block_has_work(outputs: int, inputs: int) -> None:
    for rows in range(17, 2049, 37):
        plan = blocked_int4.choose_tiles_plan(rows, outputs, inputs, 132, CLUSTERS)
        assert plan.rows == blocked_int4.choose_tile_rows(rows)
        assert (plan.cluster > 0) == (plan.tiles > 0)
        if plan.cluster:
            assert inputs // 64 >= plan.cluster, "the last cluster may have one tile only"
            holders = min(plan.cluster, -(-plan.cluster // plan.tiles) + 1)  # blocks that send each other the sums of a tile
            received = holders * -(-plan.rows // 16 // holders) * 8192
            assert received <= (5 if plan.rows > 192 else 6) * (plan.rows * 128 + 5120)
    if outputs in (4096, 5120):
        assert blocked_int4.choose_tiles_plan(256, outputs, inputs, 132, CLUSTERS).cluster


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

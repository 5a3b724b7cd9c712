"""The GEMM kernel `cuda_mxfp4` without a GPU: which weights it takes, the layout that its CUDA
kernels read, and their plans. `tests/gpu/test_cuda_mxfp4.py` runs the products."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from frame.core.interfaces.gemm_kernel import GemmCapabilities, GemmRequirements
from frame.core.interfaces.weight_format import E2M1, WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.kernels.moe import blocked_mxfp4
from frame.plugins.loader import load_registry
from frame.quantization.gemm.cuda_mxfp4 import CudaMxfp4Kernel
from frame.testing.weights.canonical_weights import make_weight

MXFP4 = WeightScheme("e2m1", (1, 32))
MASK = 0x81C081C0


@pytest.mark.parametrize(
    ("scheme", "outputs", "inputs", "sentence"),
    [
        (MXFP4, 48, 96, None),
        (MXFP4, 2880 * 2, 2880, None),
        (MXFP4, 40, 96, "not multiples of 16 outputs"),
        (WeightScheme("e2m1", (1, 16)), 64, 96, "per 32 inputs"),
        (WeightScheme("int4", (1, 32)), 64, 96, "e2m1"),
    ],
)
def test_the_weights_that_it_takes(scheme: WeightScheme, outputs: int, inputs: int, sentence: str | None) -> None:
    weight = make_weight(scheme, outputs, inputs, experts=1, dtype=torch.bfloat16)
    obstacle = blocked_mxfp4.find_obstacle(weight, torch.bfloat16)
    assert obstacle == sentence if sentence is None else sentence in str(obstacle)


@pytest.mark.parametrize(
    ("scale", "is_taken"), [(2.0, True), (4.0, False), (0.75, False), (2.0**-127, True), (-0.5, False), (0.0, False), (float("nan"), False)]
)
def test_scales_that_the_kernel_cannot_multiply_are_left_to_others(scale: float, is_taken: bool) -> None:
    weight = make_weight(MXFP4, 32, 64, experts=2, dtype=torch.bfloat16)
    assert weight.scales is not None
    weight.scales[1, 5, 1] = scale
    assert (blocked_mxfp4.find_obstacle(weight, torch.bfloat16) is None) == is_taken


def test_dense_layers_other_dtypes_and_devices_are_left_to_others() -> None:
    weight = make_weight(MXFP4, 64, 64, experts=2, dtype=torch.bfloat16)
    assert "experts only" in str(blocked_mxfp4.find_obstacle(weight.expert(0), torch.bfloat16))
    assert "bfloat16" in str(blocked_mxfp4.find_obstacle(weight, torch.float16))
    assert (
        CudaMxfp4Kernel(build_context("cpu", torch.bfloat16, 16)).find_obstacle(weight) == "the device does not have compute capability 9.0"
    )


@pytest.mark.parametrize(("chip", "is_able"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_other_chips_get_other_kernels(chip: tuple[int, int], is_able: bool) -> None:
    record = next(each for each in load_registry(installed=False).records("gemm_kernel") if each.name == "cuda_mxfp4")
    assert isinstance(record.capabilities, GemmCapabilities)
    assert (not record.capabilities.unsupported(GemmRequirements("cuda", chip, "bfloat16"))) == is_able


def _turn(words: torch.Tensor, count: int) -> torch.Tensor:
    return words >> count | words << 32 - count & 0xFFFFFFFF


@pytest.mark.parametrize(("outputs", "inputs"), [(144, 256), (48, 96), (272, 200)])
def test_threads_find_the_values_of_their_mma_operands(outputs: int, inputs: int) -> None:
    experts, half = 2, outputs // 2
    weight = make_weight(MXFP4, outputs, inputs, experts=experts, dtype=torch.bfloat16)
    packed = blocked_mxfp4.pack_weight(weight)
    blocks, units = -(-half // 64), -(-inputs // 64)
    assert packed.shape == (experts, blocks, units, 4352)
    assert packed.nbytes == blocked_mxfp4.count_bytes(experts, outputs, inputs)
    words = packed[..., :4096].contiguous().view(torch.int32).view(experts, blocks, units, 8, 32, 4).long() & 0xFFFFFFFF
    # the rule of cuda/mxfp4.cuh
    registers = words & MASK, _turn(words, 4) & MASK, words << 6 & MASK, _turn(words, 6) & 0x81808180 | words << 2 & 0x00400040
    exponents = packed[..., 4096:].view(experts, blocks, units, 8, 8, 2, 2)  # tile, g, inputs, half
    scales = (exponents.to(torch.int32) << 7).to(torch.int16).view(torch.bfloat16).double()
    found = torch.zeros(experts, 2, blocks * 64, units * 64, dtype=torch.float64)
    for thread in range(32):
        g, t = thread // 4, thread % 4
        for word in range(4):
            for number, register in enumerate(registers):
                for place in range(2):
                    bits = register[..., thread, word] >> 16 * place & 0xFFFF
                    value = bits.to(torch.int16).view(torch.bfloat16).double() * scales[:, :, :, :, g, word // 2, number % 2]
                    column = 16 * word + 2 * t + 8 * (number // 2) + place
                    for tile in range(8):
                        rows = found[:, number % 2].view(experts, blocks, 64, units, 64)
                        rows[:, :, tile * 8 + g, :, column] = value[..., tile]
    whole = found[:, :, :half, :inputs].reshape(experts, outputs, inputs)
    assert torch.equal(whole, weight.dequantize(torch.float32).double())
    assert not found[:, :, half:].any(), "outputs after the last have other values than zeros"
    assert not found[:, :, :, inputs:].any(), "inputs after the last have other values than zeros"


def test_all_sixteen_values_are_exact_at_both_ends_of_the_scales() -> None:
    for exponent in (0, 1, 64, 128):
        factor = torch.tensor([exponent + 126 << 7], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        for number, value in enumerate((*E2M1, *(-each for each in E2M1))):
            bits = (number >> 3) << 15 | (number & 7) << 6
            operand = torch.tensor([bits - 65536 if bits > 32767 else bits], dtype=torch.int16).view(torch.bfloat16)
            assert float(operand.double() * factor.double()) == value * 2.0 ** (exponent - 127)


def test_plans_fit_shared_memory_and_registers() -> None:
    for _, plan in blocked_mxfp4.PLANS:
        stages = blocked_mxfp4.count_stages(plan)
        assert stages >= 4
        assert plan.blocks * (blocked_mxfp4.count_shared_bytes(plan.rows, stages) + 6144) <= 227 << 10
        assert plan.rows % 8 == 0
        assert plan.rows <= 32 or plan.blocks == 1, "groups of warps that take turns need the registers of a whole multiprocessor"


@pytest.mark.parametrize(("experts", "top", "maximum"), [(32, 4, 8192), (128, 8, 2048), (4, 1, 3)])
def test_thresholds_reach_every_plan(experts: int, top: int, maximum: int) -> None:
    counts = blocked_mxfp4.list_thresholds(experts, top, maximum)
    assert counts[-1] <= maximum
    reached = {blocked_mxfp4.choose_plan(count * top, experts) for count in counts}
    assert reached >= {blocked_mxfp4.choose_plan(count * top, experts) for count in range(1, maximum + 1) if count * top > 8}


def test_a_kernels_text_has_every_macro(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, dict[str, int]]] = []

    def note(source: str, constants: Any, architecture: str) -> Any:
        started.append((source, dict(constants)))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(blocked_mxfp4.cuda_source, "start_compilation", note)
    monkeypatch.setattr(blocked_mxfp4.nvidia, "count_multiprocessors", lambda _: 132)
    gemm = blocked_mxfp4.ExpertGemm(make_weight(MXFP4, 64, 64, experts=2, dtype=torch.bfloat16))
    x, ids = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.int64)
    pairs = blocked_mxfp4.Pairs(ids, torch.ones(2, 1))
    zeros = torch.zeros(8, dtype=torch.int32)
    order: Any = blocked_mxfp4.Alignment(*[zeros] * 3, 8, rows=zeros, counts=zeros)
    with pytest.raises(RuntimeError):
        gemm.multiply_few(x, None, pairs, None)
    with pytest.raises(RuntimeError):
        gemm.multiply(x, None, pairs, order, blocked_mxfp4.PLANS[0][1])
    common = {"FIRST", "BIAS", "CLAMPED", "HALF", "GROUP"}
    assert [set(constants) for _, constants in started] == [common, common | {"ROWS", "STAGES", "BLOCKS", "SPLIT", "EARLY", "WEIGHTED"}]
    assert all(name in source for source, constants in started for name in constants)

"""The integer products of a CPU against float64, in every range of rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from frame.core.interfaces.weight_format import WeightScheme
from frame.entrypoints.tools.bench.paged_batches import build_context
from frame.quantization.gemm.cpu_int8 import Int8CpuKernel, PackedInt8Gemm
from frame.testing.weights.canonical_weights import make_weight

needs_vnni = pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="needs a CPU with VNNI")


@needs_vnni
@pytest.mark.parametrize(("quantizes", "allowed"), [(False, 0.005), (True, 0.06)])
def test_inputs_keep_the_resolution_of_bfloat16_unless_the_checkpoint_quantizes_them(quantizes: bool, allowed: float) -> None:
    kernel, errors = Int8CpuKernel(build_context("cpu", torch.bfloat16, 16)), []
    weight = make_weight(WeightScheme("int8"), 96, 512, dtype=torch.bfloat16)
    weight.quantizes_inputs = quantizes
    product = kernel.prepare(weight)
    assert isinstance(product, PackedInt8Gemm)
    for rows in (1, 9, 64, 65, 200):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).bfloat16()
        x[:, 0] *= 30  # an outlier sets the scale of its row
        want = x.double() @ weight.dequantize(torch.float32).double().t()
        errors.append(float((product(x).double() - want).norm() / want.norm()))
    assert max(errors) <= allowed, errors
    assert torch.equal(product(torch.zeros(2, 512).bfloat16()), torch.zeros(2, 96).bfloat16())
    assert product(torch.zeros(2, 0, 512).bfloat16()).shape == (2, 0, 96)
    if quantizes:
        assert min(errors) > 0.02, "the inputs are quantized to seven bits"


@needs_vnni
def test_products_are_not_made_by_the_reference_of_onednn() -> None:
    """It is hundreds of times slower than the kernels for VNNI and AMX."""
    code = """if True:
        import torch
        from frame.core.interfaces.weight_format import WeightScheme
        from frame.quantization.gemm.cpu_int8 import PackedInt8Gemm
        from frame.testing.weights.canonical_weights import make_weight
        for outputs, inputs in ((32, 64), (96, 512), (1408, 256)):
            weight = make_weight(WeightScheme("int8"), outputs, inputs, dtype=torch.bfloat16)
            for weight.quantizes_inputs in (False, True):
                product = PackedInt8Gemm(weight)
                for rows in (1, 2, 9, 16, 200):
                    product(torch.randn(rows, inputs).bfloat16())
    """
    verbose = {**os.environ, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=verbose, check=True)
    gemms = [line for line in done.stdout.splitlines() if ",exec,cpu,matmul," in line or ",exec,cpu,inner_product," in line]
    assert len(gemms) >= 24
    assert not [line for line in gemms if ",ref" in line]

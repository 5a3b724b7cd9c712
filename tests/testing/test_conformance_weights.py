"""The suites of weight formats and GEMM kernels notice broken plugins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from frame.core.interfaces.gemm_kernel import Gemm
from frame.core.interfaces.weight_format import CanonicalWeight, LayerFormat, LayerKind
from frame.quantization.gemm.reference import ReferenceGemm, ReferenceKernel
from frame.quantization.int8 import Int8, OnlineInt8Layer
from frame.testing.weights import gemm_kernel as conformance_gemm_kernel
from frame.testing.weights import weight_format as conformance_weight_format
from tests.testing.failures import failures


class ForgetsTheBias(ReferenceGemm):
    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return super().__call__(x)


class Biasless(ReferenceKernel):
    def prepare(self, weight: CanonicalWeight) -> Gemm:
        return ForgetsTheBias(weight)


class Halved(OnlineInt8Layer):
    def to_canonical(self, tensors: Mapping[str, torch.Tensor], inputs: int) -> CanonicalWeight:
        found = super().to_canonical(tensors, inputs)
        return replace(found, quantized=found.quantized.to(torch.int16))


class WrongDtype(Int8):
    def describe_layer(self, name: str, kind: LayerKind) -> LayerFormat:
        return Halved(self.context.dtype)


def test_the_reference_passes() -> None:
    assert failures("gemm_kernel", ReferenceKernel) == {}
    assert failures("weight_format", Int8) == {}


@pytest.mark.parametrize(
    ("kind", "target", "check"),
    [("gemm_kernel", Biasless, "bias_is_added"), ("weight_format", WrongDtype, "canonical_form")],
)
def test_a_broken_plugin_is_caught(kind: str, target: type, check: str) -> None:
    assert {"gemm_kernel": conformance_gemm_kernel, "weight_format": conformance_weight_format}[kind].suite is not None
    assert any(name.startswith(check) for name in failures(kind, target))

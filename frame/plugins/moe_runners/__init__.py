"""Manifest of the in-tree MoE runners: records only. Must not import the plugins."""

from __future__ import annotations

from dataclasses import dataclass

from frame.core.interfaces.moe import MoECapabilities, MoERequirements
from frame.core.interfaces.plugin import Reason
from frame.registration import KindRegistry, count_interpreter, hookimpl


@dataclass(frozen=True, slots=True)
class KernelCapabilities(MoECapabilities):
    """Capabilities of Triton kernels, which run on a GPU or in Triton's interpreter."""

    def unsupported(self, requirements: MoERequirements) -> list[Reason]:
        return MoECapabilities.unsupported(self, count_interpreter(requirements))


@hookimpl
def register_moe_runners(registry: KindRegistry) -> None:
    """Add the in-tree MoE runners."""
    registry.add(
        "torch_native",
        "frame.plugins.moe_runners.torch_native:TorchNative",
        capabilities=MoECapabilities(devices=("cpu", "cuda"), biased=True, batch_invariant=True),
        rank=10,
        summary="PyTorch operations: grouped matrix multiplication, or all experts at once for small ones.",
    )
    registry.add(
        "triton",
        "frame.plugins.moe_runners.triton:Triton",
        capabilities=KernelCapabilities(
            devices=("cuda",), min_compute_capability=(8, 0), graphs=True, biased=True, batch_invariant=True
        ),
        requires=("triton>=3.4",),
        rank=30,
        summary="Triton kernels: bound by memory bandwidth for few tokens, on tensor cores for many.",
    )
    registry.add(
        "torch_grouped",
        "frame.plugins.moe_runners.torch_grouped:TorchGrouped",
        capabilities=MoECapabilities(devices=("cuda",), dtypes=("bfloat16",), min_compute_capability=(9, 0), graphs=True, biased=True),
        rank=20,
        summary="PyTorch's grouped matrix multiplication of tokens sorted by expert.",
    )
    registry.add(
        "deep_gemm",
        "frame.plugins.moe_runners.deep_gemm:DeepGemm",
        capabilities=MoECapabilities(devices=("cuda",), dtypes=("bfloat16",), min_compute_capability=(9, 0), graphs=True),
        requires=("sgl-deep-gemm>=0.1.4,<0.2", "triton>=3.4"),
        rank=5,
        summary="DeepGEMM's grouped matrix multiplication, in bfloat16 or float8 blocks. `auto` does not choose it.",
    )

"""Manifest of the in-tree samplers: records only. Must not import the plugins."""

from __future__ import annotations

from dataclasses import dataclass

from frame.core.interfaces.plugin import Reason
from frame.interfaces.sampler import SamplerCapabilities, SamplerRequirements
from frame.registration import KindRegistry, count_interpreter, hookimpl


@dataclass(frozen=True, slots=True)
class KernelCapabilities(SamplerCapabilities):
    """Capabilities of Triton kernels, which run on a GPU or in Triton's interpreter."""

    def unsupported(self, requirements: SamplerRequirements) -> list[Reason]:
        return SamplerCapabilities.unsupported(self, count_interpreter(requirements))


@hookimpl
def register_samplers(registry: KindRegistry) -> None:
    """Add the in-tree samplers."""
    package = "frame.plugins.samplers"
    registry.add(
        "triton",
        f"{package}.triton:TritonSampler",
        capabilities=KernelCapabilities(devices=("cuda",), min_compute_capability=(8, 0), batch_invariant=True),
        requires=("triton>=3.4",),
        summary="Draws by a Gumbel race in Triton kernels, with filters that need no sorting.",
        rank=20,
    )
    registry.add(
        "torch",
        f"{package}.torch:TorchSampler",
        capabilities=SamplerCapabilities(batch_invariant=True),
        summary="Draws by the same race in PyTorch: for CPUs, and the reference of others.",
        rank=10,
    )

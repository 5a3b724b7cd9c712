"""Manifest of the in-tree MoE runners: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.moe import RUNNER_API, MoECapabilities
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_moe_runners(registry: KindRegistry) -> None:
    """Add the in-tree MoE runners."""
    registry.add(
        "torch_native",
        "frame.plugins.moe_runners.torch_native:TorchNative",
        capabilities=MoECapabilities(devices=("cpu", "cuda")),
        api=RUNNER_API,
        rank=10,
        summary="PyTorch operations only: grouped multiplication, or all experts at once for small ones.",
    )

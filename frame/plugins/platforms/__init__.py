"""Manifest of the in-tree platforms: records only. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.platform import PlatformCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_platforms(registry: KindRegistry) -> None:
    """Add the in-tree platforms."""
    registry.add(
        "cpu", "frame.plugins.platforms.cpu:CpuPlatform", capabilities=PlatformCapabilities(), summary="The host's cores and memory."
    )
    registry.add(
        "cuda",
        "frame.plugins.platforms.cuda:CudaPlatform",
        capabilities=PlatformCapabilities(find_devices="frame.plugins.platforms.nvml:find_devices", graphs=True),
        rank=10,
        summary="NVIDIA GPUs, by PyTorch's CUDA build.",
    )

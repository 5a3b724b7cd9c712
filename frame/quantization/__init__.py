"""Manifest of the in-tree quantization methods: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.quantization import API, QuantizationCapabilities
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


@hookimpl
def register_quantization_methods(registry: KindRegistry) -> None:
    """Add the in-tree quantization methods."""
    registry.add(
        "none",
        "frame.quantization.none:Plain",
        capabilities=QuantizationCapabilities(devices=("cpu", "cuda"), checkpoints=(None,)),
        api=API,
        rank=10,
        summary="Plain weights in the model's own type.",
    )

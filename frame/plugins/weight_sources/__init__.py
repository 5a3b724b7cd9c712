"""Manifest of the in-tree weight sources: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.weights import WeightSourceCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_weight_sources(registry: KindRegistry) -> None:
    """Add the in-tree weight sources."""
    here = "frame.plugins.weight_sources"
    registry.add(
        "safetensors",
        f"{here}.safetensors:SafetensorsSource",
        capabilities=WeightSourceCapabilities(),
        rank=50,
        summary="Reads safetensors files; refuses pickled weights.",
    )
    registry.add(
        "dummy",
        f"{here}.dummy:DummySource",
        capabilities=WeightSourceCapabilities(reads_checkpoint=False),
        summary="Random weights, for measurements without a checkpoint.",
    )
    for name in ("bitsandbytes", "gguf"):
        registry.suggest_distribution(name, f"frame-{name}")

"""Manifest of the in-tree adapter formats: records only. Must not import the plugins."""

from __future__ import annotations

from frame.interfaces.adapter import AdapterCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_adapters(registry: KindRegistry) -> None:
    """Add the in-tree adapter formats."""
    for name, uses_dora, summary in (
        ("lora", None, "PEFT's LoRA: rsLoRA, patterns, embeddings, experts, aLoRA."),
        ("dora", True, "PEFT's DoRA: LoRA whose sums have trained norms."),
    ):
        registry.add(
            name,
            f"frame.plugins.adapters.{name}:{name.capitalize()}Format",
            summary=summary,
            capabilities=AdapterCapabilities(selects=(("peft_type", "LORA"), ("use_dora", uses_dora))),
        )

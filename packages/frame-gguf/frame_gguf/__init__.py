"""The records of frame-gguf. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.weight_format import FormatCapabilities
from frame.interfaces.weights import WeightSourceCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_weight_sources(registry: KindRegistry) -> None:
    """Add the source of GGUF files."""
    registry.add(
        "gguf", "frame_gguf.source:GgufSource", capabilities=WeightSourceCapabilities(checkpoints=("gguf",)), rank=60,
        summary="Reads a GGUF file of the llama and qwen families.",
    )  # fmt: skip


@hookimpl
def register_weight_formats(registry: KindRegistry) -> None:
    """Add the format of GGUF files."""
    registry.add(
        "gguf", "frame_gguf.format:Gguf", rank=20,
        capabilities=FormatCapabilities(checkpoints=("gguf", None), quant_types=("plain", "int4", "int8")),
        summary="GGUF: Q4_0, Q4_1, Q4_K, Q8_0 and Q6_K as integers per block, other types dequantized.",
    )  # fmt: skip

"""The records of frame-bitsandbytes. Must not import the plugins."""

from __future__ import annotations

from frame.core.interfaces.weight_format import FormatCapabilities
from frame.interfaces.weights import WeightSourceCapabilities
from frame.registration import KindRegistry, hookimpl


@hookimpl
def register_weight_sources(registry: KindRegistry) -> None:
    """Add the source of bitsandbytes checkpoints."""
    registry.add(
        "bitsandbytes",
        "frame_bitsandbytes.source:BitsAndBytesSource",
        capabilities=WeightSourceCapabilities(checkpoints=("bitsandbytes",)),
        rank=60,  # before sources of safetensors files, which read the tensors as they are stored
        summary="Reads safetensors files whose weights bitsandbytes quantized.",
    )


@hookimpl
def register_weight_formats(registry: KindRegistry) -> None:
    """Add the format of bitsandbytes checkpoints."""
    registry.add(
        "bitsandbytes",
        "frame_bitsandbytes.format:BitsAndBytes",
        capabilities=FormatCapabilities(checkpoints=("bitsandbytes",), quant_types=("plain", "nf4", "int8")),
        rank=20,
        summary="bitsandbytes: NF4 in blocks, and LLM.int8 with a scale per output.",
    )

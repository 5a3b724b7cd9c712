"""Manifest of the in-tree quantization methods. Records only; nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it is selected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from frame.core.interfaces.quantization import QuantizationCapabilities
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


class Int8Options(BaseModel):
    """Settings of `int8_weight_only`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ignore: tuple[str, ...] = Field(
        ("kv_b_proj$",), description="Regular expressions of layers that stay unquantized; kv_b_proj is dequantized after loading anyway."
    )


class Fp8Options(BaseModel):
    """Settings of `fp8`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ignore: tuple[str, ...] = Field(
        ("kv_b_proj$",),
        description="Regular expressions of layers that stay unquantized; for unquantized checkpoints. kv_b_proj is dequantized anyway.",
    )


@hookimpl
def register_quantization_methods(registry: KindRegistry) -> None:
    """Add the in-tree quantization methods."""
    registry.add(
        "none",
        "frame.quantization.none:Plain",
        capabilities=QuantizationCapabilities(devices=("cpu", "cuda"), checkpoints=(None,)),
        rank=10,
        summary="Unquantized weights in the model's own type.",
    )
    registry.add(
        "int8_weight_only",
        "frame.quantization.int8_weight_only:Int8WeightOnly",
        capabilities=QuantizationCapabilities(devices=("cpu",), checkpoints=(None,)),
        options=Int8Options,
        summary="Int8 weights with one scale per output, quantized while loading; for small batches on the CPU.",
    )
    registry.add(
        "fp8",
        "frame.quantization.fp8:Fp8",
        capabilities=QuantizationCapabilities(devices=("cpu", "cuda"), checkpoints=("fp8", "compressed-tensors", "modelopt", None)),
        options=Fp8Options,
        rank=20,
        summary="fp8 (e4m3) weights, scaled per block, output or tensor, stored so or quantized while loading; fp8 activations.",
    )

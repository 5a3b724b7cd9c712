"""Manifest of the in-tree quantization methods: records only, nothing heavy is imported here.

Each record names its target as "module:Class"; the registry imports it when it has been chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from frame.core.interfaces.quantization import API, QuantizationCapabilities
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry


class Int8Options(BaseModel):
    """Settings of `int8_weight_only`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ignore: tuple[str, ...] = Field(
        ("kv_b_proj$",), description="Regular expressions of layers that stay plain; kv_b_proj is rearranged after loading anyway."
    )


class Fp8Options(BaseModel):
    """Settings of `fp8`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ignore: tuple[str, ...] = Field(
        ("kv_b_proj$",),
        description="Regular expressions of layers of a plain checkpoint that stay plain; kv_b_proj is rearranged after loading anyway.",
    )


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
    registry.add(
        "int8_weight_only",
        "frame.quantization.int8_weight_only:Int8WeightOnly",
        capabilities=QuantizationCapabilities(devices=("cpu",), checkpoints=(None,)),
        options=Int8Options,
        api=API,
        summary="Int8 weights, one scale an output, quantized while loading; for small batches on the CPU.",
    )
    registry.add(
        "fp8",
        "frame.quantization.fp8:Fp8",
        capabilities=QuantizationCapabilities(devices=("cpu", "cuda"), checkpoints=("fp8", "compressed-tensors", "modelopt", None)),
        options=Fp8Options,
        api=API,
        rank=20,
        summary="e4m3 weights with scales by block, output or tensor, stored so or rounded while loading; larger batches are rounded too.",
    )

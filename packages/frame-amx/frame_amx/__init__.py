"""The record of frame-amx. Must not import the plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frame.core.interfaces.gemm_kernel import GemmCapabilities, Speed
from frame.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from frame.plugins.registry import KindRegistry

# Relative to oneDNN's product with a bfloat16 weight in its own layout, in the layers of Qwen3-0.6B
# on one core of a Xeon (benchmarks/cpu_products.py, 2026-11-23-cpu-products-amx.json).
_SPEEDS = (
    *(Speed("plain", 32, 1.2), Speed("plain", 0, 1.04)),
    *(Speed("int8", 16, 1.8), Speed("int8", 64, 1.3), Speed("int8", 0, 0.8)),
    *(Speed("int4", 16, 2.2), Speed("int4", 32, 1.5), Speed("int4", 0, 0.87)),
)


@hookimpl
def register_gemm_kernels(registry: KindRegistry) -> None:
    """Add the kernel of AMX tiles."""
    registry.add(
        "amx",
        "frame_amx.kernel:AmxKernel",
        capabilities=GemmCapabilities(devices=("cpu",), speeds=_SPEEDS, dtypes=("bfloat16",)),
        rank=110,
        summary="bfloat16, int8 and int4 weights by AMX tiles of Intel CPUs, read once from where they are.",
    )

"""Measured speeds of the in-tree backends by GPU model, which `auto` compares. Plain data.

Taken from `benchmarks/results/2026-11-21-attention-backends-h200-4.json`
(`benchmarks/attention_backends.py`): geometric means over the batches, in TB/s for decode and
TFLOP/s for extend. Triton's latent extend is from `-2.json`, measured with the tile that it uses
now. A backend or GPU that is not listed is judged by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from frame.core.interfaces.attention import Measured

H200 = ("NVIDIA H200", (9, 0))  # the driver's device name, and the compute capability, which other GPUs share

MEASURED: Mapping[str, tuple[Measured, ...]] = MappingProxyType(
    {
        "triton": (
            Measured(*H200, "mha", "extend", 338),
            Measured(*H200, "mha", "decode", 2.15),
            Measured(*H200, "mla", "extend", 222),
            Measured(*H200, "mla", "decode", 0.77),
        ),
        "flashinfer": (
            Measured(*H200, "mha", "extend", 408),
            Measured(*H200, "mha", "decode", 1.88),
            Measured(*H200, "mla", "extend", 194),
            Measured(*H200, "mla", "decode", 1.08),
        ),
    }
)

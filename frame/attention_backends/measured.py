"""How fast our backends were, by name: what `auto` goes by on cards of which it is known. Plain data.

Written from `benchmarks/results/2026-11-21-attention-backends-h200-4.json` (`benchmarks/attention_backends.py`): geometric means over the
batches, TB/s of decodes and TFLOP/s of extends; Triton's latent extends from `-2.json`, with the tile that they have again. A backend
that is not here, or a card, is judged by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from frame.core.interfaces.attention import Measured

H200 = ("NVIDIA H200", (9, 0))  # the driver's name, and the compute capability, which other cards have as well

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

"""How fast our backends were, by name: what `auto` goes by on cards of which it is known. Plain data.

Written from `benchmarks/results/2026-11-21-attention-backends-h200-2.json` (`benchmarks/attention_backends.py`): geometric means over the
batches, TB/s of decodes and TFLOP/s of extends. A backend that is not here, or a card, is judged by rank. Multi-head decodes are not here:
FlashInfer's kernels alone are a little faster, but its plans cost the host more than that in every step of a small model, and rows that
share a prefix are not decoded together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from frame.core.interfaces.attention import Measured

H200 = (9, 0)

MEASURED: Mapping[str, tuple[Measured, ...]] = MappingProxyType(
    {
        "triton": (
            Measured(H200, "mha", "extend", 283),
            Measured(H200, "mla", "extend", 222),
            Measured(H200, "mla", "decode", 0.36),
        ),
        "flashinfer": (
            Measured(H200, "mha", "extend", 379),
            Measured(H200, "mla", "extend", 198),
            Measured(H200, "mla", "decode", 1.09),
        ),
    }
)

"""Which kernel multiplies how many rows with a weight, by its size: what was measured, and a rule for sizes that were not.

`benchmarks/skinny_linear.py` measures; docs/performance.md has the figures. Knows no tensor and loads no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is launched: a kernel and its sizes."""

    kernel: Literal["vector", "fragment"]
    warps: int
    depth: int = 1  # tiles of weights that a program has under way
    outputs: int = 16  # columns of the result that a program of the vector kernel computes
    chunks: int = 4  # of 32 inputs, that a warp of the fragment kernel multiplies at a time
    programs: int = 0  # of the fragment kernel on each multiprocessor; 0: as many as there are blocks of 16 outputs


def plans(outputs: int, inner: int, gated: bool = False) -> tuple[Plan | None, ...]:
    """By the number of rows, 0 … MAX_ROWS: the plan, or None where PyTorch's product is as fast."""
    return (None, *(plan(rows, outputs, inner, gated) for rows in range(1, MAX_ROWS + 1)))


def plan(rows: int, outputs: int, inner: int, gated: bool = False) -> Plan | None:
    """The plan for `rows` rows; `outputs` counts gate and up both."""
    if rows <= 2:
        return Plan("vector", 8, 1, outputs=4) if outputs < 4096 else Plan("vector", 4, 1, outputs=4 if gated else 8)
    if rows <= 8 and outputs * inner <= _SMALL:
        return Plan("fragment", 4, 2, chunks=2)
    return None


_SMALL = 12 << 20  # weights

"""Which kernel multiplies how many rows with a weight, by its size: what was measured, and a rule for sizes that were not.

What decides is whether the programs are few enough to run all at once, or nearly fill their last round, with enough weights under
way on each multiprocessor. `benchmarks/skinny_linear.py` measures (one NVIDIA H200 of 132 multiprocessors); docs/performance.md has the
figures. Knows no tensor and loads no Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_ROWS = 16
_SMALL = 24 << 20  # weights; with larger ones, PyTorch multiplies three rows and more as fast
_TINY = 4 << 20  # likewise nine rows and more
_FEW = 2304  # outputs
_SHORT = 1024  # inputs


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is launched: a kernel and its sizes."""

    kernel: Literal["vector", "fragment"]
    warps: int
    depth: int  # tiles of weights that a program has under way
    outputs: int = 16  # columns of the result that a program of the vector kernel computes
    chunks: int = 4  # of 32 inputs, that a warp of the fragment kernel multiplies at a time


def plans(outputs: int, inner: int, gated: bool = False) -> tuple[Plan | None, ...]:
    """By the number of rows, 0 … MAX_ROWS: the plan, or None where PyTorch's product is as fast."""
    return (None, *(plan(rows, outputs, inner, gated) for rows in range(1, MAX_ROWS + 1)))


def plan(rows: int, outputs: int, inner: int, gated: bool = False) -> Plan | None:
    """The plan for `rows` rows; `outputs` counts gate and up both."""
    weights = outputs * inner
    if rows == 1:
        return _one_row(outputs, inner, gated)
    if rows == 2 and (outputs <= _FEW or (weights > _SMALL // 2 and inner > _SHORT)):
        return _two_rows(outputs, gated)
    if rows <= 8 and (weights <= _SMALL or inner <= _SHORT):
        return _eight_rows(outputs, inner, gated)
    if rows <= 16 and weights <= _TINY and not gated:
        return Plan("fragment", 8, 4, chunks=2) if outputs <= _FEW else Plan("fragment", 4, 4, chunks=2)
    return None


def _one_row(outputs: int, inner: int, gated: bool) -> Plan:
    if gated:
        return Plan("vector", 4, 1, outputs=4)
    if outputs <= _FEW:
        return Plan("vector", 8, 1, outputs=4)
    if outputs <= 4096 and inner > 2048:
        return Plan("vector", 2, 2, outputs=4)
    if inner > 8192:
        return Plan("vector", 8, 1, outputs=8)
    if 6400 < outputs <= 7168:  # one program more a multiprocessor than run at once, with eight outputs each
        return Plan("vector", 4, 1, outputs=4)
    return Plan("vector", 4, 1, outputs=8)


def _two_rows(outputs: int, gated: bool) -> Plan:
    if outputs <= _FEW:
        return Plan("vector", 8, 1, outputs=4)
    if gated or outputs <= 4096 or 5120 < outputs <= 7168:
        return Plan("vector", 4, 1, outputs=4)
    if outputs <= 5120:
        return Plan("vector", 4, 1, outputs=8)
    return Plan("vector", 2, 2, outputs=4)


def _eight_rows(outputs: int, inner: int, gated: bool) -> Plan:
    if gated:
        return Plan("fragment", 4, 2, chunks=2)
    if outputs <= _FEW:
        return Plan("fragment", 8, 4, chunks=2)
    if outputs > 4608 and inner <= _SHORT:
        return Plan("fragment", 4, 4, chunks=2)
    return Plan("fragment", 4, 2, chunks=4)

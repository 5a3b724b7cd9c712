# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""How the kernels of this folder are launched: warps, rows a program, and the two halves of programmatic dependent launch.

The law of dependent launches: a kernel that is launched so waits (`wait_for_previous`) in every program before it reads what an earlier
kernel wrote, and before it writes anything; then a chain of such kernels is in order throughout. Weights, which no step writes, may be
read before. Knows no kernel.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from frame import kernels

_ELEMENTS_PER_LOAD = 8  # 16 bytes of the narrow types
_MAX_WARPS = 16
_INTERPRETED_ROWS = 64  # the interpreter takes about a millisecond a program, whatever its size


@cache
def options(device: torch.device, warps: int) -> dict[str, Any]:
    """The keyword arguments of a launch on `device`: `num_warps`, the constant `PDL`, and the launch's own flag for it."""
    if kernels.pdl(device):
        return {"num_warps": warps, "PDL": True, "launch_pdl": True}
    return {"num_warps": warps, "PDL": False}


def power_of_2(number: int) -> int:
    """The least power of two that is not below `number`; Triton's own takes a microsecond or more, as does its `cdiv`."""
    return 1 << max(0, number - 1).bit_length()


def blocks_of(number: int, size: int) -> int:
    """How many blocks of `size` hold `number`."""
    return -(-number // size)


def warps_for(elements: int, loads: int = 1) -> int:
    """Warps of a program over as many elements, such that a thread holds as many loads' worth of them, if the program is small enough."""
    wanted = power_of_2(max(1, elements // (32 * _ELEMENTS_PER_LOAD * loads)))
    return min(wanted, _MAX_WARPS)


def rows_per_program(rows: int, most: int) -> int:
    """How many of `rows` short rows share a program, a power of two: `most` on a device, where that is more than none."""
    wanted = power_of_2(rows)
    return min(wanted, _INTERPRETED_ROWS if kernels.INTERPRETED else max(1, most))


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the kernel behind this one be launched already: it waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel ahead has ended and what it wrote is visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()

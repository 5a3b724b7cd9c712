# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Launch sizes and launches of Triton kernels: warps, rows per program, programmatic dependent
launch (PDL).

Contract of PDL: every program of a kernel calls `wait_for_previous` before it reads what an earlier
kernel wrote, and before it writes. A chain of such kernels then runs in order. Weights, and states
that only an earlier step wrote, may be read before the wait: a step begins with a kernel that is
launched without PDL, and thus after all earlier steps. This module depends on no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels import nvidia

_ELEMENTS_PER_LOAD = 8  # 16 bytes of bfloat16 or float16
_MAX_WARPS = 16
_ALIGNMENT = 15  # address bits that must be zero for 16-byte loads
_INTERPRETED_ROWS = 64  # the interpreter takes about 1 ms per program, whatever its size


@cache
def launch_options(device: torch.device, warps: int) -> dict[str, Any]:
    """The keyword arguments of a launch on `device`: `num_warps`, the constant `PDL`, and
    `launch_pdl` where it applies."""
    if kernels.supports_pdl(device):
        return {"num_warps": warps, "PDL": True, "launch_pdl": True}
    return {"num_warps": warps, "PDL": False}


@cache
def count_tma_processors(device: torch.device) -> int:
    """The number of multiprocessors with a TMA unit and warp-group MMA (compute capability 9.0); 0
    on other devices."""
    if device.type != "cuda" or nvidia.get_compute_capability(device)[0] != 9:
        return 0
    return nvidia.count_multiprocessors(device)


class PreparedLaunch:
    """A kernel variant compiled for arguments like `example`; call it with a grid, tensors and
    numbers.

    Triton's own launch inspects every argument to find the compiled variant, which takes twice as
    long as the launch itself. This class finds the variant once; the caller guarantees that later
    arguments fit it. The kernel's parameters are, in this order: tensors or tensor descriptors,
    numbers, constants. Tensors must be 16-byte aligned, as whole PyTorch tensors are; an unaligned
    tensor takes Triton's own launch, which selects another variant. Numbers may differ from the
    example only where the kernel does not specialise on them (`do_not_specialize`); the other
    numbers belong to the key under which the caller caches this object.
    """

    def __init__(self, kernel: Any, example: Sequence[Any], constants: dict[str, Any], device: torch.device, warps: int) -> None:
        self.kernel = kernel
        self.constants = constants | launch_options(device, warps)
        self.compiled = None if kernels.INTERPRETED else kernel.warmup(*example, grid=(1,), **self.constants)
        self.values = tuple(self.constants[name] for name in kernel.arg_names if name in self.constants)

    def __call__(self, grid: tuple[int, int, int], tensors: tuple[Any, ...], numbers: tuple[int | float, ...]) -> None:
        pointers = [tensor.data_ptr() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]
        misplaced = 0
        for pointer in pointers:
            if type(pointer) is int:
                misplaced |= pointer
        if self.compiled is None or misplaced & _ALIGNMENT:
            self.kernel[grid](*tensors, *numbers, **self.constants)
        else:
            self.compiled[grid](*pointers, *numbers, *self.values)


def next_power_of_2(number: int) -> int:
    """The smallest power of two ≥ `number`. Triton's `next_power_of_2` and `cdiv` take a
    microsecond or more each."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(number: int, size: int) -> int:
    """`number` / `size`, rounded up."""
    return -(-number // size)


def choose_warps(elements: int, loads: int = 1) -> int:
    """Warps for a program over `elements` elements, so that each thread holds `loads` 16-byte
    loads; at most 16 warps."""
    padded = next_power_of_2(max(1, elements // (32 * _ELEMENTS_PER_LOAD * loads)))
    return min(padded, _MAX_WARPS)


def choose_rows_per_program(rows: int, maximum: int) -> int:
    """How many short rows one program takes, a power of two: at most `maximum` (a power of two or
    0) on a GPU, at most 64 under the interpreter."""
    padded = next_power_of_2(rows)
    return min(padded, _INTERPRETED_ROWS if kernels.INTERPRETED else max(1, maximum))


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to launch; that kernel waits by itself (PDL)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible (PDL)."""
    if PDL:
        tl.extra.cuda.gdc_wait()

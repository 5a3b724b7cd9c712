# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""How the kernels of this folder are launched: warps, rows a program, multiprocessors, and the two halves of programmatic dependent launch.

Triton's own launch looks at every argument anew, to find the code compiled for such ones, which takes twice as long as the launch does.
`PreparedLaunch` looks once; what it takes for granted after that is the caller's to keep.

The law of dependent launches: a kernel that is launched so waits (`wait_for_previous`) in every program before it reads what an earlier
kernel wrote, and before it writes anything; then a chain of such kernels is in order throughout. Weights, which no step writes, may be
read before. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from frame import kernels

_ELEMENTS_PER_LOAD = 8  # 16 bytes of the narrow types
_MAX_WARPS = 16
_ALIGNMENT = 15  # bits of an address that a wide load wants to be zero
_INTERPRETED_ROWS = 64  # the interpreter takes about a millisecond a program, whatever its size


@cache
def launch_options(device: torch.device, warps: int) -> dict[str, Any]:
    """The keyword arguments of a launch on `device`: `num_warps`, the constant `PDL`, and the launch's own flag for it."""
    if kernels.supports_pdl(device):
        return {"num_warps": warps, "PDL": True, "launch_pdl": True}
    return {"num_warps": warps, "PDL": False}


@cache
def count_tma_processors(device: torch.device) -> int:
    """Multiprocessors that copy boxes into the memory that tensor cores read (compute capability 9.0); 0 where there are none."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class PreparedLaunch:
    """A kernel compiled for pointers to types, and for numbers, like the `example`; called with a grid, tensors and numbers.

    The kernel's parameters are tensors or Triton's descriptors of some, then numbers, then constants. Tensors begin at multiples of 16
    bytes, as those of PyTorch do that are not parts of others; if not, Triton finds other code. Numbers may differ from the example's
    where the kernel does not specialise on them (`do_not_specialize`); others are part of the key under which an object of this class
    is kept.
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
    """The least power of two that is not below `number`; Triton's own takes a microsecond or more, as does its `cdiv`."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(number: int, size: int) -> int:
    """How many blocks of `size` hold `number`."""
    return -(-number // size)


def choose_warps(elements: int, loads: int = 1) -> int:
    """Warps of a program over as many elements, such that a thread holds as many loads' worth of them, if the program is small enough."""
    wanted = next_power_of_2(max(1, elements // (32 * _ELEMENTS_PER_LOAD * loads)))
    return min(wanted, _MAX_WARPS)


def choose_rows_per_program(rows: int, most: int) -> int:
    """How many of `rows` short rows share a program, a power of two: on a device `most`, a power of two or 0, or one."""
    wanted = next_power_of_2(rows)
    return min(wanted, _INTERPRETED_ROWS if kernels.INTERPRETED else max(1, most))


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the kernel behind this one be launched already: it waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the kernel ahead has ended and what it wrote is visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()

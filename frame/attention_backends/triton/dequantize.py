# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Gathers rows of an fp8 or int8 cache as contiguous rows of a wider type.

Used by the `triton` backend for prompts: each of their keys is multiplied by many tiles of queries,
so one conversion costs less than one in each tile. Must not know layers or page tables.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from frame.kernels import INTERPRETED, launch
from frame.kernels.launch import PreparedLaunch, launch_dependents, wait_for_previous

_ELEMENTS = 8192  # of one program, about
_WARPS = 8


class Dequantizer:
    """Launches the kernel; keeps a compiled variant for each type and width of rows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launches: dict[tuple[Any, ...], PreparedLaunch] = {}

    def gather(
        self, cached: torch.Tensor, places: torch.Tensor, factor: float, scales: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows of `cached` [slots, …] at `places` int64 [rows] -> [rows, …] in `dtype`: the numbers
        times `factor`, or times `scales` float16 [slots, …] of an int8 cache. All tensors are
        contiguous, and the last dimension is one head's."""
        width = cached.shape[-1]
        heads, block = cached[0].numel() // width, launch.next_power_of_2(width)
        stored = torch.float32 if INTERPRETED else dtype  # the interpreter cuts bits off instead of rounding to bfloat16
        out = torch.empty(len(places), *cached.shape[1:], dtype=stored, device=cached.device)
        count = len(places) * heads
        lines = launch.choose_rows_per_program(count, max(1, _ELEMENTS // block))
        tensors = cached, cached if scales is None else scales, places, out
        key = cached.dtype, dtype, heads, width, lines
        if (prepared := self._launches.get(key)) is None:
            sizes = {"HEADS": heads, "WIDTH": width, "BLOCK_LINES": lines, "BLOCK": block}
            constants = {**sizes, "HAS_SCALES": scales is not None}
            prepared = PreparedLaunch(_dequantize_kernel, (*tensors, count, factor), constants, self._device, _WARPS)
            self._launches[key] = prepared
        prepared((launch.ceil_div(count, lines), 1, 1), tensors, (count, factor))
        return out.to(dtype)


@triton.jit(do_not_specialize=["count"])
def _dequantize_kernel(
    cached, scales, places, out, count, factor,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_LINES: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of lines; a line is one head of one row."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    lines = tl.program_id(0) * BLOCK_LINES + tl.arange(0, BLOCK_LINES)
    columns = tl.arange(0, BLOCK)
    valid = lines < count
    sources = tl.load(places + lines // HEADS, mask=valid, other=0) * HEADS + lines % HEADS
    mask = valid[:, None] & (columns < WIDTH)[None, :]
    numbers = tl.load(cached + sources[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        numbers *= tl.load(scales + sources, mask=valid, other=0.0).to(tl.float32)[:, None]
    else:
        numbers *= factor
    tl.store(out + lines.to(tl.int64)[:, None] * WIDTH + columns[None, :], numbers.to(out.dtype.element_ty), mask=mask)

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Chooses the branches that a pass of a tree of drafted tokens extends, and the tokens that are
drafted, in one launch each. The PyTorch versions, which say what the arguments are, are in
`frame.speculation.tree_choice`. Used by the passes of device drafters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.sampling.sampling import MINUS_INFINITY


@triton.jit
def _branch_kernel(
    values, ids, bits, values_out, ids_out, numbers_out, sources_out, bits_out, start,
    WIDTH: tl.constexpr, LANES: tl.constexpr, CELLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. LANES, CELLS: WIDTH and its square, rounded up to powers of two."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row, lanes, cells = tl.program_id(0), tl.arange(0, LANES), tl.arange(0, CELLS)
    left = tl.load(values + row * WIDTH * WIDTH + cells, mask=cells < WIDTH * WIDTH, other=MINUS_INFINITY)
    best_keys, chosen = tl.full([LANES], MINUS_INFINITY, tl.float32), tl.full([LANES], 0, tl.int32)
    for lane in range(WIDTH):
        best, cell = tl.max(left, 0, return_indices=True)
        best_keys, chosen = tl.where(lanes == lane, best, best_keys), tl.where(lanes == lane, cell, chosen)
        left = tl.where(cells == cell, MINUS_INFINITY, left)
    is_in, places, branch = lanes < WIDTH, row * WIDTH + lanes, chosen // WIDTH
    seen = tl.load(bits + row * WIDTH + branch, mask=is_in, other=0)
    tl.store(values_out + places, best_keys, mask=is_in)
    tl.store(ids_out + places, tl.load(ids + row * WIDTH * WIDTH + chosen, mask=is_in, other=0), mask=is_in)
    tl.store(numbers_out + places, (chosen + start).to(tl.int64), mask=is_in)
    tl.store(sources_out + places, (row * WIDTH + branch).to(tl.int64), mask=is_in)
    tl.store(bits_out + places, (seen << (lanes + WIDTH - branch)) | 1, mask=is_in)


@triton.jit
def _node_kernel(
    values, ids, numbers, out, count, branches, maximum,
    WIDTH: tl.constexpr, CELLS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows. CELLS: count rounded up to a power of two."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row, cells = tl.program_id(0), tl.arange(0, CELLS)
    left = tl.load(values + row * count + cells, mask=cells < count, other=MINUS_INFINITY)
    branch = cells // WIDTH - 1
    parents = tl.load(numbers + row * branches + branch, mask=(branch >= 0) & (branch < branches), other=-1)
    nodes = tl.full([CELLS], 0, tl.int32)
    for node in range(maximum):
        _, cell = tl.max(left, 0, return_indices=True)
        parent = tl.sum(tl.where(cells == cell, parents, 0), 0)
        before = tl.sum(tl.where(cells == parent, nodes, 0), 0)
        place = out + row * 2 * maximum + node
        tl.store(place, tl.load(ids + row * count + cell))
        tl.store(place + maximum, before.to(tl.int64))
        left, nodes = tl.where(cells == cell, MINUS_INFINITY, left), tl.where(cells == cell, node + 1, nodes)


def find_branches(values: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    """`choose_branches`. bits: int32 [rows, width], of the branches before. -> the fields of
    `Branches`."""
    rows, width = bits.shape
    best_keys = [torch.empty_like(bits, dtype=dtype) for dtype in (torch.float32, *(3 * (torch.int64,)), torch.int32)]
    _branch_kernel[(rows,)](
        values, ids, bits.contiguous(), *best_keys, start,
        width, next_power_of_2(width), next_power_of_2(width * width), **launch_options(bits.device, 1),
    )  # fmt: skip
    return tuple(best_keys)


def find_nodes(values: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor, width: int, maximum: int) -> torch.Tensor:
    """`choose_nodes`."""
    (rows, count), branches = ids.shape, numbers.shape[1]
    out = torch.empty(rows, 2, maximum, dtype=torch.int64, device=ids.device)
    _node_kernel[(rows,)](
        values, ids, numbers, out, count, branches, maximum, width, next_power_of_2(count), **launch_options(ids.device, 1)
    )
    return out

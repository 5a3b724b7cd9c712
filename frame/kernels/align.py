# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""(token, expert) pairs sorted by expert, in blocks of rows of one expert each, on the device and into buffers of fixed size.

A pair is `token * k + place`. The order of pairs inside an expert is not defined. Knows no expert's weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from frame.kernels.launch import begin, options, wait_for_previous

_ONE_PROGRAM = 8192  # pairs up to which one program sorts them all
_CHUNK = 1024  # pairs a program takes at a time


@dataclass(frozen=True, slots=True)
class Alignment:
    """`pairs` int32 [rows]: which pair each row is, or the number of pairs for a row that pads. `experts` int32 [blocks]: whose rows a
    block of `block` rows has. `used` int32 [1]: how many blocks there are; what lies behind them is not defined."""

    pairs: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor
    block: int


def align(ids: torch.Tensor, num_experts: int, block: int) -> Alignment:
    """Sort pairs by expert: ids int64 [tokens, k], contiguous, all of them in [0, num_experts)."""
    pairs, device = ids.numel(), ids.device
    blocks = (pairs + min(num_experts, pairs) * (block - 1)) // block
    numbers = torch.empty(blocks * (block + 1) + 1, dtype=torch.int32, device=device)
    found = Alignment(numbers[: blocks * block], numbers[blocks * block : -1], numbers[-1:], block)
    experts = triton.next_power_of_2(num_experts)
    alone = pairs <= _ONE_PROGRAM
    counters = (torch.empty if alone else torch.zeros)((2, experts), dtype=torch.int32, device=device)
    programs = 1 if alone else triton.cdiv(pairs, _CHUNK)
    for phase, grid in ((0, 1),) if alone else ((1, programs), (2, 1), (3, programs)):
        _align_kernel[(grid,)](
            ids, found.pairs, found.experts, found.used, counters, pairs, EXPERTS=experts, BLOCK=block, CHUNK=_CHUNK,
            COUNTS=phase <= 1, PLANS=phase in {0, 2}, PLACES=phase in {0, 3}, ALONE=alone, **options(device, 8 if phase else 16),
        )  # fmt: skip
    return found


@triton.jit
def _plan(counts, pairs_out, experts_out, used, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Where each expert's rows begin; its last rows, which pad, and its blocks are written."""
    PADS: tl.constexpr = 16  # rows that are filled at a time
    experts = tl.arange(0, EXPERTS)
    blocks = (counts + BLOCK - 1) // BLOCK
    ends = tl.cumsum(blocks, 0)
    firsts = ends - blocks
    tl.store(used, tl.sum(blocks))
    for number in range(tl.max(blocks)):
        tl.store(experts_out + firsts + number, experts, mask=number < blocks)
    rests = blocks * BLOCK - counts
    for start in range(0, BLOCK, PADS):
        pads = start + tl.arange(0, PADS)[None, :]
        places = (firsts * BLOCK + counts)[:, None] + pads
        tl.store(pairs_out + places, tl.full([EXPERTS, PADS], 0, tl.int32) + pairs, mask=pads < rests[:, None])
    return firsts * BLOCK


@triton.jit
def _align_kernel(
    ids,
    pairs_out,
    experts_out,
    used,
    counters,  # [2, EXPERTS]: pairs of each expert, the place of its next row
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS: tl.constexpr,
    PLANS: tl.constexpr,
    PLACES: tl.constexpr,
    ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    wait_for_previous(PDL)
    experts = tl.arange(0, EXPERTS)
    lanes = tl.arange(0, CHUNK)
    if ALONE:
        first, last = 0, pairs
    else:
        first = tl.program_id(0) * CHUNK
        last = tl.minimum(first + CHUNK, pairs)
    if COUNTS:
        counts = tl.zeros([EXPERTS], tl.int32)
        for start in range(first, last, CHUNK):
            inside = start + lanes < pairs
            counts += tl.histogram(tl.load(ids + start + lanes, mask=inside, other=0).to(tl.int32), EXPERTS, mask=inside)
        if not ALONE:
            tl.atomic_add(counters + experts, counts, mask=counts > 0, sem="relaxed")
    if PLANS:
        if not ALONE:
            counts = tl.load(counters + experts)
        tl.store(counters + EXPERTS + experts, _plan(counts, pairs_out, experts_out, used, pairs, EXPERTS, BLOCK))
    if PLACES:
        if ALONE:
            tl.debug_barrier()  # all threads see where the rows begin
        for start in range(first, last, CHUNK):
            inside = start + lanes < pairs
            expert = tl.load(ids + start + lanes, mask=inside, other=0)
            place = tl.atomic_add(counters + EXPERTS + expert, 1, mask=inside, sem="relaxed")
            tl.store(pairs_out + place, start + lanes, mask=inside)

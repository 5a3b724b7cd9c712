# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""(token, expert) pairs sorted by expert, in blocks of rows of one expert each, on the device and into buffers of fixed size.

A pair is `token * k + place`; an expert's pairs keep their order. Knows no expert's weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from frame.kernels.launch import begin, options, wait_for_previous

CHUNKS = 512, 2048, 4096  # pairs that a program takes at a time; more than the last are counted by a launch of their own


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
    chunk = next((size for size in CHUNKS if pairs <= size), CHUNKS[-1])
    chunks = triton.cdiv(pairs, chunk)
    counts, short = numbers, ids
    if chunks > 1:
        counts = torch.empty((chunks, experts), dtype=torch.int32, device=device)
        short = torch.empty(pairs, dtype=torch.int16, device=device)
        _count_kernel[(chunks,)](ids, short, counts, pairs, EXPERTS=experts, CHUNK=chunk, **options(device, chunk // 512))
    _align_kernel[(num_experts, chunks)](
        short, counts, found.pairs, found.experts, found.used, pairs, chunks, EXPERTS=experts, BLOCK=block, CHUNK=chunk,
        COUNTED=chunks > 1, **options(device, max(4, chunk // 512)),
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids, short, counts, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Grid: chunks. Pairs of each expert in a chunk; ids as int16, which every expert's programs read."""
    begin(PDL)
    wait_for_previous(PDL)
    lanes = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + lanes, mask=lanes < pairs, other=0).to(tl.int32)
    tl.store(short + lanes, expert.to(tl.int16), mask=lanes < pairs)
    found = tl.histogram(expert, EXPERTS, mask=lanes < pairs)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), found)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _align_kernel(
    ids,
    counts,  # int32 [chunks, EXPERTS], if COUNTED
    pairs_out,
    experts_out,
    used,
    pairs,
    chunks,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (experts, chunks). A program finds its expert's pairs in its chunk."""
    begin(PDL)
    wait_for_previous(PDL)
    mine = tl.program_id(0)
    chunk = tl.program_id(1)
    experts = tl.arange(0, EXPERTS)
    lanes = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + lanes, mask=lanes < pairs, other=0).to(tl.int32)
    if COUNTED:
        found = tl.zeros([EXPERTS], tl.int32)
        ahead = tl.zeros([EXPERTS], tl.int32)
        for each in range(chunks):
            here = tl.load(counts + each * EXPERTS + experts)
            found += here
            ahead += tl.where(each < chunk, here, 0)
    else:
        found = tl.histogram(expert, EXPERTS, mask=lanes < pairs)
        ahead = tl.zeros([EXPERTS], tl.int32)
    blocks = (found + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(experts < mine, blocks, 0))
    same = ((expert == mine) & (lanes < pairs)).to(tl.int32)
    place = first * BLOCK + tl.sum(tl.where(experts == mine, ahead, 0)) + tl.cumsum(same, 0) - 1
    tl.store(pairs_out + place, lanes, mask=same > 0)
    if chunk == 0:
        count = tl.sum(tl.where(experts == mine, found, 0))
        my_blocks = (count + BLOCK - 1) // BLOCK
        pads = tl.arange(0, BLOCK)
        nobody = tl.zeros([BLOCK], tl.int32)
        tl.store(pairs_out + first * BLOCK + count + pads, nobody + pairs, mask=pads < my_blocks * BLOCK - count)
        for block in range(0, my_blocks, BLOCK):
            tl.store(experts_out + first + block + pads, nobody + mine, mask=block + pads < my_blocks)
        if mine == 0:
            tl.store(used, tl.sum(blocks))

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""(token, expert) pairs sorted by expert, in blocks of rows of one expert each, on the device and into buffers of fixed size.

A pair is `token * k + place`; an expert's pairs keep their order. Knows no expert's weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.kernels.launch import Prepared, begin, blocks_of, power_of_2, wait_for_previous

CHUNKS = 512, 2048, 8192  # pairs that a program takes at a time; more than the last are counted by a launch of their own


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
    numbers = torch.empty(4 + blocks * (block + 1), dtype=torch.int32, device=device)  # all three parts begin at 16 bytes
    found = Alignment(numbers[4 : 4 + blocks * block], numbers[4 + blocks * block :], numbers[:1], block)
    experts = power_of_2(num_experts)
    chunk = next((size for size in CHUNKS if pairs <= size), CHUNKS[-1])
    chunks = blocks_of(pairs, chunk)
    counts, short = numbers, ids
    if chunks > 1:
        counts = torch.empty((chunks, experts), dtype=torch.int32, device=device)
        short = torch.empty(pairs, dtype=torch.int16, device=device)
        _prepared_count(experts, chunk, device)((chunks, 1, 1), (ids, short, counts), (pairs,))
    launch = _prepared_align(experts, block, chunk, power_of_2(max(16, chunks)) if chunks > 1 else 0, device)
    launch((num_experts, chunks, 1), (short, counts, found.pairs, found.experts, found.used), (pairs, chunks))
    return found


@lru_cache(maxsize=64)
def _prepared_count(experts: int, chunk: int, device: torch.device) -> Prepared:
    types = torch.int64, torch.int16, torch.int32, 0
    return Prepared(_count_kernel, types, {"EXPERTS": experts, "CHUNK": chunk}, device, chunk // 256)


@lru_cache(maxsize=64)
def _prepared_align(experts: int, block: int, chunk: int, chunks: int, device: torch.device) -> Prepared:
    types = torch.int16 if chunks else torch.int64, *[torch.int32] * 4, 0, 0
    constants = {"EXPERTS": experts, "BLOCK": block, "CHUNK": chunk, "CHUNKS": chunks}
    return Prepared(_align_kernel, types, constants, device, min(16, chunk // 128))


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
    counts,  # int32 [chunks, EXPERTS], if any were counted
    pairs_out,
    experts_out,
    used,
    pairs,
    chunks,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,  # at least as many as were counted; 0: none were
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
    if CHUNKS > 0:
        each = tl.arange(0, CHUNKS)[:, None]
        all_counts = tl.load(counts + each * EXPERTS + experts[None, :], mask=each < chunks, other=0)
        found = tl.sum(all_counts, 0)
        ahead = tl.sum(tl.where(each < chunk, all_counts, 0), 0)
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

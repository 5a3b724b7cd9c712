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

_FEW, _CHUNK = 512, 4096  # pairs that a program takes at a time, so that there are few compiled forms
_COUNTED = 8192  # more pairs than that are counted by a launch of its own, not by every program


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
    chunk = _FEW if pairs <= _FEW else _CHUNK
    counts = numbers
    if pairs > _COUNTED:
        counts = torch.zeros(experts, dtype=torch.int32, device=device)
        _count_kernel[(triton.cdiv(pairs, 1024),)](ids, counts, pairs, EXPERTS=experts, CHUNK=1024, **options(device, 4))
    _align_kernel[(num_experts,)](
        ids, counts, found.pairs, found.experts, found.used, pairs, EXPERTS=experts, BLOCK=block, CHUNK=chunk, COUNTED=pairs > _COUNTED,
        **options(device, max(4, chunk // 512)),
    )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids, counts, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    wait_for_previous(PDL)
    lanes = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + lanes, mask=lanes < pairs, other=0).to(tl.int32)
    found = tl.histogram(expert, EXPERTS, mask=lanes < pairs)
    tl.atomic_add(counts + tl.arange(0, EXPERTS), found, mask=found > 0, sem="relaxed")


@triton.jit(do_not_specialize=["pairs"])
def _align_kernel(
    ids,
    counts,  # int32 [EXPERTS], if COUNTED
    pairs_out,
    experts_out,
    used,
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: experts. A program finds its expert's pairs among all."""
    begin(PDL)
    wait_for_previous(PDL)
    mine = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    lanes = tl.arange(0, CHUNK)
    if COUNTED:
        found = tl.load(counts + experts)
    else:
        found = tl.zeros([EXPERTS], tl.int32)
        for start in range(0, pairs, CHUNK):
            inside = start + lanes < pairs
            found += tl.histogram(tl.load(ids + start + lanes, mask=inside, other=0).to(tl.int32), EXPERTS, mask=inside)
    blocks = (found + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(experts < mine, blocks, 0))
    count = tl.sum(tl.where(experts == mine, found, 0))
    if mine == 0:
        tl.store(used, tl.sum(blocks))
    end = first * BLOCK
    for start in range(0, pairs, CHUNK):
        same = (tl.load(ids + start + lanes, mask=start + lanes < pairs, other=-1) == mine).to(tl.int32)
        place = end + tl.cumsum(same, 0) - 1
        tl.store(pairs_out + place, start + lanes, mask=same > 0)
        end += tl.sum(same)
    pads = tl.arange(0, BLOCK)
    my_blocks = (count + BLOCK - 1) // BLOCK
    tl.store(pairs_out + end + pads, tl.zeros([BLOCK], tl.int32) + pairs, mask=pads < my_blocks * BLOCK - count)
    for block in range(0, my_blocks, BLOCK):
        tl.store(experts_out + first + block + pads, tl.zeros([BLOCK], tl.int32) + mine, mask=block + pads < my_blocks)

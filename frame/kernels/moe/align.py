# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Sorts (token, expert) pairs by expert into blocks of rows of one expert each (vLLM's and SGLang's
`moe_align_block_size`).

Runs on the device with buffers of fixed size, so a step can be captured in a CUDA graph. A pair is
`token * k + place`. The order of an expert's pairs is undefined and does not affect results.
Depends on no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.core.interfaces.adapter_layers import SortedPairs
from frame.kernels.launch import PreparedLaunch, ceil_div, choose_warps, launch_dependents, next_power_of_2, wait_for_previous

CHUNKS = 128, 512, 2048  # pairs that one program per expert scans; larger batches are first counted by chunks
_COUNTED = 1024  # pairs per counted chunk
_MANY_ROWS = 2048  # from which a program copies several rows
_PADS = 16  # padding rows written at a time
_COUNTS = 8192  # counts that a program sums at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment(SortedPairs):
    """The sorted pairs. Entries after the blocks in use are undefined. `rows` int32 [1]: rows of
    the blocks in use. `counts` int32 [2]: zeros, which a kernel may use as work counters if it
    leaves zeros."""

    rows: torch.Tensor
    counts: torch.Tensor


def align_tokens(ids: torch.Tensor, num_experts: int, block: int) -> Alignment:
    """Sort pairs by expert. ids int64 [tokens, k], contiguous, all in [0, num_experts). `block`:
    rows per block."""
    pairs, device = ids.numel(), ids.device
    blocks = (pairs + min(num_experts, pairs) * (block - 1)) // block
    # all four parts are 16-byte aligned
    numbers = torch.empty(8 + blocks * (block + 1), dtype=torch.int32, device=device)
    rows, of_blocks = numbers[8 : 8 + blocks * block], numbers[8 + blocks * block :]
    alignment = Alignment(rows, of_blocks, numbers[:1], block, rows=numbers[1:2], counts=numbers[4:6])
    experts = next_power_of_2(num_experts)
    tensors = alignment.pairs, alignment.experts, alignment.used, alignment.counts
    if pairs <= CHUNKS[-1]:
        chunk = next(size for size in CHUNKS if pairs <= size)
        _prepared_align(experts, block, chunk, device)((num_experts, 1, 1), (ids, *tensors), (pairs,))
        return alignment
    chunks = ceil_div(pairs, _COUNTED)
    counts = torch.empty((2 * chunks, experts), dtype=torch.int32, device=device)
    _prepared_count(experts, device)((chunks, 1, 1), (ids, counts), (pairs,))
    _prepared_place(experts, block, device)((chunks, 1, 1), (ids, counts, *tensors), (pairs, chunks))
    return alignment


def copy_rows(x: torch.Tensor, order: Alignment, ids: torch.Tensor) -> torch.Tensor:
    """x [tokens, width] -> [rows of the order, width]: the token of each row; padding rows are
    undefined. ids: what `order` sorts."""
    rows, width, pairs, top = len(order.pairs), x.shape[1], ids.numel(), ids.shape[1]
    out = x.new_empty(rows, width)
    together = 1 if rows < _MANY_ROWS else 4
    launch = _prepared_copy(width, top, order.block, together, x.dtype, x.stride(0), x.device)
    launch((ceil_div(rows, together), 1, 1), (x, out, order.pairs, order.used), (pairs, x.stride(0)))
    return out


@lru_cache(maxsize=64)
def _prepared_copy(
    width: int, top: int, block: int, together: int, dtype: torch.dtype, stride: int, device: torch.device
) -> PreparedLaunch:
    constants = {"WIDTH": width, "TOP": top, "BLOCK": block, "LANES": next_power_of_2(width), "TOGETHER": together}
    return PreparedLaunch(_copy_kernel, (dtype, dtype, *[torch.int32] * 2, 0, stride), constants, device, choose_warps(width))


@lru_cache(maxsize=64)
def _prepared_align(experts: int, block: int, chunk: int, device: torch.device) -> PreparedLaunch:
    types = torch.int64, *[torch.int32] * 4, 0
    constants = {"EXPERTS": experts, "BLOCK": block, "LANES": next_power_of_2(block), "CHUNK": chunk}
    return PreparedLaunch(_align_kernel, types, constants, device, min(8, chunk // 128))


@lru_cache(maxsize=64)
def _prepared_count(experts: int, device: torch.device) -> PreparedLaunch:
    return PreparedLaunch(_count_kernel, (torch.int64, torch.int32, 0), {"EXPERTS": experts, "CHUNK": _COUNTED}, device, 8)


@lru_cache(maxsize=64)
def _prepared_place(experts: int, block: int, device: torch.device) -> PreparedLaunch:
    constants = {"EXPERTS": experts, "BLOCK": block, "CHUNK": _COUNTED, "TOGETHER": max(8, _COUNTS // experts)}
    constants["PADS"] = min(_PADS, next_power_of_2(block))
    return PreparedLaunch(_place_kernel, (torch.int64, *[torch.int32] * 5, 0, 0), constants, device, 8)


@triton.jit(do_not_specialize=["pairs"])
def _align_kernel(
    ids, pairs_out, experts_out, used, zeros, pairs,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,  # BLOCK rounded up to a power of two
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: experts. Each program scans all pairs for those of its expert."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    current = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    lanes = tl.arange(0, CHUNK)
    expert = tl.load(ids + lanes, mask=lanes < pairs, other=0).to(tl.int32)
    totals = tl.histogram(expert, EXPERTS, mask=lanes < pairs)
    blocks = (totals + BLOCK - 1) // BLOCK
    first = tl.sum(tl.where(experts < current, blocks, 0))
    is_current = ((expert == current) & (lanes < pairs)).to(tl.int32)
    tl.store(pairs_out + first * BLOCK + tl.cumsum(is_current, 0) - 1, lanes, mask=is_current > 0)
    count = tl.sum(is_current)
    num_blocks = (count + BLOCK - 1) // BLOCK
    pads = tl.arange(0, LANES)
    lane_zeros = tl.zeros([LANES], tl.int32)
    tl.store(pairs_out + first * BLOCK + count + pads, lane_zeros + pairs, mask=pads < num_blocks * BLOCK - count)
    for block in range(0, num_blocks, LANES):
        tl.store(experts_out + first + block + pads, lane_zeros + current, mask=block + pads < num_blocks)
    if current == 0:
        tl.store(used, tl.sum(blocks))
        tl.store(used + 1, tl.sum(blocks) * BLOCK)
        tl.store(zeros + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(ids, counts, pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Grid: chunks. Counts the pairs of each expert in a chunk."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    lanes = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + lanes, mask=lanes < pairs, other=0).to(tl.int32)
    tl.store(counts + tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS), tl.histogram(expert, EXPERTS, mask=lanes < pairs))


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _place_kernel(
    ids,
    counts,  # int32 [2 * chunks, EXPERTS]: the counts of each chunk, then each chunk's next row of each expert
    pairs_out, experts_out, used, zeros, pairs, chunks,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    TOGETHER: tl.constexpr,  # chunks whose counts are summed at a time
    PADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: chunks. Each program places its chunk's pairs after those of earlier chunks."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    chunk = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    totals = tl.zeros([EXPERTS], tl.int32)
    before_chunk = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, chunks, TOGETHER):
        each = start + tl.arange(0, TOGETHER)[:, None]
        counted = tl.load(counts + each * EXPERTS + experts[None, :], mask=each < chunks, other=0)
        totals += tl.sum(counted, 0)
        before_chunk += tl.sum(tl.where(each < chunk, counted, 0), 0)
    blocks = (totals + BLOCK - 1) // BLOCK
    ends = tl.cumsum(blocks, 0)
    firsts = ends - blocks
    nexts = counts + (chunks + chunk) * EXPERTS
    tl.store(nexts + experts, firsts * BLOCK + before_chunk)
    tl.debug_barrier()  # make the stores visible to all threads
    lanes = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + lanes, mask=lanes < pairs, other=0)
    place = tl.atomic_add(nexts + expert, 1, mask=lanes < pairs, sem="relaxed")
    tl.store(pairs_out + place, lanes, mask=lanes < pairs)
    current = experts % chunks == chunk
    rests = blocks * BLOCK - totals
    for start in range(0, BLOCK, PADS):
        pads = start + tl.arange(0, PADS)[None, :]
        places = (firsts * BLOCK + totals)[:, None] + pads
        tl.store(pairs_out + places, tl.zeros([EXPERTS, PADS], tl.int32) + pairs, mask=current[:, None] & (pads < rests[:, None]))
    for number in range(tl.max(tl.where(current, blocks, 0))):
        tl.store(experts_out + firsts + number, experts, mask=current & (number < blocks))
    if chunk == 0:
        tl.store(used, tl.sum(blocks))
        tl.store(used + 1, tl.sum(blocks) * BLOCK)
        tl.store(zeros + tl.arange(0, 2), tl.zeros([2], tl.int32))


@triton.jit(do_not_specialize=["pairs"])
def _copy_kernel(
    x, out, pairs_of, used, pairs, x_stride,
    WIDTH: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of TOGETHER rows of the alignment."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    pair = tl.load(pairs_of + row, mask=row < tl.load(used) * BLOCK, other=pairs)
    lanes = tl.arange(0, LANES)
    inside = lanes[None, :] < tl.where(pair < pairs, WIDTH, 0)[:, None]
    values = tl.load(x + (pair // TOP).to(tl.int64)[:, None] * x_stride + lanes[None, :], mask=inside)
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + lanes[None, :], values, mask=inside)

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Sums over the GPUs of one host, each of which writes its values to the memory of the others, with
the residual addition and RMSNorm of the next layer if wanted; and gathered columns.

There is no barrier: the values themselves are the signal. A rank waits until each place of its
memory no longer holds `EMPTY`, and writes `EMPTY` back. Two halves of the memory take turns, by a
counter of each program in device memory, so that captured graphs can be replayed. A rank that
writes to a half again has read the other half, whose values the readers sent after they had cleared
the first one.

The collective `p2p` uses it. References: `Collective.all_reduce` and `all_gather`,
`frame.models.layers.norm.RMSNorm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.kernels.elementwise.norm import count_rows_per_program
from frame.kernels.launch import PreparedLaunch, ceil_div, choose_warps, launch_dependents, next_power_of_2, wait_for_previous

CHANNELS = 256  # programs of a launch: all of them must run at the same time
REGION = 16 << 10  # bytes that a channel receives from a rank
LARGEST = CHANNELS * REGION  # bytes of one launch
MULTIPLE = 16  # a message has a multiple of so many elements
_MIN_PIECE = 2 << 10  # bytes of a program, so that small messages use few
_EMPTY = -1  # int16: a NaN of 16-bit types, as two of them are of float32


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """The memory that the ranks share. `addresses`: int64 [ranks], of each rank's memory as this
    device sees it; `turns`: int32 [CHANNELS], zeros at the start."""

    rank: int
    size: int
    addresses: torch.Tensor
    turns: torch.Tensor


def count_bytes(size: int) -> int:
    """The bytes of each rank's memory for `size` ranks."""
    return 2 * size * LARGEST


def clear(memory: torch.Tensor) -> None:
    """Prepare memory, uint8 [count_bytes(size)], before any rank uses it."""
    memory.view(torch.int16).fill_(_EMPTY)


def can_sum(x: torch.Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.numel() > 0 and x.numel() % MULTIPLE == 0


def sum_peers(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The sum of all ranks' contiguous `x`, added in float32 in the order of the ranks and rounded
    once, the same bits on every rank. A tensor of more than `LARGEST` bytes takes several launches.
    """
    out = torch.empty_like(x)
    flat, results, maximum = x.view(-1), out.view(-1), LARGEST // x.itemsize
    for start in range(0, len(flat), maximum):
        chunk = flat[start : start + maximum]
        piece = min(max(next_power_of_2(ceil_div(len(chunk), CHANNELS)), _MIN_PIECE // x.itemsize), REGION // x.itemsize)
        launch = _prepared(peers.rank, peers.size, piece, "", (x.dtype, x.dtype), x.device)
        target = results[start : start + maximum]
        launch(
            (ceil_div(len(chunk), piece), 1, 1), (chunk, chunk, chunk, target, peers.turns, peers.addresses), (len(chunk), MULTIPLE, 0.0)
        )
    return out


def can_gather(x: torch.Tensor) -> bool:
    """Whether `gather_peers` takes this tensor."""
    return can_sum(x) and x.shape[1] % MULTIPLE == 0 and x.shape[1] * x.itemsize <= LARGEST


def gather_peers(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """All ranks' contiguous `x` [rows, columns] beside each other, [rows, ranks * columns]."""
    rows, columns = x.shape
    out = x.new_empty(rows, peers.size * columns)
    maximum = max(1, LARGEST // (columns * x.itemsize))
    for chunk, target in zip(x.split(maximum), out.split(maximum), strict=True):
        count = chunk.numel()
        piece = min(max(next_power_of_2(ceil_div(count, CHANNELS)), _MIN_PIECE // x.itemsize), REGION // x.itemsize)
        launch = _prepared(peers.rank, peers.size, piece, "gather", (x.dtype, x.dtype), x.device)
        launch((ceil_div(count, piece), 1, 1), (chunk, chunk, chunk, target, peers.turns, peers.addresses), (count, columns, 0.0))
    return out


def can_add_norm(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Whether `sum_add_norm` takes these tensors."""
    rows, size = x.shape
    fits = 0 < rows <= CHANNELS and size % MULTIPLE == 0 and size * x.itemsize <= REGION
    return fits and can_sum(x) and x.is_contiguous() and residual.is_contiguous() and residual.dtype == x.dtype


def norms_alike(size: int) -> bool:
    """Whether `sum_add_norm` has the bits of `sum_peers` and `add_rms_norm`: each program has one
    row then, and as many warps."""
    return count_rows_per_program(size) == 1


def sum_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, peers: Peers) -> torch.Tensor:
    """norm(s + residual) for the sum s of all ranks' `x` [rows, size]; s + residual is written over
    `residual`. Rounds as `sum_peers` and `add_rms_norm` do; see `norms_alike`."""
    rows, size = x.shape
    out = torch.empty_like(x)
    launch = _prepared(peers.rank, peers.size, size, "norm", (x.dtype, weight.dtype), x.device)
    launch((rows, 1, 1), (x, residual, weight, out, peers.turns, peers.addresses), (x.numel(), MULTIPLE, eps))
    return out


@lru_cache(maxsize=256)
def _prepared(rank: int, size: int, piece: int, form: str, types: tuple[torch.dtype, torch.dtype], device: torch.device) -> PreparedLaunch:
    dtype, weight = types
    block = next_power_of_2(piece)
    sizes = {"PIECE": piece, "BLOCK": block, "REGION": REGION // dtype.itemsize, "CHANNELS": CHANNELS}
    forms = {"NORM": form == "norm", "GATHER": form == "gather"}
    constants = {**sizes, **forms, "RANK": rank, "RANKS": size, "WIDE": dtype.itemsize == 4}
    example = (dtype, dtype, weight, dtype, torch.int32, torch.int64, MULTIPLE, MULTIPLE, 0.0)
    return PreparedLaunch(_sum_peers, example, constants, device, choose_warps(block))


@triton.jit
def _sum_peers(
    x, residual, weight, out, turns, addresses, count,
    width,  # columns that GATHER gets from each rank
    eps,
    PIECE: tl.constexpr, BLOCK: tl.constexpr, REGION: tl.constexpr, CHANNELS: tl.constexpr, NORM: tl.constexpr,
    GATHER: tl.constexpr,  # no sums
    RANK: tl.constexpr, RANKS: tl.constexpr,
    WIDE: tl.constexpr,  # values of 32 bits, not of 16
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: pieces of `count` elements. A rank's memory is [2 turns, RANKS, CHANNELS, REGION]."""
    BITS: tl.constexpr = tl.int32 if WIDE else tl.int16
    EMPTY: tl.constexpr = -1
    OTHER_NAN: tl.constexpr = 0x7FFFFFFF if WIDE else 0x7FFF
    launch_dependents(PDL)
    channel = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    places = channel * PIECE + columns
    inside = (columns < PIECE) & (places < count)
    memories = ()
    for rank in tl.static_range(RANKS):
        memories = memories + (tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(BITS)), 16),)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:
        scale = tl.load(weight + columns, mask=columns < PIECE, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    turn = tl.load(turns + channel)
    local = tl.load(x + places, mask=inside, other=0.0)
    bits = local.to(BITS, bitcast=True)
    bits = tl.where(bits == EMPTY, OTHER_NAN, bits)
    half = ((turn & 1) * RANKS * CHANNELS + channel) * REGION
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            tl.store(memories[peer] + half + RANK * CHANNELS * REGION + columns, bits, mask=inside)
    if NORM:
        stream = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    received = memories[RANK] + half + columns
    for source in tl.static_range(RANKS):
        if source == RANK:
            arrived = bits
        else:
            arrived = _receive(received + source * CHANNELS * REGION, inside, EMPTY)
        values = arrived.to(x.dtype.element_ty, bitcast=True)
        if GATHER:
            tl.store(out + (places // width * RANKS + source) * width + places % width, values, mask=inside)
        elif source == 0:
            total = values.to(tl.float32)
        else:
            total += values.to(tl.float32)
    tl.store(turns + channel, turn + 1)  # after `_receive`, in which all threads meet: they have read it
    if not GATHER:
        result = total.to(x.dtype.element_ty)
        if NORM:
            rounded = (stream + result.to(tl.float32)).to(x.dtype.element_ty)
            tl.store(residual + places, rounded, mask=inside)
            stream = rounded.to(tl.float32)
            mean = tl.sum(stream * stream, 0) / PIECE
            result = (stream * tl.rsqrt(mean + eps) * scale).to(x.dtype.element_ty)
        tl.store(out + places, result, mask=inside)


@triton.jit
def _receive(places, inside, EMPTY: tl.constexpr):
    """Wait for the values of another rank, and clear their places."""
    arrived = tl.load(places, mask=inside, other=0, volatile=True)
    while tl.max((arrived == EMPTY).to(tl.int32), 0) != 0:
        arrived = tl.load(places, mask=inside, other=0, volatile=True)
    tl.store(places, tl.full(arrived.shape, EMPTY, arrived.dtype), mask=inside)
    return arrived

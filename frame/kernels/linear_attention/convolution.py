# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""SiLU(causal depthwise convolution) over ragged rows, whose past inputs are in pages, and the
normalization of queries and keys.

Reference: `frame.models.layers.linear_attention.convolution`. Sums are float32. Depends on no
layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.linear_attention import CHUNK, MixLayout, StatePages

_BLOCK = 128  # channels of a program, where they are not a head of q or k
_KEPT = 512  # channels of a program that stores past inputs
_EPS = 1e-6  # of the length of queries and keys


def _blocks(layout: MixLayout) -> dict[str, int]:
    """Channels of a program. Those of one head of q or k, where these are normalized."""
    size = layout.key if layout.normalized else _BLOCK
    heads = layout.key_heads if layout.normalized else 0
    return {"CHANNELS": layout.channels, "SIZE": size, "BLOCK": next_power_of_2(size), "QUERY_HEADS": heads}


def convolve_tokens(
    layout: MixLayout,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    past: torch.Tensor,
    pages: StatePages,
    out: torch.Tensor,
) -> None:
    """One token of each row: x [rows, channels] with any row stride -> out, and the past inputs
    `past` [pages, width - 1, channels] move on by one. weight: [channels, 1, width]."""
    sizes, width = _blocks(layout), weight.shape[-1]
    grid = (len(x), ceil_div(layout.channels, sizes["SIZE"]))
    _convolve_tokens[grid](
        x, weight, weight if bias is None else bias, past, pages.sources, pages.targets, out,
        x.stride(0), layout.key**-0.5, WIDTH=width, EPS=_EPS, HAS_BIAS=bias is not None, **sizes, **launch_options(x.device, 1),
    )  # fmt: skip


def convolve_chunks(
    layout: MixLayout,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    past: torch.Tensor,
    pages: StatePages,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """As `convolve_tokens` for rows of several tokens. rows: (query_starts int32 [rows + 1]; row
    and first token of each chunk, int32 [chunks]). `past` stays as it is."""
    sizes, width = _blocks(layout), weight.shape[-1]
    starts, row_of, begins = rows
    grid = (len(row_of), ceil_div(layout.channels, sizes["SIZE"]))
    _convolve_chunks[grid](
        x, weight, weight if bias is None else bias, past, pages.sources, starts, row_of, begins, out,
        x.stride(0), layout.key**-0.5, TOKENS=CHUNK, WIDTH=width, EPS=_EPS, HAS_BIAS=bias is not None, num_warps=8, **sizes,
    )  # fmt: skip


def keep_inputs(x: torch.Tensor, past: torch.Tensor, pages: StatePages, starts: torch.Tensor, lens: torch.Tensor) -> None:
    """Write the last inputs of each row, of which there are `lens` int32 [rows] from token
    `starts` of x on, to its target page of `past` [pages, width - 1, channels]."""
    kept, channels = past.shape[1:]
    block = min(_KEPT, next_power_of_2(channels))
    grid = (len(pages.sources), ceil_div(channels, block))
    _keep_inputs[grid](
        x, past, pages.sources, pages.targets, starts, lens, x.stride(0), CHANNELS=channels, KEPT=kept, BLOCK=block, num_warps=4
    )


@triton.jit
def _finish(total, head, has, scale, SIZE: tl.constexpr, QUERY_HEADS: tl.constexpr, EPS: tl.constexpr):
    """SiLU, and for heads of q and k the division by their length. total: [tokens, channels]."""
    total *= tl.sigmoid(total)
    if QUERY_HEADS:  # noqa: SIM102 - a constant
        if head < 2 * QUERY_HEADS:
            length = tl.sum(tl.where(has, total * total, 0.0), 1, keep_dims=True)
            total *= tl.rsqrt(length + EPS) * tl.where(head < QUERY_HEADS, scale, 1.0)
    return total


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])  # slices that start at any row
def _convolve_tokens(
    x, weight, bias, past, sources, targets, out, x_stride, scale,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, QUERY_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    EPS: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows, blocks of channels."""
    launch_dependents(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inside = tl.arange(0, BLOCK)[None]
    channels = head * SIZE + inside
    has = (inside < SIZE) & (channels < CHANNELS)
    source = past + tl.load(sources + row) * ((WIDTH - 1) * CHANNELS) + channels
    target = past + tl.load(targets + row) * ((WIDTH - 1) * CHANNELS) + channels
    total = tl.zeros([1, BLOCK], tl.float32)
    for index in tl.static_range(WIDTH - 1):
        old = tl.load(source + index * CHANNELS, mask=has, other=0.0)
        total += old.to(tl.float32) * tl.load(weight + channels * WIDTH + index, mask=has, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=has, other=0.0).to(tl.float32)
    last_weight = tl.load(weight + channels * WIDTH + WIDTH - 1, mask=has, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    new = tl.load(x + row * x_stride + channels, mask=has, other=0.0)
    for index in tl.static_range(1, WIDTH - 1):
        tl.store(target + (index - 1) * CHANNELS, tl.load(source + index * CHANNELS, mask=has), mask=has)
    tl.store(target + (WIDTH - 2) * CHANNELS, new, mask=has)
    total += new.to(tl.float32) * last_weight
    total = _finish(total, head, has, scale, SIZE, QUERY_HEADS, EPS)
    tl.store(out + row * CHANNELS + channels, total.to(out.dtype.element_ty), mask=has)


@triton.jit(do_not_specialize_on_alignment=["sources", "starts"])  # slices that start at any row
def _convolve_chunks(
    x, weight, bias, past, sources, starts, row_of, begins, out, x_stride, scale,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, QUERY_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, EPS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Grid: chunks, blocks of channels."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, begin = tl.load(row_of + chunk), tl.load(begins + chunk).to(tl.int64)
    start, stop = tl.load(starts + row), tl.load(starts + row + 1)
    inside = tl.arange(0, BLOCK)[None]
    channels = head * SIZE + inside
    has = (inside < SIZE) & (channels < CHANNELS)
    tokens = begin + tl.arange(0, TOKENS)[:, None]
    source = past + tl.load(sources + row) * ((WIDTH - 1) * CHANNELS) + channels
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for lag in tl.static_range(WIDTH):
        at = tokens - lag
        read = tl.load(x + at * x_stride + channels, mask=has & (at >= start) & (tokens < stop), other=0.0).to(tl.float32)
        if begin == start:  # the first chunk of a row reads past inputs
            read += tl.load(source + (WIDTH - 1 + at - start) * CHANNELS, mask=has & (at < start) & (tokens < stop), other=0.0).to(
                tl.float32
            )
        total += read * tl.load(weight + channels * WIDTH + WIDTH - 1 - lag, mask=has, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channels, mask=has, other=0.0).to(tl.float32)
    total = _finish(total, head, has, scale, SIZE, QUERY_HEADS, EPS)
    tl.store(out + tokens * CHANNELS + channels, total.to(out.dtype.element_ty), mask=has & (tokens < stop))


@triton.jit(do_not_specialize_on_alignment=["sources", "targets", "starts", "lens"])  # slices that start at any row
def _keep_inputs(x, past, sources, targets, starts, lens, x_stride, CHANNELS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: rows, blocks of channels. An older entry is stored before a later one is read, which is
    never the entry that was stored: a row has a token at least."""
    row = tl.program_id(0)
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    has = channels < CHANNELS
    source = past + tl.load(sources + row) * (KEPT * CHANNELS) + channels
    target = past + tl.load(targets + row) * (KEPT * CHANNELS) + channels
    start, count = tl.load(starts + row).to(tl.int64), tl.load(lens + row)
    for index in tl.static_range(KEPT):
        at = count - KEPT + index  # number of the token in its row
        if at >= 0:
            kept = tl.load(x + (start + at) * x_stride + channels, mask=has)
        else:
            kept = tl.load(source + (KEPT + at) * CHANNELS, mask=has)
        tl.store(target + index * CHANNELS, kept, mask=has)

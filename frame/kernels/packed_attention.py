# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Attention of packed sequences as one kernel: each token attends to all tokens of its sequence, in
both directions, without a cache.

Used by the encoders of images and videos, whose heads have sizes such as 72 and 80. A size is
divided into two powers of two (64 + 16), so that a product multiplies few zeros. Reference:
`torch.nn.functional.scaled_dot_product_attention` of each sequence. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels.launch import ceil_div, next_power_of_2

MAX_HEAD_DIM = 128
_LOG2_E = 1.4426950408889634
_ROWS, _KEYS, _WARPS, _STAGES = 128, 64, 8, 3
_PAIRS = 32  # of a token and a head, which a program turns


def turn_heads(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply rotary embedding to queries and keys in place, in float32: entry i of a head turns with
    entry i + size / 2. qkv: [tokens, 3, heads, size], contiguous; cos, sin: [tokens, size],
    contiguous."""
    tokens, _, heads, size = qkv.shape
    _turn_kernel[(ceil_div(tokens * 2 * heads, _PAIRS),)](
        qkv, cos, sin, tokens, HEADS=heads, HALF=size // 2, BLOCK=next_power_of_2(size // 2), PAIRS=_PAIRS, num_warps=4
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, longest: int, scale: float) -> torch.Tensor:
    """q, k, v: [tokens, heads, size], with entries of a head next to each other; starts, int32
    [sequences + 1]: the first token of each sequence, and the number of all; longest: the tokens of
    the longest sequence, or more. -> [tokens, heads, size], contiguous."""
    tokens, heads, size = q.shape
    first, rest = _divide(size)
    out = torch.empty((tokens, heads, size), dtype=q.dtype, device=q.device)
    _attend_kernel[(ceil_div(longest, _ROWS), heads, len(starts) - 1)](
        q, k, v, out, starts, scale * _LOG2_E, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        HEADS=heads, SIZE=size, FIRST=first, REST=rest, ROWS=_ROWS, KEYS=_KEYS, ALIGN=8 if size % 8 == 0 else 1,
        UPCAST=kernels.INTERPRETED, num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    return out


def _divide(size: int) -> tuple[int, int]:
    """Two powers of two, of which the second may be 0, that hold a head."""
    first = max(16, next_power_of_2(size + 1) // 2)
    return first, max(16, next_power_of_2(size - first)) if size > first else 0


@triton.jit
def _turn_kernel(
    qkv, cos, sin, tokens, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    token, head = (pairs // (2 * HEADS)).to(tl.int64), pairs % (2 * HEADS)
    at = tl.arange(0, BLOCK)
    mask = (token < tokens)[:, None] & (at < HALF)[None, :]
    low = qkv + (token * 3 * HEADS + head)[:, None] * (2 * HALF) + at[None, :]
    angle = token[:, None] * (2 * HALF) + at[None, :]
    a, b = tl.load(low, mask=mask).to(tl.float32), tl.load(low + HALF, mask=mask).to(tl.float32)
    turned_a = a * tl.load(cos + angle, mask=mask).to(tl.float32) - b * tl.load(sin + angle, mask=mask).to(tl.float32)
    turned_b = b * tl.load(cos + angle + HALF, mask=mask).to(tl.float32) + a * tl.load(sin + angle + HALF, mask=mask).to(tl.float32)
    tl.store(low, turned_a.to(qkv.dtype.element_ty), mask=mask)
    tl.store(low + HALF, turned_b.to(qkv.dtype.element_ty), mask=mask)


@triton.jit
def _load(pointer, tokens, mask, stride, BEGIN: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, UPCAST: tl.constexpr):
    """WIDTH entries from BEGIN on of the rows of some tokens, [tokens, WIDTH]; zeros from SIZE on."""
    at = BEGIN + tl.arange(0, WIDTH)
    where = pointer + tokens[:, None].to(tl.int64) * stride + at[None, :]
    rows = tl.load(where, mask=mask[:, None] & (at < SIZE)[None, :], other=0.0)
    return rows.to(tl.float32) if UPCAST else rows


@triton.jit
def _attend_keys(
    q0, q1, k, v, tokens, mask, stride_k, stride_v, scale, top, total, out0, out1,
    SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running maximum, sum and results."""
    scores = tl.dot(q0, tl.trans(_load(k, tokens, mask, stride_k, 0, FIRST, SIZE, UPCAST)))
    if REST:
        scores = tl.dot(q1, tl.trans(_load(k, tokens, mask, stride_k, FIRST, REST, SIZE, UPCAST)), scores)
    scores = scores * scale
    if MASKED:
        scores = tl.where(mask[None, :], scores, float("-inf"))
    new = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new[:, None])
    factor = tl.exp2(top - new)
    total = total * factor + tl.sum(weights, 1)
    v0 = _load(v, tokens, mask, stride_v, 0, FIRST, SIZE, UPCAST)
    out0 = tl.dot(weights.to(v0.dtype), v0, out0 * factor[:, None])
    if REST:
        v1 = _load(v, tokens, mask, stride_v, FIRST, REST, SIZE, UPCAST)
        out1 = tl.dot(weights.to(v1.dtype), v1, out1 * factor[:, None])
    return new, total, out0, out1


@triton.jit
def _attend_kernel(
    q, k, v, out, starts, scale, q_stride, q_head, k_stride, k_head, v_stride, v_head,
    HEADS: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ALIGN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    tile, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts + sequence)
    end = tl.load(starts + sequence + 1)
    if tile * ROWS >= end - begin:
        return
    rows = begin + tile * ROWS + tl.arange(0, ROWS)
    inside = rows < end
    q += tl.multiple_of(head.to(tl.int64) * q_head, ALIGN)  # so that loads take 16 bytes
    k += tl.multiple_of(head.to(tl.int64) * k_head, ALIGN)
    v += tl.multiple_of(head.to(tl.int64) * v_head, ALIGN)
    q0 = _load(q, rows, inside, q_stride, 0, FIRST, SIZE, UPCAST)
    q1 = _load(q, rows, inside, q_stride, FIRST, REST, SIZE, UPCAST) if REST else q0
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out0 = tl.zeros([ROWS, FIRST], tl.float32)
    out1 = tl.zeros([ROWS, REST or 16], tl.float32)
    keys = tl.arange(0, KEYS)
    whole = begin + (end - begin) // KEYS * KEYS
    for place in range(begin, whole, KEYS):
        tokens = place + keys
        top, total, out0, out1 = _attend_keys(
            q0, q1, k, v, tokens, tokens >= 0, k_stride, v_stride, scale, top, total, out0, out1, SIZE, FIRST, REST, False, UPCAST
        )
    if whole < end:
        tokens = whole + keys
        top, total, out0, out1 = _attend_keys(
            q0, q1, k, v, tokens, tokens < end, k_stride, v_stride, scale, top, total, out0, out1, SIZE, FIRST, REST, True, UPCAST
        )
    out += (rows.to(tl.int64) * HEADS + head)[:, None] * SIZE
    at = tl.arange(0, FIRST)
    tl.store(out + at[None, :], (out0 / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (at < SIZE)[None, :])
    if REST:
        at = FIRST + tl.arange(0, REST)
        tl.store(out + at[None, :], (out1 / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (at < SIZE)[None, :])

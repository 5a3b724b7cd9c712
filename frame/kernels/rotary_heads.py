# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Rotary embedding of the queries and keys of image encoders, in place, as one kernel.

Reference: `apply_rotary_pos_emb_vision` of transformers. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, next_power_of_2

_PAIRS = 32  # of a token and a head, of a program
_WARPS = 4


def rotate_heads(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate queries and keys, in float32: entry i of a head turns with entry i + size / 2. qkv:
    [tokens, 3, heads, size], contiguous; cos, sin: [tokens, size], contiguous."""
    tokens, _, heads, size = qkv.shape
    _rotate_kernel[(ceil_div(tokens * 2 * heads, _PAIRS),)](
        qkv, cos, sin, tokens, HEADS=heads, HALF=size // 2, BLOCK=next_power_of_2(size // 2), PAIRS=_PAIRS, num_warps=_WARPS
    )


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _rotate_kernel(qkv, cos, sin, tokens, HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    token, head = (pairs // (2 * HEADS)).to(tl.int64), pairs % (2 * HEADS)
    at = tl.arange(0, BLOCK)
    mask = (token < tokens)[:, None] & (at < HALF)[None, :]
    place = qkv + (token * 3 * HEADS + head)[:, None] * (2 * HALF) + at[None, :]
    angle = token[:, None] * (2 * HALF) + at[None, :]
    low, high = tl.load(place, mask=mask).to(tl.float32), tl.load(place + HALF, mask=mask).to(tl.float32)
    new_low = low * tl.load(cos + angle, mask=mask).to(tl.float32) - high * tl.load(sin + angle, mask=mask).to(tl.float32)
    new_high = high * tl.load(cos + angle + HALF, mask=mask).to(tl.float32) + low * tl.load(sin + angle + HALF, mask=mask).to(tl.float32)
    tl.store(place, new_low.to(qkv.dtype.element_ty), mask=mask)
    tl.store(place + HALF, new_high.to(qkv.dtype.element_ty), mask=mask)

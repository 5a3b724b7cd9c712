# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""In-place logit updates before a token is drawn: token masks of grammars, and penalties. One pass
each.

Depends on no request, grammar or logits processor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, launch_dependents, launch_options, wait_for_previous

_BLOCK = 2048  # columns per program
_WARPS = 4


@triton.jit
def token_mask_kernel(logits, stride, rows, mask, num_words, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid: (blocks of columns, masked rows). Sets -inf where the mask bit is 0. Row -1: none."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    block, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    # a bound, not a second condition: Triton's interpreter refuses masks joined with a scalar
    there = columns < tl.where(row >= 0, vocab, 0)
    words = tl.load(mask + place * num_words + columns // 32, mask=there, other=-1)
    is_banned = ((words >> (columns % 32)) & 1) == 0
    pointers = logits + row * stride + columns
    # loaded so that whole runs of columns are stored, which is faster than scattered stores
    values = tl.load(pointers, mask=there, other=0.0)
    tl.store(pointers, tl.where(is_banned, float("-inf"), values), mask=there)


@triton.jit
def penalties_kernel(
    logits,  # float32 [rows of the step, vocab]
    stride,
    rows,  # int64 [m]
    counts,  # int32 [states, vocab]
    states,  # int64 [m]
    frequency,  # float32 [states]
    presence,
    repetition,
    vocab,
    OUTPUT: tl.constexpr,  # mask of the bits that count occurrences in the output
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (blocks of columns, rows with penalties)."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    block, place = tl.program_id(0), tl.program_id(1)
    row, state = tl.load(rows + place), tl.load(states + place)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    seen = tl.load(counts + state * vocab + columns, mask=columns < vocab, other=0)
    if tl.max((seen != 0).to(tl.int32), 0) > 0:
        pointers = logits + row * stride + columns
        scores = tl.load(pointers, mask=seen != 0, other=0.0)
        factor = tl.load(repetition + state)
        scores = tl.where(scores > 0, tl.div_rn(scores, factor), scores * factor)
        in_output = seen & OUTPUT
        scores -= tl.load(frequency + state) * in_output.to(tl.float32)
        scores -= tl.load(presence + state) * (in_output > 0).to(tl.float32)
        tl.store(pointers, scores, mask=seen != 0)


def apply_token_mask(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """Set logits to -inf where the mask forbids a token. logits [any, vocab] of any float dtype, in
    place; rows int64 [m], -1: no row; mask int32 [m, ceil(vocab / 32)], where a set bit allows the
    token."""
    vocab = logits.shape[1]
    token_mask_kernel[(ceil_div(vocab, _BLOCK), len(rows))](
        logits, logits.stride(0), rows, mask, mask.shape[1], vocab, _BLOCK, **launch_options(logits.device, _WARPS)
    )


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    states: torch.Tensor,
    penalties: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    output_bits: int,
) -> None:
    """Apply repetition, then frequency and presence penalties, in place on rows int64 [m] of logits
    float32 [any, vocab].

    counts int32 [n, vocab]: not 0 where the prompt or the output has the token; the bits in
    `output_bits` count its occurrences in the output. states int64 [m]: the rows' indices in
    `counts` and in `penalties` (frequency, presence, repetition; float32 [n] each).
    """
    vocab = logits.shape[1]
    penalties_kernel[(ceil_div(vocab, _BLOCK), len(rows))](
        logits, logits.stride(0), rows, counts, states, *penalties, vocab, output_bits, _BLOCK, **launch_options(logits.device, _WARPS)
    )

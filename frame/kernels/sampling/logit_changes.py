# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Changes of logits in place, before a token is drawn: what a mask of bits forbids, and penalties by counts. One pass each.

Knows no request, no grammar and no processor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, launch_dependents, launch_options, wait_for_previous

_BLOCK = 2048  # columns of one program
_WARPS = 4


@triton.jit
def token_mask_kernel(logits, stride, rows, mask, num_words, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One block of one masked row: minus infinity where the bit is not set."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    block, place = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + place).to(tl.int64)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    there = columns < vocab
    words = tl.load(mask + place * num_words + columns // 32, mask=there, other=-1)
    is_banned = ((words >> (columns % 32)) & 1) == 0
    pointers = logits + row * stride + columns
    values = tl.load(pointers, mask=there, other=0.0)  # to store whole runs of columns, which is faster than single ones
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
    OUTPUT: tl.constexpr,  # bits of a count that count the output
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of one row that has penalties."""
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
    """Minus infinity where the mask forbids. logits [any, vocab] of any float type, in place; rows int64 [m]; mask int32
    [m, ceil(vocab / 32)], a set bit is allowed."""
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
    """Repetition, then frequency and presence penalties, in place on rows int64 [m] of logits float32 [any, vocab].

    counts int32 [n, vocab], not 0 where prompt or output have a token, `output_bits` of it how often the output has; states int64 [m]
    are the rows' places in counts and in `penalties`: frequency, presence, repetition, float32 [n] each.
    """
    vocab = logits.shape[1]
    penalties_kernel[(ceil_div(vocab, _BLOCK), len(rows))](
        logits, logits.stride(0), rows, counts, states, *penalties, vocab, output_bits, _BLOCK, **launch_options(logits.device, _WARPS)
    )

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The recurrence of gated delta networks, Mamba-2 and Kimi Delta Attention over the few tokens of
each row, one by one: decodes, and accepted drafts.

Reference: `frame.models.layers.linear_attention.recurrence`. A program keeps the state of some
value entries of one head in registers. Gates are activated in the kernel. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, launch_dependents, launch_options, next_power_of_2, wait_for_previous
from frame.kernels.linear_attention import Gates, MixLayout, StatePages
from frame.kernels.linear_attention.gates import activate

_STATE = 4096  # entries of a state that one program holds
_PROGRAMS = 256  # programs that keep a GPU busy: below, each holds half as much


def scan_rows(
    layout: MixLayout,
    mixed: torch.Tensor,
    gates: Gates,
    states: torch.Tensor,
    pages: StatePages,
    rows: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    *,
    is_fixed: bool = False,
) -> None:
    """Run rows from their states and write the new ones.

    mixed: [tokens, channels], contiguous, the results of the convolution. states: float32 [pages,
    heads, key size, value size]. rows: (first token, number of tokens) of each, int32 [rows]; None:
    row r is token r. out: [tokens, heads, value size], contiguous. is_fixed: the order of a token's
    sums does not depend on the number of rows.
    """
    count, heads, values = len(pages.sources), layout.heads, layout.value
    block_k = next_power_of_2(layout.key)
    block_v = max(8, min(next_power_of_2(values), _STATE // block_k))
    if not is_fixed and count * heads * ceil_div(values, block_v) < _PROGRAMS:
        block_v = max(8, block_v // 2)
    starts, lens = (pages.sources, pages.sources) if rows is None else rows
    _scan[(count, heads, ceil_div(values, block_v))](
        mixed, *gates[:4], gates.log_decay if gates.skip is None else gates.skip, states, *pages, starts, lens, out,
        gates.decay.stride(0), gates.beta.stride(0), gates.minimum,
        BLOCK_K=block_k, BLOCK_V=block_v, HAS_SKIP=gates.skip is not None, SINGLE=rows is None,
        **layout.constants, **launch_options(mixed.device, 4),
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["sources", "targets", "starts", "lens"])  # slices that start at any row
def _scan(
    mixed, decays, betas, log_decays, biases, skips, states, sources, targets, starts, lens, out, decay_stride, beta_stride,
    minimum,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, CHANNELS: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BY_KEY: tl.constexpr,  # the decay differs between key entries
    DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_SKIP: tl.constexpr,
    SINGLE: tl.constexpr,  # row r is token r
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: rows, heads, blocks of values."""
    launch_dependents(PDL)
    row, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = keys < KEYS, values < VALUES
    has_both = has_key[:, None] & has_value[None]
    entries = (head * KEYS + keys[:, None]) * VALUES + values[None]
    state = tl.load(states + tl.load(sources + row) * (HEADS * KEYS * VALUES) + entries, mask=has_both, other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    log_decay = tl.load(log_decays + head)
    if BY_KEY:
        bias = tl.load(biases + head * KEYS + keys, mask=has_key, other=0.0)
    else:
        bias = tl.load(biases + head)
    if HAS_SKIP:
        skip = tl.load(skips + head)
    wait_for_previous(PDL)
    if SINGLE:
        start, count = row, 1
    else:
        start, count = tl.load(starts + row), tl.load(lens + row)
    for token in range(start, start + count):
        at = tl.cast(token, tl.int64)
        place = mixed + at * CHANNELS
        queries = tl.load(place + Q + key_head * KEYS + keys, mask=has_key, other=0.0).to(tl.float32)
        row_keys = tl.load(place + K + key_head * KEYS + keys, mask=has_key, other=0.0).to(tl.float32)
        row_values = tl.load(place + V + head * VALUES + values, mask=has_value, other=0.0).to(tl.float32)
        beta = tl.load(betas + at * beta_stride + head).to(tl.float32)
        if BY_KEY:
            decay = tl.load(decays + at * decay_stride + head * KEYS + keys, mask=has_key, other=0.0).to(tl.float32)
            decay, strength = activate(decay, beta, log_decay, bias, minimum, DELTA)
            state *= tl.exp(decay)[:, None]
        else:
            decay = tl.load(decays + at * decay_stride + head).to(tl.float32)
            decay, strength = activate(decay, beta, log_decay, bias, minimum, DELTA)
            state *= tl.exp(decay)
        new = row_values
        if DELTA:
            new -= tl.sum(state * row_keys[:, None], 0)
        state += row_keys[:, None] * (new * strength)[None]
        result = tl.sum(state * queries[:, None], 0)
        if HAS_SKIP:
            result += skip * row_values
        tl.store(out + (at * HEADS + head) * VALUES + values, result.to(out.dtype.element_ty), mask=has_value)
    tl.store(states + tl.load(targets + row) * (HEADS * KEYS * VALUES) + entries, state, mask=has_both)

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The recurrence of gated delta networks, Mamba-2 and Kimi Delta Attention over ragged rows, in one
kernel: decodes and prompts alike, token by token.

Reference: `frame.models.layers.linear_attention.recurrence`. A program keeps the state of some
value entries of one head in registers, so a row's programs run in parallel and its tokens one by
one.
Depends on no layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from frame.kernels.launch import ceil_div, next_power_of_2

_STATE = 4096  # entries of a state that one program holds
_WARPS = 4


def scan_rows(
    inputs: Sequence[torch.Tensor], states: torch.Tensor, pages: torch.Tensor, query_starts: torch.Tensor, *, delta: bool
) -> torch.Tensor:
    """As `run_rows` of the reference, for q, k, v, decay and beta: -> [tokens, heads, value size].
    `states` are written in place."""
    q, k, v, decay, beta = (part.contiguous() for part in inputs)
    (tokens, heads, values), (key_heads, keys) = v.shape, k.shape[1:]
    out = torch.empty((tokens, heads, values), dtype=v.dtype, device=v.device)
    block_k = next_power_of_2(keys)
    block_v = max(8, min(next_power_of_2(values), _STATE // block_k))
    grid = (len(pages), heads, ceil_div(values, block_v))
    _scan[grid](
        q, k, v, decay, beta, states, pages, query_starts, out,
        HEADS=heads, KEY_HEADS=key_heads, KEYS=keys, VALUES=values, BLOCK_K=block_k, BLOCK_V=block_v,
        BY_KEY=decay.dim() == 3, DELTA=delta, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _scan(
    q,
    k,
    v,
    decay,
    beta,
    states,
    pages,
    query_starts,
    out,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_KEY: tl.constexpr,  # the decay differs between key entries
    DELTA: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    keys = tl.arange(0, BLOCK_K)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = keys < KEYS, values < VALUES
    has_both = has_key[:, None] & has_value[None]
    page = tl.load(pages + row)
    places = states + ((page * HEADS + head) * KEYS + keys[:, None]) * VALUES + values[None]
    state = tl.load(places, mask=has_both, other=0.0)
    start, stop = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    key_head = head // (HEADS // KEY_HEADS)
    for token in range(start, stop):
        at = tl.cast(token, tl.int64)
        key_place = (at * KEY_HEADS + key_head) * KEYS + keys
        value_place = (at * HEADS + head) * VALUES + values
        queries = tl.load(q + key_place, mask=has_key, other=0.0).to(tl.float32)
        own_keys = tl.load(k + key_place, mask=has_key, other=0.0).to(tl.float32)
        new = tl.load(v + value_place, mask=has_value, other=0.0).to(tl.float32)
        if BY_KEY:
            state *= tl.exp(tl.load(decay + (at * HEADS + head) * KEYS + keys, mask=has_key, other=0.0))[:, None]
        else:
            state *= tl.exp(tl.load(decay + at * HEADS + head))
        if DELTA:
            new -= tl.sum(state * own_keys[:, None], 0)
        new *= tl.load(beta + at * HEADS + head)
        state += own_keys[:, None] * new[None]
        tl.store(out + value_place, tl.sum(state * queries[:, None], 0).to(out.dtype.element_ty), mask=has_value)
    tl.store(places, state, mask=has_both)

# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""Pairs of tokens and experts in terms of the rank that holds some of the experts.

Reference: `frame.core.interfaces.moe.select_local`, which spreads the pairs of other ranks over all
experts. Here they go to an expert that the token uses anyway, so that few tokens read few weights.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from frame.kernels.launch import PreparedLaunch, ceil_div, choose_rows_per_program, launch_dependents, next_power_of_2, wait_for_previous

_FEW_TOKENS, _ROWS = 128, 32  # up to so many tokens, a program has one; else so many


def select_local_pairs(ids: torch.Tensor, weights: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64 [tokens, k] and weights float32 [tokens, k] -> the same for the rank that holds the
    experts from `first` to `first + count`, numbered from 0. The pairs of other experts get the
    weight 0, and the expert of the token's first own pair."""
    tokens, top = ids.shape
    local, kept = ids.new_empty(ids.shape), weights.new_empty(weights.shape)
    rows = choose_rows_per_program(tokens, 1 if tokens <= _FEW_TOKENS else _ROWS)
    launch = _prepared(top, rows, (first, count), (ids.dtype, weights.dtype), ids.device)
    launch((ceil_div(tokens, rows), 1, 1), (ids.contiguous(), weights.contiguous(), local, kept), (tokens,))
    return local, kept


@lru_cache(maxsize=64)
def _prepared(
    top: int, rows: int, local_range: tuple[int, int], types: tuple[torch.dtype, torch.dtype], device: torch.device
) -> PreparedLaunch:
    constants = {"TOP": top, "BLOCK": next_power_of_2(top), "ROWS": rows, "FIRST": local_range[0], "COUNT": local_range[1]}
    return PreparedLaunch(_select, (*types, *types, 0), constants, device, 1)


@triton.jit(do_not_specialize=["tokens"])
def _select(
    ids, weights, local, kept, tokens,
    TOP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of ROWS tokens."""
    launch_dependents(PDL)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < tokens) & (columns < TOP)
    places = row * TOP + columns
    wait_for_previous(PDL)
    expert = tl.load(ids + places, mask=inside, other=-1).to(tl.int32) - FIRST
    weight = tl.load(weights + places, mask=inside, other=0.0)
    is_local = inside & (expert >= 0) & (expert < COUNT)
    first = tl.min(tl.where(is_local, columns, BLOCK), 1, keep_dims=True)
    shared = tl.sum(tl.where(columns == first, expert, 0), 1, keep_dims=True)
    shared = tl.where(first < BLOCK, shared, row % COUNT)
    tl.store(local + places, tl.where(is_local, expert, shared).to(local.dtype.element_ty), mask=inside)
    tl.store(kept + places, tl.where(is_local, weight, 0.0), mask=inside)

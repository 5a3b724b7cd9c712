# mypy: disable-error-code="untyped-decorator,no-untyped-def"
"""The scores of the indexer of sparse attention (DeepSeek-V3.2), read from the pages of its keys.

Reference: `frame.models.deepseek_v32.score_keys`. Depends on no layer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frame import kernels
from frame.kernels.launch import ceil_div, next_power_of_2

_KEYS = 64  # of one program
_WARPS = 4


def score_keys(
    q: torch.Tensor, weights: torch.Tensor, cached: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """As the reference."""
    (tokens, heads, size), page = q.shape, cached.shape[1]
    keys = table.shape[1] * page
    out = torch.empty((tokens, keys), dtype=torch.float32, device=q.device)
    _score_kernel[(tokens, ceil_div(keys, _KEYS))](
        q.contiguous(), weights.contiguous(), cached, table, positions, out, table.stride(0), keys,
        PAGE=page, HEADS=heads, SIZE=size, BLOCK_HEADS=max(16, next_power_of_2(heads)), BLOCK_SIZE=max(16, next_power_of_2(size)),
        BLOCK_KEYS=_KEYS, UPCAST=kernels.INTERPRETED, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["table_stride", "num_keys"])
def _score_kernel(
    q,  # [tokens, HEADS, SIZE]
    weights,  # float32 [tokens, HEADS]
    cached,  # [pages, PAGE, SIZE]
    table,
    positions,
    out,  # float32 [tokens, num_keys]
    table_stride,
    num_keys,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: (tokens, blocks of keys)."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    visible = at <= tl.load(positions + token)
    heads = tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, BLOCK_SIZE)
    page = tl.load(table + token * table_stride + at // PAGE, mask=visible, other=0).to(tl.int64)
    rows = cached + (page * PAGE + at % PAGE)[:, None] * SIZE + columns[None, :]
    keys = tl.load(rows, mask=visible[:, None] & (columns < SIZE)[None, :], other=0.0)
    inside = (heads < HEADS)[:, None] & (columns < SIZE)[None, :]
    queries = tl.load(q + token * (HEADS * SIZE) + heads[:, None] * SIZE + columns[None, :], mask=inside, other=0.0)
    if UPCAST:
        keys, queries = keys.to(tl.float32), queries.to(tl.float32)
    products = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    factors = tl.load(weights + token * HEADS + heads, mask=heads < HEADS, other=0.0)
    scores = tl.sum(tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL) * factors[:, None], 0)
    tl.store(out + token * num_keys + at, tl.where(visible, scores, float("-inf")), mask=at < num_keys)

"""Tensor helpers of the backends that call libraries: KV slots of rows, expanded latents, finite
values.

Depends on no library.
"""

from __future__ import annotations

import torch

from frame.core.interfaces.attention import LatentProjections
from frame.core.interfaces.batch import ForwardBatch
from frame.kernels import can_use_triton


def locate_keys(batch: ForwardBatch, first: int, total: int, stop: int | None = None) -> torch.Tensor:
    """KV slots (page * page_size + offset, int64 [total]) of the `total` keys of rows `first` …
    `stop - 1`, row after row. `stop` None: all rows from `first` on."""
    page_size, lengths = batch.kv.page_size, batch.seq_lens[first:stop].long()
    rows = torch.repeat_interleave(lengths, output_size=total)
    positions = torch.arange(total, device=lengths.device) - (lengths.cumsum(0) - lengths).index_select(0, rows)
    slots = batch.request_slots[first:stop].index_select(0, rows)
    pages = batch.page_table.view(-1).index_select(0, slots * batch.page_table.shape[1] + positions // page_size)
    return pages.long() * page_size + positions % page_size


def expand_latents(layer: LatentProjections, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, heads, nope + rope] and values [n, heads, v_head_dim] from latents [n, rank + rope].
    Values are made finite."""
    rank = layer.kv_lora_rank
    k_nope, v = layer.expand(rows[:, :rank])
    k_rope = rows[:, None, rank:].expand(-1, layer.spec.num_heads, -1)
    return torch.cat((k_nope, k_rope), dim=-1), replace_non_finite(v)


MAX_FINITE = 2.0**100  # replaces non-finite values, where the dtype allows; a sum of thousands of them is still finite


def replace_non_finite(values: torch.Tensor, in_place: bool = False) -> torch.Tensor:
    """Values [n, heads, width], made finite.

    Library kernels give the values of a neighbouring row the weight 0, or sum them and scale the
    sum to 0; 0 * inf and 0 * NaN are NaN, which would corrupt that row. The replacement is so large
    that the row's own result still shows the fault. Costs no more than the copy that a strided
    tensor needs anyway.
    """
    maximum = min(MAX_FINITE, torch.finfo(values.dtype).max)
    n, heads, width = values.shape
    if not in_place and can_use_triton(values.device) and values.stride()[1:] == (width, 1):
        from frame.kernels.elementwise.finite import replace_non_finite_rows

        return replace_non_finite_rows(values.flatten(1), maximum).view(n, heads, width)
    out = values if in_place else torch.empty(values.shape, dtype=values.dtype, device=values.device)
    return torch.nan_to_num(values, nan=maximum, posinf=maximum, neginf=maximum, out=out)


def make_rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous; a copy if needed."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

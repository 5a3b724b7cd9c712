"""What backends that call libraries share: the cache places of rows' keys, keys and values made of latents, calls that may wait.

Knows no library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from frame.core.interfaces.attention import LatentProjections
from frame.core.interfaces.batch import ForwardBatch
from frame.kernels import can_use_triton


def locate_keys(batch: ForwardBatch, first: int, total: int, last: int | None = None) -> torch.Tensor:
    """Where in the flat cache the `total` keys of rows `first` … `last - 1` (None: of all from `first` on) are, side by side; int64."""
    page_size, lengths = batch.kv.page_size, batch.seq_lens[first:last].long()
    rows = torch.repeat_interleave(lengths, output_size=total)
    positions = torch.arange(total, device=lengths.device) - (lengths.cumsum(0) - lengths).index_select(0, rows)
    slots = batch.request_slots[first:last].index_select(0, rows)
    pages = batch.page_table.view(-1).index_select(0, slots * batch.page_table.shape[1] + positions // page_size)
    return pages.long() * page_size + positions % page_size


def expand_latents(layer: LatentProjections, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, heads, nope + rope] and values [n, heads, v_head_dim], made finite, of latents [n, rank + rope]."""
    rank = layer.kv_lora_rank
    k_nope, v = layer.expand(rows[:, :rank])
    k_rope = rows[:, None, rank:].expand(-1, layer.spec.num_heads, -1)
    return torch.cat((k_nope, k_rope), dim=-1), replace_non_finite(v)


MAX_FINITE = 2.0**100  # in place of what is not finite, if the type goes so far; some thousands of them still add up to a finite number


def replace_non_finite(values: torch.Tensor, in_place: bool = False) -> torch.Tensor:
    """Values [n, heads, width] side by side, such that none spoils another row: kernels give those of a neighbouring row a weight of zero,
    or add them up and fade the sum to zero, and zero times what is not finite is not a number. What was not finite becomes a number so
    large that the row's own result shows it. Costs no more than the copy that a strided tensor would need."""
    most = min(MAX_FINITE, torch.finfo(values.dtype).max)
    n, heads, width = values.shape
    if not in_place and can_use_triton(values.device) and values.stride()[1:] == (width, 1):
        from frame.kernels.elementwise.finite import replace_non_finite_rows

        return replace_non_finite_rows(values.flatten(1), most).view(n, heads, width)
    out = values if in_place else torch.empty(values.shape, dtype=values.dtype, device=values.device)
    return torch.nan_to_num(values, nan=most, posinf=most, neginf=most, out=out)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@contextmanager
def allow_sync(device: torch.device) -> Iterator[None]:
    """Inside, PyTorch's watch over calls that wait for a GPU is off: for what is compiled or made once."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)

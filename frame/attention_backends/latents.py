"""What several backends do with latents: the cache places of rows' keys, and keys and values made of their latents. Knows no library."""

from __future__ import annotations

import torch

from frame.core.interfaces.attention import LatentProjections
from frame.core.interfaces.batch import ForwardBatch


def key_places(batch: ForwardBatch, first: int, total: int, last: int | None = None) -> torch.Tensor:
    """Where in the flat cache the `total` keys of rows `first` … `last - 1` (None: of all from `first` on) are, side by side; int64."""
    page_size, lengths = batch.kv.page_size, batch.seq_lens[first:last].long()
    rows = torch.repeat_interleave(lengths, output_size=total)
    positions = torch.arange(total, device=lengths.device) - (lengths.cumsum(0) - lengths).index_select(0, rows)
    slots = batch.request_slots[first:last].index_select(0, rows)
    pages = batch.page_table.view(-1).index_select(0, slots * batch.page_table.shape[1] + positions // page_size)
    return pages.long() * page_size + positions % page_size


def expand(layer: LatentProjections, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [n, heads, nope + rope] and values [n, heads, v_head_dim] of latents [n, rank + rope]."""
    rank = layer.kv_lora_rank
    k_nope, v = layer.expand(rows[:, :rank])
    k_rope = rows[:, None, rank:].expand(-1, layer.spec.num_heads, -1)
    return torch.cat((k_nope, k_rope), dim=-1), v.contiguous()


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with its last dimension contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

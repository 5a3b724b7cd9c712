"""Attention over blocks of cached tokens with a running softmax (Milakov and Gimelshein, arXiv
1805.02867).

Simple rather than fast: it loops over the rows of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame_attn_example import CAPABILITIES, BlockwiseOptions

if TYPE_CHECKING:
    from pydantic import BaseModel

    from frame.core.interfaces.batch import ForwardBatch
    from frame.core.interfaces.build import BuildContext


@dataclass(frozen=True, slots=True)
class Row:
    """One request in a step."""

    tokens: slice  # of the batch's query tokens
    places: torch.Tensor  # int64 [length]; cache positions of its tokens, page * page_size + offset


class BlockwiseBackend(AttentionBackend):
    """Reads `block_tokens` cached tokens at a time, so scores are never stored for the whole
    length."""

    capabilities: ClassVar[AttentionCapabilities] = CAPABILITIES

    def __init__(self, context: BuildContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.block_tokens = (options if isinstance(options, BlockwiseOptions) else BlockwiseOptions()).block_tokens

    def plan(self, batch: ForwardBatch) -> list[Row]:
        """Translate page tables to cache positions, once per step on the host."""
        host, page_size = batch.host, batch.kv.page_size
        rows, start = [], 0
        for slot, queries, length in zip(host.slots.tolist(), host.query_lens.tolist(), host.seq_lens.tolist(), strict=True):
            pages = torch.from_numpy(host.page_table[slot, : -(-length // page_size)].copy()).long()
            places = (pages[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            rows.append(Row(slice(start, start + queries), places.to(self.context.device)))
            start += queries
        return rows

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Attend over the cache, which already has this step's k and v: `stores_kv` is False."""
        keys, values = (part.flatten(0, 1) for part in batch.kv.layer(spec.layer))
        return torch.cat([self._attend(spec, q[row.tokens], keys, values, row.places) for row in batch.plan])

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Absorbed MLA: the latent is one head of keys, and its first part the values."""
        cached = batch.kv.layer(layer.spec.layer)[0].flatten(0, 1)[:, None]
        q = torch.cat((layer.absorb(q_nope), q_rope), dim=-1)
        values = cached[..., : layer.kv_lora_rank]
        out = [self._attend(layer.spec, q[row.tokens], cached, values, row.places) for row in batch.plan]
        return layer.unabsorb(torch.cat(out))

    def _attend(self, spec: AttentionSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Attend for one row: q [queries, heads, d], keys and values [places, kv_heads, …] ->
        [queries, heads, dv]."""
        queries, heads, length = q.shape[0], q.shape[1], places.shape[0]
        group = heads // keys.shape[1]
        own = torch.arange(length - queries, length, device=q.device)[:, None]
        largest = q.new_full((heads, queries, 1), -torch.inf, dtype=torch.float32)
        total = torch.zeros_like(largest)
        out = q.new_zeros((heads, queries, values.shape[2]), dtype=torch.float32)
        for start in range(0, length, self.block_tokens):
            block = places[start : start + self.block_tokens]
            at = torch.arange(start, start + block.shape[0], device=q.device)
            is_seen = at <= own
            if spec.sliding_window is not None:
                is_seen &= at > own - spec.sliding_window
            k, v = (part[block].float().repeat_interleave(group, dim=1).transpose(0, 1) for part in (keys, values))
            scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * spec.scale
            scores = scores.masked_fill(~is_seen, -torch.inf)
            peak = torch.maximum(largest, scores.amax(dim=-1, keepdim=True))
            safe = peak.clamp_min(torch.finfo(torch.float32).min)  # finite where a query sees nothing of a block
            weights, fade = torch.exp(scores - safe), torch.exp(largest - safe)
            total = total * fade + weights.sum(dim=-1, keepdim=True)
            out = out * fade + weights @ v
            largest = peak
        return (out / total).transpose(0, 1).to(q.dtype)

"""A correct attention backend in few lines: row by row, in float32.

The mutants of `attention_backend` are derived from it. Each method is one thing that a backend can
get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch, SparseKeys, TreeMask

CAPABILITIES = AttentionCapabilities(
    devices=("cpu",), kinds=("mha", "mla"), kv_dtypes=("fp8_e4m3", "int8"), sliding_window=True, chunked=True, soft_cap=True, sinks=True,
    sparse=True, bidirectional=True, tree_mask=True,
)  # fmt: skip


@dataclass
class Row:
    """One row of a plan."""

    slot: int
    tokens: slice  # of the step
    start: int  # position of the first query
    slots: torch.Tensor  # int64 [seq_len]; KV slots
    is_decode: bool = False
    sees: torch.Tensor | None = None  # bool [queries, keys]; of a row with a tree, see `TreeMask`
    chosen: torch.Tensor | None = None  # bool [queries, keys]; the keys that sparse attention selects


class PlainAttention(AttentionBackend):
    """Gathers the keys of each row and computes softmax(q k) v. `plan` is a list of `Row`."""

    capabilities: ClassVar[AttentionCapabilities] = CAPABILITIES

    def plan(self, batch: ForwardBatch) -> Any:
        rows, first = [], 0
        for row in range(batch.num_rows):
            queries, length = int(batch.host.query_lens[row]), int(batch.host.seq_lens[row])
            slots = torch.from_numpy(self.locate(batch, row, length))
            sees = self.find_tree(batch, row, queries, length)
            tokens = slice(first, first + queries)
            rows.append(Row(int(batch.host.slots[row]), tokens, length - queries, slots, row < batch.num_decodes, sees))
            first += queries
        return rows

    def find_tree(self, batch: ForwardBatch, row: int, queries: int, length: int) -> torch.Tensor | None:
        """`Row.sees`; None: the row has no tree."""
        trees = batch.get(TreeMask)
        if trees is None or row not in trees.rows:
            return None
        places, first = torch.arange(length), int(batch.host.query_lens[:row].sum())
        behind = (places[length - queries :, None] - places).clamp_(0, 31)  # places by which each key is before the query
        return (trees.bits[first : first + queries, None] >> behind) & 1 == 1

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        """int64 [length]: KV slots of the row's positions."""
        positions, size = np.arange(length), batch.kv.page_size
        pages = batch.host.page_table[batch.host.slots[row]].astype(np.int64)
        found: np.ndarray = pages[positions // size] * size + positions % size
        return found

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = q.new_empty(q.shape[0], spec.num_heads, spec.v_head_dim)
        for row in self.rows(batch):
            keys, values = self.read(spec, batch, row) if spec.causal else (k[row.tokens], v[row.tokens])
            out[row.tokens] = self.attend(spec, row, q[row.tokens], keys, values).to(q.dtype)
        return out

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        spec, rank = layer.spec, layer.kv_lora_rank
        out = q_nope.new_empty(q_nope.shape[0], spec.num_heads, spec.v_head_dim)
        for row in self.rows(batch):
            row = replace(row, chosen=self.choose(batch, row))
            (cached,) = batch.kv.layer(spec.layer)
            rows = self.gather(cached, row.slots, self.scales(spec, batch)[0]).to(q_nope.dtype)
            k_nope, v = layer.expand(rows[:, :rank])
            k = torch.cat((k_nope, rows[:, None, rank:].expand(-1, spec.num_heads, -1)), dim=-1)
            q = torch.cat((q_nope[row.tokens], q_rope[row.tokens]), dim=-1)
            out[row.tokens] = self.attend(spec, row, q, k, v).to(q.dtype)
        return out

    def choose(self, batch: ForwardBatch, row: Row) -> torch.Tensor | None:
        """bool [queries, keys]: the keys that are selected; None: all."""
        selected = batch.get(SparseKeys)
        return None if selected is None else (selected.slots[row.tokens, :, None] == row.slots).any(1)

    def rows(self, batch: ForwardBatch) -> list[Row]:
        found: list[Row] = batch.plan
        return found

    def read(self, spec: AttentionSpec, batch: ForwardBatch, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the row, from the cache."""
        k, v = batch.kv.layer(spec.layer)
        k_scale, v_scale = self.scales(spec, batch)
        return self.gather(k, row.slots, k_scale), self.gather(v, row.slots, v_scale)

    def scales(self, spec: AttentionSpec, batch: ForwardBatch) -> tuple[float | torch.Tensor, ...]:
        """Of an int8 cache those of its tokens and heads, otherwise the layer's."""
        return batch.kv.scales(spec.layer) or (spec.k_scale, spec.v_scale)

    def gather(self, part: torch.Tensor, slots: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        flat = part.view(-1, *part.shape[2:])
        if isinstance(scale, torch.Tensor):
            return flat[slots] * scale.flatten(0, 1)[slots].float().unsqueeze(-1)
        if part.dtype == torch.float8_e4m3fn:  # indexed as bytes
            return flat.view(torch.uint8)[slots].view(part.dtype).float() * scale
        return flat[slots]

    def attend(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [queries, heads, head_dim], k and v [keys, kv_heads, …] -> [queries, heads,
        v_head_dim]."""
        k, v = self.share(spec, k.float()), self.share(spec, v.float())
        scores = self.score(spec, torch.einsum("qhd,khd->hqk", q.float(), k))
        return torch.einsum("hqk,khd->qhd", self.weigh(spec, scores.masked_fill(self.hidden(spec, row, q, k), -torch.inf)), v)

    def share(self, spec: AttentionSpec, part: torch.Tensor) -> torch.Tensor:
        """[keys, kv_heads, …] -> [keys, heads, …]."""
        return part.repeat_interleave(spec.num_heads // part.shape[1], 1)

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        scores = products * spec.scale
        return scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap)

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """bool [queries, keys]: what a query must not see."""
        at, keys = torch.arange(q.shape[0])[:, None] + row.start, torch.arange(k.shape[0])[None]
        hidden = keys > at if spec.causal else keys < 0
        if row.sees is not None:
            hidden = hidden | ~row.sees
        if row.chosen is not None:
            hidden = hidden | ~row.chosen
        if spec.sliding_window is None:
            return hidden
        return hidden | (keys < at // spec.sliding_window * spec.sliding_window if spec.chunked else keys <= at - spec.sliding_window)

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        """Softmax over the keys, with one more logit a head if there are sinks."""
        top = scores.amax(-1, keepdim=True)
        sinks = None if spec.sinks is None else spec.sinks.float()[:, None, None]
        if sinks is not None:
            top = torch.maximum(top, sinks)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        return weights / (total if sinks is None else total + torch.exp(sinks - top))

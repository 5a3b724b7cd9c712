"""Attention backends: row by row over the paged cache, and backends with a bug each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from pydantic import BaseModel

from frame.core.interfaces.attention import AttentionBackend, AttentionCapabilities, AttentionSpec, LatentProjections
from frame.core.interfaces.batch import ForwardBatch
from frame.core.interfaces.rank_context import RankContext
from tests.testing.held_out import Wrong


@dataclass(frozen=True)
class Row:
    """A row of a step: its tokens in the batch, and where its cached tokens are."""

    tokens: slice
    places: torch.Tensor  # int64 [length]
    is_decode: bool


class RowByRow(AttentionBackend):
    """Computes in float32, and reads no place that a row does not own."""

    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        devices=("cpu", "cuda"), kinds=("mha", "mla"), sliding_window=True, soft_cap=True, sinks=True, bidirectional=True
    )

    def plan(self, batch: ForwardBatch) -> Any:
        host, rows, start = batch.host, [], 0
        for number, (slot, queries, length) in enumerate(
            zip(host.slots.tolist(), host.query_lens.tolist(), host.seq_lens.tolist(), strict=True)
        ):
            places = self.find_places(batch, slot, length).to(self.context.device)
            rows.append(Row(slice(start, start + queries), places, number < batch.num_decodes))
            start += queries
        return rows

    def find_places(self, batch: ForwardBatch, slot: int, length: int) -> torch.Tensor:
        size = batch.kv.page_size
        positions = torch.arange(length)
        pages = torch.from_numpy(batch.host.page_table[slot, : self.count_pages(length, size)].astype("int64"))
        return pages[positions // size] * size + positions % size

    def count_pages(self, length: int, size: int) -> int:
        return -(-length // size)

    def get_plan(self, batch: ForwardBatch) -> list[Row]:
        rows: list[Row] = batch.plan
        return rows

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], spec.v_head_dim)
        keys, values = (part.flatten(0, 1) for part in batch.kv.layer(spec.layer)) if spec.causal else (k, v)
        for row in self.get_plan(batch):
            places: Any = row.places if spec.causal else row.tokens
            out[row.tokens] = self.attend(spec, q[row.tokens], keys[places], values[places], row)
        return out

    def run_mla(
        self, layer: LatentProjections, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        cached = batch.kv.layer(layer.spec.layer)[0].flatten(0, 1).unsqueeze(1)
        q, rank = torch.cat([layer.absorb(q_nope), q_rope], -1), layer.kv_lora_rank
        out = q.new_empty(*q.shape[:2], rank)
        for row in self.get_plan(batch):
            keys = cached[row.places]
            out[row.tokens] = self.attend(layer.spec, q[row.tokens], keys, keys[..., :rank], row)
        return layer.unabsorb(out)

    def attend(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row) -> torch.Tensor:
        """q [queries, heads, dim], k and v [length, kv_heads, …]; queries come last."""
        heads = self.find_kv_heads(q.shape[1], k.shape[1]).to(q.device)
        scores = torch.einsum("qhd,khd->hqk", self.widen(q), self.widen(k)[:, heads]) * spec.scale
        scores = self.mask(spec, self.cap(spec, scores), q, k)
        weights = self.weigh(spec, scores, row)
        return torch.einsum("hqk,khd->qhd", weights, self.widen(v)[:, heads]).to(q.dtype)

    def find_kv_heads(self, heads: int, kv_heads: int) -> torch.Tensor:
        return torch.arange(heads) // (heads // kv_heads)

    def widen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float()

    def cap(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return scores if spec.soft_cap is None else spec.soft_cap * (scores / spec.soft_cap).tanh()

    def count_positions(self, size: int, q: torch.Tensor) -> torch.Tensor:
        return torch.arange(size, device=q.device)

    def mask(self, spec: AttentionSpec, scores: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        if not spec.causal:
            return scores
        positions = self.count_positions(k.shape[0], q)
        distance = positions[k.shape[0] - q.shape[0] :].unsqueeze(1) - positions
        hidden = distance < 0
        if spec.sliding_window is not None:
            hidden |= self.is_outside(distance, spec.sliding_window)
        return scores.masked_fill(hidden, -torch.inf)

    def is_outside(self, distance: torch.Tensor, window: int) -> torch.Tensor:
        return distance >= window

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor, row: Row) -> torch.Tensor:
        if spec.sinks is None:
            return scores.softmax(-1)
        sinks = spec.sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


TWIN = RowByRow
WRONG = Wrong()


@WRONG.add("With overlapping steps a request reads the pages of another step: the last plan is kept in the object.")
class KeepsPlan(RowByRow):
    last: Any = None

    def plan(self, batch: ForwardBatch) -> Any:
        self.last = super().plan(batch)
        return self.last

    def get_plan(self, batch: ForwardBatch) -> list[Row]:
        return self.last or super().get_plan(batch)


@WRONG.add("equivalent: the page table stays as it is until the step's `run`s return.")
class PlansLate(RowByRow):
    def plan(self, batch: ForwardBatch) -> Any:
        host = batch.host
        return host.slots, host.query_lens, host.seq_lens, host.page_table

    def get_plan(self, batch: ForwardBatch) -> list[Row]:
        slots, query_lens, seq_lens, table = batch.plan
        host = replace(batch.host, slots=slots, query_lens=query_lens, seq_lens=seq_lens, page_table=table)
        rows: list[Row] = super().plan(replace(batch, host=host))
        return rows


@WRONG.add("Models with windows see one token too many, and their text drifts.")
class WiderWindow(RowByRow):
    def is_outside(self, distance: torch.Tensor, window: int) -> torch.Tensor:
        return distance > window


@WRONG.add("Models with more than eight query heads per KV head answer noise: the kernel's groups have at most eight.")
class GroupsOfEight(RowByRow):
    def find_kv_heads(self, heads: int, kv_heads: int) -> torch.Tensor:
        return (torch.arange(heads) // min(8, heads // kv_heads)) % kv_heads


@WRONG.add("Prompts above 2,048 tokens in half precision attend to later tokens: positions are compared in the model's dtype.")
class RoundsPositions(RowByRow):
    def count_positions(self, size: int, q: torch.Tensor) -> torch.Tensor:
        return torch.arange(size, device=q.device).to(q.dtype)


@WRONG.add("A request gets NaN from pages that were never written: rows are padded, and the weight 0 of a NaN is NaN.")
class PadsRows(RowByRow):
    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().run(spec, q, k, v, batch)
        if spec.causal and batch.num_decodes > 1:
            pool = batch.kv.layer(spec.layer)[1].flatten(0, 1)
            for row in self.get_plan(batch)[: batch.num_decodes]:
                page = row.places[-1] // batch.kv.page_size * batch.kv.page_size
                tail = pool[page : page + batch.kv.page_size].float().mean(0)[self.find_kv_heads(q.shape[1], pool.shape[1]).to(q.device)]
                out[row.tokens] += (0.0 * tail).to(out.dtype)  # masked places of the last page
        return out


@WRONG.add("At the first token of each page a decode does not see that token: pages are counted without the one that is new.")
class ForgetsNewPage(RowByRow):
    def plan(self, batch: ForwardBatch) -> Any:
        size = batch.kv.page_size
        is_new = [row.is_decode and len(row.places) > 1 and len(row.places) % size == 1 % size for row in super().plan(batch)]
        return [replace(row, places=row.places[:-1]) if new else row for row, new in zip(super().plan(batch), is_new, strict=True)]


@WRONG.add("The next layer computes with wrong queries where they are used again: they are scaled in place.")
class ScalesInPlace(RowByRow):
    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        q *= spec.scale
        return super().run(replace(spec, scale=1.0), q, k, v, batch)


@WRONG.add("Long contexts lose quality in bfloat16: scores and sums are rounded to the model's dtype.")
class SumsInDtype(RowByRow):
    def widen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@WRONG.add("Models with a soft cap attend to later tokens: the cap is applied after the mask, and makes -inf finite.")
class CapsAfterMask(RowByRow):
    def cap(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def mask(self, spec: AttentionSpec, scores: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().cap(spec, super().mask(spec, scores, q, k))


@WRONG.add("A model with sinks computes prompts otherwise than outputs: the extend path has none.")
class SinksOfDecodes(RowByRow):
    def weigh(self, spec: AttentionSpec, scores: torch.Tensor, row: Row) -> torch.Tensor:
        return super().weigh(spec if row.is_decode else replace(spec, sinks=None), scores, row)


@WRONG.add("Prompts that are computed as single tokens see later ones: lengths are found by slot, of which there may be several.")
class LengthBySlot(RowByRow):
    def plan(self, batch: ForwardBatch) -> Any:
        host = batch.host
        longest = dict(zip(host.slots.tolist(), host.seq_lens.tolist(), strict=True))
        lengths = host.seq_lens.copy()
        lengths[:] = [longest[slot] for slot in host.slots.tolist()]
        return super().plan(replace(batch, host=replace(host, seq_lens=lengths)))


@WRONG.add("A step reads the keys of an earlier one: gathered keys are remembered by the address of the batch's tensors.")
class RemembersByAddress(RowByRow):
    def __init__(self, context: RankContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.known: dict[Any, torch.Tensor] = {}

    def attend(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: Row) -> torch.Tensor:
        key = spec.layer, row.places.data_ptr(), len(row.places), k.shape
        if len(self.known) > 64:
            self.known.clear()
        return super().attend(spec, q, self.known.setdefault(key, k), v, row)


@WRONG.add("Very large scores of one row make others vanish: the greatest of all heads is subtracted before the exponential.")
class OneMaximum(RowByRow):
    def weigh(self, spec: AttentionSpec, scores: torch.Tensor, row: Row) -> torch.Tensor:
        if spec.sinks is not None:
            return super().weigh(spec, scores, row)
        weights = (scores - scores.amax()).exp()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)


@WRONG.add("Caches of more than 32,768 pages mix requests: page numbers are kept in 16 bits with a sign.")
class SixteenBitPages(RowByRow):
    def find_places(self, batch: ForwardBatch, slot: int, length: int) -> torch.Tensor:
        size = batch.kv.page_size
        places = super().find_places(batch, slot, length)
        return places // size % 2**15 * size + places % size

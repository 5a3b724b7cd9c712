"""Wrong attention backends: bugs in pages, plans, masks, numbers, heads and state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from frame.testing.mutants import MutantList
from frame.testing.mutants.plain_attention import CAPABILITIES, PlainAttention, Row

mutant = MUTANTS = MutantList("attention_backend", reference=PlainAttention, capabilities=CAPABILITIES)

# pages --------------------------------------------------------------------------------------------


@mutant
class PageOffByOne(PlainAttention):
    """Reads the page after the one that holds a position, where the row has one."""

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        size = batch.kv.page_size
        slots = super().locate(batch, row, length)
        return slots[np.minimum(np.arange(length) + size, length - 1)]


@mutant
class LastPageDropped(PlainAttention):
    """Ignores the last page of an extend's prefix when it is not full."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        keys, size = torch.arange(k.shape[0])[None], self.context.limits.page_size
        ragged = (keys >= row.start // size * size) & (keys < row.start) & (not row.is_decode)
        return super().hidden(spec, row, q, k) | ragged


@mutant
class PagesOfSixteen(PlainAttention):
    """Assumes pages of 16 tokens."""

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        positions = np.arange(length)
        pages = batch.host.page_table[batch.host.slots[row]].astype(np.int64)
        found = pages[np.minimum(positions // 16, len(pages) - 1)] * 16 + positions % 16
        last = batch.kv.layer(0)[0].shape[0] * batch.kv.page_size - 1
        return np.clip(found, 0, last)


@mutant
class ConsecutivePages(PlainAttention):
    """Reads a row's keys as one piece from its first page on."""

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        first = super().locate(batch, row, 1)
        last = batch.kv.layer(0)[0].shape[0] * batch.kv.page_size - 1
        return np.minimum(first + np.arange(length), last)


@mutant
class RowForSlot(PlainAttention):
    """Takes the row of the batch for the row of the page table."""

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        order = replace(batch, host=replace(batch.host, slots=np.arange(batch.num_rows, dtype=np.int32)))
        last = batch.kv.layer(0)[0].shape[0] * batch.kv.page_size - 1
        return np.clip(super().locate(order, row, length), 0, last)


@mutant
class FirstLayersCache(PlainAttention):
    """Reads the cache of layer 0 in every layer."""

    def run(self, spec: AttentionSpec, *rest: Any) -> torch.Tensor:
        return super().run(replace(spec, layer=0), *rest)


@mutant
class CountsLayers(PlainAttention):
    """Reads the cache of the layer whose number it counts over all steps, one past the right one
    after the first step."""

    calls = 0

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        self.calls, layer = self.calls + 1, min(self.calls, spec.layer + 1)
        try:
            batch.kv.layer(layer)
        except (IndexError, KeyError):
            layer = spec.layer
        return super().run(replace(spec, layer=layer), q, k, v, batch)


@mutant
class ForeignSlots(PlainAttention):
    """Multiplies slots that no row owns by zero instead of skipping them."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().run(spec, q, k, v, batch)
        return out + 0 * batch.kv.layer(spec.layer)[0].float().sum().to(out.dtype) if spec.causal else out


@mutant
class RoundsUpToPages(PlainAttention):
    """Reads whole pages and weighs the keys past the row's end with zero, NaN among them."""

    def read(self, spec: AttentionSpec, batch: ForwardBatch, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().read(spec, batch, row)
        size = batch.kv.page_size
        if len(row.slots) % size:
            page = batch.kv.layer(spec.layer)[1].view(-1, *v.shape[1:])[int(row.slots[-1]) // size * size :][:size]
            v = v + 0 * page.to(v.dtype).sum(0)
        return k, v


# plans --------------------------------------------------------------------------------------------


@mutant
class LatestPlan(PlainAttention):
    """Keeps the plan in the backend and runs the one that was made last."""

    def plan(self, batch: ForwardBatch) -> Any:
        self.latest = super().plan(batch)
        return self.latest

    def rows(self, batch: ForwardBatch) -> list[Row]:
        return self.latest


@mutant
class PlanByShape(PlainAttention):
    """Keeps plans by the lengths of the rows, and so the pages of another step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plans: dict[bytes, Any] = {}

    def plan(self, batch: ForwardBatch) -> Any:
        key = batch.host.query_lens.tobytes() + batch.host.seq_lens.tobytes()
        if key not in self.plans:
            self.plans[key] = super().plan(batch)
        return self.plans[key]


@mutant
class PlanBySlot(PlainAttention):
    """Plans one row a slot; of several rows of one slot the last one's keys are used."""

    def plan(self, batch: ForwardBatch) -> Any:
        rows = super().plan(batch)
        last = {row.slot: row for row in rows}
        return [replace(row, slots=last[row.slot].slots, start=last[row.slot].start) for row in rows]


@mutant
class PagesOnce(PlainAttention):
    """Keeps the pages of a slot and only adds to them, also for the next request in the slot."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.known: dict[int, np.ndarray] = {}

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        slot = int(batch.host.slots[row])
        old, new = self.known.get(slot, np.zeros(0, np.int64)), super().locate(batch, row, length)
        self.known[slot] = np.concatenate((old[:length], new[len(old) :]))
        return self.known[slot]


@mutant
class KeysInSlot(PlainAttention):
    """Keeps the keys of a slot that it has read, and reads only later ones from the cache."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: dict[tuple[int, int], torch.Tensor] = {}

    def read(self, spec: AttentionSpec, batch: ForwardBatch, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().read(spec, batch, row)
        old = self.kept.get((spec.layer, row.slot), k[:0])[: len(k)]
        if old.shape[1:] == k.shape[1:]:
            k = torch.cat((old, k[len(old) :]))
        self.kept[spec.layer, row.slot] = k
        return k, v


@mutant
class FirstLayersFacts(PlainAttention):
    """Uses window, scale and soft cap of the first layer for all layers."""

    first: AttentionSpec | None = None

    def run(self, spec: AttentionSpec, *rest: Any) -> torch.Tensor:
        self.first = first = self.first or spec
        return super().run(replace(spec, sliding_window=first.sliding_window, scale=first.scale, soft_cap=first.soft_cap), *rest)


# masks --------------------------------------------------------------------------------------------


@mutant
class SeesTheNextToken(PlainAttention):
    """Lets a query see the position after its own."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec, replace(row, start=row.start + 1), q, k)


@mutant
class BlindToItself(PlainAttention):
    """Hides a query's own position, except at position 0."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        at, keys = torch.arange(q.shape[0])[:, None] + row.start, torch.arange(k.shape[0])[None]
        own = (keys == at) & (at > 0) if spec.causal and spec.sliding_window is None else keys < 0
        return super().hidden(spec, row, q, k) | own


@mutant
class ExtendsStartAtZero(PlainAttention):
    """Masks an extend as if it had no cached prefix."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec, row if row.is_decode else replace(row, start=0), q, k)


@mutant
class IgnoresPrefix(PlainAttention):
    """Computes an extend over this step's tokens alone."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        before = torch.arange(k.shape[0])[None] < row.start
        return super().hidden(spec, row, q, k) | (before & (not row.is_decode))


@mutant
class IgnoresWindow(PlainAttention):
    """Computes full attention in layers with a sliding window."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(replace(spec, sliding_window=None), row, q, k)


@mutant
class WindowOffByOne(PlainAttention):
    """Does not count the query's own position in the window."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        window = None if spec.sliding_window is None else spec.sliding_window + 1
        return super().hidden(replace(spec, sliding_window=window), row, q, k)


@mutant
class WindowInDecodesOnly(PlainAttention):
    """Applies the sliding window to decodes alone."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec if row.is_decode else replace(spec, sliding_window=None), row, q, k)


@mutant
class CausalEncoder(PlainAttention):
    """Masks the layers of an encoder as a decoder's."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(replace(spec, causal=True), row, q, k)


@mutant
class SplitKeysForgotten(PlainAttention):
    """Reads at most 256 keys of a decode, as if the other splits were never merged."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        late = torch.arange(k.shape[0])[None] < max(0, k.shape[0] - 256)
        return super().hidden(spec, row, q, k) | (late & row.is_decode)


@mutant
class LongRowsCut(PlainAttention):
    """Has room for 2048 keys in a row and leaves out the oldest ones of longer rows."""

    def hidden(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().hidden(spec, row, q, k) | (torch.arange(k.shape[0])[None] < k.shape[0] - 2048)


@mutant
class ManyRowsCut(PlainAttention):
    """Launches 64 rows and leaves the results of further ones at zero."""

    def rows(self, batch: ForwardBatch) -> list[Row]:
        return super().rows(batch)[:64]

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().run(spec, q, k, v, batch)
        return torch.cat((out[: self.rows(batch)[-1].tokens.stop], torch.zeros_like(out[self.rows(batch)[-1].tokens.stop :])))


# numbers ------------------------------------------------------------------------------------------


@mutant
class DefaultScale(PlainAttention):
    """Scales by head_dim ** -0.5 whatever the layer says."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(replace(spec, scale=spec.head_dim**-0.5), products)


@mutant
class NoMaximum(PlainAttention):
    """Does not subtract the maximum before exp, which overflows for large scores."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        weights = torch.exp(scores)
        total = weights.sum(-1, keepdim=True)
        return weights / (total if spec.sinks is None else total + torch.exp(spec.sinks.float())[:, None, None])


@mutant
class HalfScores(PlainAttention):
    """Limits the products of queries and keys to 65504, the maximum of float16."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(spec, products.clamp(-65504, 65504))


@mutant
class LowMask(PlainAttention):
    """Hides keys with a score of -50 instead of minus infinity."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return super().weigh(spec, scores.clamp(min=-50))


@mutant
class IgnoresSoftCap(PlainAttention):
    """Leaves out the soft cap."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(replace(spec, soft_cap=None), products)


@mutant
class SoftCapAfterMask(PlainAttention):
    """Caps the scores after the mask, so that hidden keys have the score -cap."""

    def score(self, spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
        return super().score(replace(spec, soft_cap=None), products)

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return super().weigh(spec, scores if spec.soft_cap is None else spec.soft_cap * torch.tanh(scores / spec.soft_cap))


@mutant
class IgnoresSinks(PlainAttention):
    """Leaves out the attention sinks."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        return super().weigh(replace(spec, sinks=None), scores)


@mutant
class OneSink(PlainAttention):
    """Uses the sink of the first head for all heads."""

    def weigh(self, spec: AttentionSpec, scores: torch.Tensor) -> torch.Tensor:
        sinks = None if spec.sinks is None else spec.sinks[:1].expand_as(spec.sinks)
        return super().weigh(replace(spec, sinks=sinks), scores)


@mutant
class IgnoresCacheScale(PlainAttention):
    """Reads an fp8 cache without its scale."""

    def gather(self, part: torch.Tensor, slots: torch.Tensor, scale: float) -> torch.Tensor:
        return super().gather(part, slots, 1.0)


@mutant
class SwapsCacheScales(PlainAttention):
    """Scales the keys of an fp8 cache as values, and the values as keys."""

    def read(self, spec: AttentionSpec, batch: ForwardBatch, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(replace(spec, k_scale=spec.v_scale, v_scale=spec.k_scale), batch, row)


# heads --------------------------------------------------------------------------------------------


@mutant
class InterleavedHeads(PlainAttention):
    """Maps query head h to KV head h modulo the number of KV heads."""

    def share(self, spec: AttentionSpec, part: torch.Tensor) -> torch.Tensor:
        return part.repeat(1, spec.num_heads // part.shape[1], 1)


@mutant
class FirstKeyHead(PlainAttention):
    """Reads the first KV head for all query heads."""

    def share(self, spec: AttentionSpec, part: torch.Tensor) -> torch.Tensor:
        return part[:, :1].expand(-1, spec.num_heads, -1) if part.shape[1] < spec.num_heads else part


@mutant
class DenseQueries(PlainAttention):
    """Reads queries as if the tokens lay one after the other in memory."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        flat = torch.as_strided(q, q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1), q.storage_offset())
        return super().run(spec, flat, *rest)


@mutant
class ForgetsRotatedPart(PlainAttention):
    """Leaves out the rotated part of the queries in latent attention."""

    def run_mla(self, layer: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().run_mla(layer, q_nope, torch.zeros_like(q_rope), *rest)


# results and side effects -------------------------------------------------------------------------


@mutant
class DropsLastOfChunk(PlainAttention):
    """Leaves the result of the last token of each extend at zero."""

    def attend(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = super().attend(spec, row, q, k, v)
        if not row.is_decode:
            out[-1] = 0
        return out


@mutant
class LeavesHoles(PlainAttention):
    """Does not write the result of the last token, which stays uninitialised memory."""

    def run(self, *arguments: Any) -> torch.Tensor:
        out = super().run(*arguments)
        holed = torch.empty_like(out)
        holed[:-1] = out[:-1]
        return holed


@mutant
class MixesRows(PlainAttention):
    """Normalises over all rows of the batch, so that one row's NaN reaches the others."""

    def run(self, *arguments: Any) -> torch.Tensor:
        out = super().run(*arguments)
        return out + 0 * out.sum(0, keepdim=True)


@mutant
class OtherType(PlainAttention):
    """Returns float32 whatever the model computes in."""

    def run(self, *arguments: Any) -> torch.Tensor:
        return super().run(*arguments).float()


@mutant
class ScalesQueriesInPlace(PlainAttention):
    """Multiplies the given queries by the scale in place."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().run(replace(spec, scale=1.0), q.mul_(spec.scale), *rest) if spec.soft_cap is None else super().run(spec, q, *rest)


@mutant
class ClearsNaN(PlainAttention):
    """Replaces NaN in the cache by zero, in place: it writes pages of other requests."""

    def read(self, spec: AttentionSpec, batch: ForwardBatch, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
        for part in batch.kv.layer(spec.layer):
            if part.dtype != torch.float8_e4m3fn:
                part.nan_to_num_()
        return super().read(spec, batch, row)


@mutant
class WritesPageTable(PlainAttention):
    """Replaces unused entries of the host's page table by zero, in place."""

    def plan(self, batch: ForwardBatch) -> Any:
        batch.host.page_table[batch.host.page_table == 2**30] = 0
        return super().plan(batch)


class StoresKV(PlainAttention):
    """Correct, and writes K and V itself."""

    capabilities = replace(CAPABILITIES, stores_kv=True)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        if spec.causal:
            batch.store_kv(spec, k, v)
        return super().run(spec, q, k, v, batch)

    def run_mla(self, layer: Any, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        batch.store_kv(layer.spec, latent)
        return super().run_mla(layer, q_nope, q_rope, latent, batch)


@mutant.using(capabilities=StoresKV.capabilities)
class StoresAfterReading(StoresKV):
    """Writes K and V to the cache after it has read it."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = PlainAttention.run(self, spec, q, k, v, batch)
        if spec.causal:
            batch.store_kv(spec, k, v)
        return out


@mutant.using(capabilities=StoresKV.capabilities)
class StoresForOneStep(StoresKV):
    """Uses this step's K and V, and stores them only until its own result is computed."""

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out = super().run(spec, q, k, v, batch)
        if spec.causal:
            batch.store_kv(spec, torch.zeros_like(k), torch.zeros_like(v))
        return out


@mutant.using(capabilities=replace(CAPABILITIES, batch_invariant=True))
class NotBatchInvariant(PlainAttention):
    """States batch invariance and rounds by the number of rows."""

    capabilities = replace(CAPABILITIES, batch_invariant=True)

    def run(self, spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return super().run(spec, q, k, v, batch) * (1 + 1e-6 * batch.num_rows)


@mutant.using(capabilities=replace(CAPABILITIES, sinks=False))
class RecordDiffers(PlainAttention):
    """Supports attention sinks and has a record that denies it."""

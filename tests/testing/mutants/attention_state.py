"""Wrong attention backends: bugs in pages, plans, results and side effects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from frame.core.interfaces.attention import AttentionSpec
from frame.core.interfaces.batch import ForwardBatch
from tests.testing.mutants import MutantList
from tests.testing.plain_attention import CAPABILITIES, PlainAttention, Row

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
class PlanOfEqualRows(PlainAttention):
    """Keeps the last plan while the slots and lengths of the rows stay the same."""

    last: tuple[bytes, Any] = b"", None

    def plan(self, batch: ForwardBatch) -> Any:
        host = batch.host
        key = host.slots.tobytes() + host.query_lens.tobytes() + host.seq_lens.tobytes()
        if self.last[0] != key:
            self.last = key, super().plan(batch)
        return self.last[1]


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


@mutant
class FirstLayersScales(PlainAttention):
    """Reads the fp8 cache of every layer by the scales of the first layer."""

    first: AttentionSpec | None = None

    def scales(self, spec: AttentionSpec, batch: ForwardBatch) -> Any:
        self.first = self.first or spec
        return super().scales(replace(spec, k_scale=self.first.k_scale, v_scale=self.first.v_scale), batch)


@mutant
class FirstLayersSinks(PlainAttention):
    """Uses the sinks of the first layer that has some in all layers of as many heads."""

    first: torch.Tensor | None = None

    def run(self, spec: AttentionSpec, *rest: Any) -> torch.Tensor:
        if spec.sinks is not None:
            self.first = spec.sinks if self.first is None else self.first
            spec = replace(spec, sinks=self.first if self.first.shape == spec.sinks.shape else spec.sinks)
        return super().run(spec, *rest)


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


@mutant.using(capabilities=replace(CAPABILITIES, device_lengths=True))
class PlansFromBounds(PlainAttention):
    """States that it reads lengths on the device, and plans from those of the host."""

    capabilities = replace(CAPABILITIES, device_lengths=True)


@mutant.using(capabilities=replace(CAPABILITIES, sinks=False))
class RecordDiffers(PlainAttention):
    """Supports attention sinks and has a record that denies it."""


class ClaimsInvariance(PlainAttention):
    """Of the mutants that state to be batch-invariant."""

    capabilities = replace(CAPABILITIES, batch_invariant=True)


@mutant.using(capabilities=ClaimsInvariance.capabilities)
class SumsByTheLength(ClaimsInvariance):
    """States that it is batch-invariant, and adds two sums over halves of the row's keys."""

    def attend(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        half = len(v) // 2
        first, second = v.clone(), v.clone()
        first[half:], second[:half] = 0, 0
        return super().attend(spec, row, q, k, first) + super().attend(spec, row, q, k, second)


@mutant.using(capabilities=ClaimsInvariance.capabilities)
class OtherSumOfDecodes(SumsByTheLength):
    """States that it is batch-invariant, and sums in another order in decodes."""

    def attend(self, spec: AttentionSpec, row: Row, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (super() if row.is_decode else super(SumsByTheLength, self)).attend(spec, row, q, k, v)


@mutant
class KeepsItsSinks(PlainAttention):
    """Copies the sinks of a layer in its first step, so that an update has no effect."""

    kept: torch.Tensor | None = None

    def run(self, spec: AttentionSpec, *arguments: Any) -> torch.Tensor:
        if spec.sinks is None:
            return super().run(spec, *arguments)
        if self.kept is None or self.kept.shape != spec.sinks.shape:
            self.kept = spec.sinks.clone()
        return super().run(replace(spec, sinks=self.kept), *arguments)


@mutant
class KeepsSteps(PlainAttention):
    """Keeps the batch of each plan."""

    def plan(self, batch: ForwardBatch) -> Any:
        self.batches = [*getattr(self, "batches", []), batch]
        return super().plan(batch)


@mutant
class LeavesTheLastSlot(PlainAttention):
    """Never reads the last slot of a row that has as many pages as the table has columns."""

    def locate(self, batch: ForwardBatch, row: int, length: int) -> np.ndarray:
        last = batch.host.page_table.shape[1] * batch.kv.page_size - 1
        return super().locate(batch, row, length)[np.minimum(np.arange(length), last - 1)]


@mutant
class SetsTheDefaultDtype(PlainAttention):
    """Makes new tensors of the whole process have its own dtype."""

    def plan(self, batch: ForwardBatch) -> Any:
        torch.set_default_dtype(self.context.dtype)
        return super().plan(batch)

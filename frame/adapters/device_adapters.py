"""`DeviceAdapters`: the adapters of one rank in each step: which rows use which.

Made by the runner's builder before the model, whose layers register with it; the runner calls it in
each step. Must not know a request, a file or a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from frame.adapters.adapter_pool import AdapterPool
from frame.adapters.deltas import DeltaOperations, SupportsProof
from frame.adapters.latent_layers import LatentLayer
from frame.adapters.pooled_layers import PooledLayer, StepRows
from frame.core.interfaces.platform import SupportsStreams

if TYPE_CHECKING:
    from frame.adapters.host_adapters import HostAdapter
    from frame.core.interfaces.adapter_layers import Span
    from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch
    from frame.core.interfaces.rank_context import Limits
    from frame.core.interfaces.runner import AdapterOrder, PendingOrder


class DeviceAdapters:
    """Implements `StepAdapters`. Call `allocate` once the model is built."""

    start_order: Callable[[AdapterOrder], PendingOrder]  # the builder sets it, once the model is loaded

    def __init__(self, pool: AdapterPool, operations: DeltaOperations, *, adapts_routers: bool = False) -> None:
        streams = pool.platform if isinstance(pool.platform, SupportsStreams) else None
        self.pool = pool
        self.adapts_routers = adapts_routers
        self.is_warming_up = False
        self.host: dict[str, HostAdapter] = {}  # by digest; loads read it
        self._rows = StepRows(operations, streams)

    def add_layer(
        self, names: Sequence[str], inputs: Span, outputs: Sequence[Span], num_experts: int = 0, lookup: bool = False
    ) -> PooledLayer:
        """See `AdapterLayers.add_layer`."""
        return self.pool.add_layer(PooledLayer(tuple(names), inputs, tuple(outputs), num_experts, lookup, self._rows))

    def add_latent_layer(self, name: str, latent: Span, heads: Span, widths: tuple[Span, Span]) -> LatentLayer:
        """See `AdapterLayers.add_latent_layer`."""
        return self.pool.add_layer(LatentLayer.create(name, latent, heads, widths, self._rows))

    def allocate(self, limits: Limits) -> None:
        """Allocate the pool and the tables."""
        device = self.pool.platform.device
        self.pool.allocate(self._rows)
        if isinstance(self._rows.operations, SupportsProof):
            for layer in self.pool.layers:
                for pages in layer.list_pages():
                    self._rows.operations.prove(pages)
        self._slots = _SlotTables.empty(limits.max_running_requests + 1, device)  # the padding slot included
        self._token_places = torch.full((limits.max_tokens_per_step,), -1, dtype=torch.int32, device=device)

    @property
    def is_active(self) -> bool:
        """See `StepAdapters`."""
        return self._rows.is_active

    @is_active.setter
    def is_active(self, value: bool) -> None:
        self._rows.is_active, self._rows.used = value, None

    def begin_step(self, batch: ScheduledBatch) -> None:
        """See `StepAdapters.begin_step`."""
        for load in batch.adapter_loads:
            self.pool.load(load, self.host[load.digest])
        self._slots.update(batch)
        places = self._slots.host[0, batch.slots]
        used = np.unique(places[places >= 0])
        self.is_active = self.is_warming_up or len(used) > 0
        self._rows.used = None if self.is_warming_up else used
        self.pool.await_copies(places)

    def place_tokens(self, batch: ForwardBatch, size: int) -> None:
        """See `StepAdapters.place_tokens`."""
        slots, count = batch.request_slots, batch.num_tokens
        if batch.num_rows != count:
            slots = slots.repeat_interleave(batch.query_lens.long(), output_size=count)
        self._slots.find_places(slots, batch.positions, self._token_places[:count])
        self._token_places[count:size].fill_(-1)

    def plan_tokens(self, size: int) -> None:
        """See `StepAdapters.plan_tokens`."""
        self._rows.plan = self._rows.plan_rows(self._token_places[:size])

    def end_step(self) -> None:
        """See `StepAdapters.end_step`."""
        self.is_active, self._rows.plan, self._rows.heads = False, None, None

    @contextmanager
    def select_rows(self, indices: torch.Tensor | None) -> Iterator[None]:
        """See `AdapterLayers.select_rows`."""
        if not self.is_active:
            yield
            return
        before = self._rows.plan
        self._rows.is_active = indices is not None
        self._rows.plan = None if indices is None else self._rows.plan_rows(self._token_places.index_select(0, indices))
        try:
            yield
        finally:
            self._rows.is_active, self._rows.plan = True, before

    @contextmanager
    def select_pairs(self, tokens: torch.Tensor, experts: torch.Tensor) -> Iterator[None]:
        """See `AdapterLayers.select_pairs`."""
        places = self._rows.select_plan(0).places.index_select(0, tokens)
        self._rows.pairs = self._rows.plan_rows(places, experts, max(layer.num_experts for layer in self.pool.layers))
        try:
            yield
        finally:
            self._rows.pairs = None


@dataclass(slots=True)
class _SlotTables:
    """By request slot: the place of its adapter (-1: none), and the first position at which it is
    active."""

    host: np.ndarray  # int32 [2, slots]
    device: torch.Tensor  # int32 [2, slots]

    @classmethod
    def empty(cls, num_slots: int, device: torch.device) -> _SlotTables:
        host = np.zeros((2, num_slots), np.int32)
        host[0] = -1
        return cls(host, torch.from_numpy(host).to(device, copy=True))

    def update(self, batch: ScheduledBatch) -> None:
        """Set up and release the batch's slots."""
        changed = False
        for slot in batch.released:
            changed |= bool(self.host[0, slot] >= 0)
            self.host[0, slot] = -1
        for setup in batch.setups:
            changed |= setup.adapter >= 0 or bool(self.host[0, setup.slot] >= 0)
            # positions of tokens are less than their places, by what media save before them
            start = setup.adapter_start and setup.adapter_start + setup.position_offset
            self.host[:, setup.slot] = setup.adapter, start
        if changed:
            self.device.copy_(torch.from_numpy(self.host.copy()), non_blocking=True)

    def find_places(self, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """The place of each token, whose slots and positions these are, int64 [tokens]."""
        places, starts = self.device.index_select(1, slots).unbind()
        out.copy_(torch.where(positions >= starts, places, -1))

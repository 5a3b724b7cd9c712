"""`DeviceAdapters`: the adapters on one rank's device: the pool of pages, the place of each
adapter, and which rows of a step use which.

Made by the runner's builder before the model, whose layers register with it. Used by the runner in
each step. Must not know a request, a file or a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.adapters.deltas import DeltaOperations, LayerPages, RowPlan
from frame.core.interfaces.adapter import PAGE_RANKS, AdapterLoad, AdapterOrder, PendingOrder, Span
from frame.core.interfaces.platform import SupportsStreams

if TYPE_CHECKING:
    from frame.adapters.host_adapters import HostAdapter
    from frame.adapters.orders import AdapterLoader
    from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch
    from frame.core.interfaces.collective import Collective
    from frame.core.interfaces.platform import Platform
    from frame.core.interfaces.rank_context import Limits

_ALIGNMENT = 64  # elements at which a layer's part of a page begins


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """The sizes of the pool: places for adapters, pages of `PAGE_RANKS` ranks, and the most pages
    of one adapter."""

    places: int
    pages: int
    max_pages: int


@dataclass(slots=True)
class PooledLayer:
    """A layer's deltas of all adapters on the device; implements `LayerDelta`. `names`: checkpoint
    layers, of each expert in turn."""

    names: Sequence[str]
    inputs: Span
    outputs: Sequence[Span]
    num_experts: int
    adapters: DeviceAdapters
    first: int = 0  # element of a page at which the layer's part begins
    pages: LayerPages | None = None  # None before `allocate`
    gemm: Any = None  # x -> the product without deltas; the layer's `finish` sets it

    @property
    def is_active(self) -> bool:
        return self.adapters.is_active

    @property
    def num_stacks(self) -> int:
        """Matrices `a` of one page."""
        return max(1, self.num_experts) * len(self.outputs)

    @property
    def num_outputs(self) -> int:
        return sum(span.size for span in self.outputs)

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of `a` and of `b` in one page."""
        return self.num_stacks * PAGE_RANKS * self.inputs.size, max(1, self.num_experts) * self.num_outputs * PAGE_RANKS

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        adapters = self.adapters
        return adapters.operations.shrink(x, self._pages, adapters.get_plan(self.num_experts), adapters.place_pages)

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        adapters = self.adapters
        adapters.operations.expand(out, shrunk, self._pages, adapters.get_plan(self.num_experts), adapters.place_pages, bias)
        return out

    @property
    def _pages(self) -> LayerPages:
        assert self.pages is not None, "the pool is allocated before the first step"
        return self.pages

    def view_page(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's part of pages [..., elements]: `a` [..., stacks, PAGE_RANKS, inputs] and `b`
        [..., max(1, experts), outputs, PAGE_RANKS]."""
        size_a, size_b = self.sizes
        second = self.first + _align(size_a)
        a = page[..., self.first : self.first + size_a].unflatten(-1, (self.num_stacks, PAGE_RANKS, self.inputs.size))
        b = page[..., second : second + size_b].unflatten(-1, (max(1, self.num_experts), self.num_outputs, PAGE_RANKS))
        return a, b


@dataclass(slots=True)
class _Copy:
    """A copy to the device. `event`: when it is done."""

    place: int
    event: Any
    source: HostAdapter  # kept until then


@dataclass(slots=True)
class _Rows:
    """The rows that layers compute now. None: no row has an adapter."""

    plan: RowPlan | None = None
    pairs: RowPlan | None = None


class DeviceAdapters:
    """Implements `AdapterLayers`. Call `allocate` once the model is built; then in each step
    `begin_step`, `set_rows` before the forward pass and `end_step` after the logits."""

    def __init__(self, operations: DeltaOperations, sizes: AdapterSizes, platform: Platform, dtype: torch.dtype, tp: Collective) -> None:
        self.operations = operations
        self.sizes = sizes
        self.platform = platform
        self.dtype = dtype
        self.tp = tp
        self.layers: list[PooledLayer] = []
        self.is_active = False
        self.host: dict[str, HostAdapter] = {}  # by digest; loads read it
        self.loader: AdapterLoader | None = None  # the builder sets it, once the model is loaded
        self._rows = _Rows()
        self._copies: list[_Copy] = []
        self._streams = platform if isinstance(platform, SupportsStreams) else None
        self._copy_stream: Any = None

    # construction ---------------------------------------------------------------------------------

    def add_layer(self, names: Sequence[str], inputs: Span, outputs: Sequence[Span], num_experts: int = 0) -> PooledLayer:
        """See `AdapterLayers.add_layer`."""
        layer = PooledLayer(tuple(names), inputs, tuple(outputs), num_experts, self, self.page_elements)
        self.layers.append(layer)
        return layer

    @property
    def page_elements(self) -> int:
        """Elements of one page: `PAGE_RANKS` ranks of all layers."""
        if not self.layers:
            return 0
        last = self.layers[-1]
        return last.first + sum(map(_align, last.sizes))

    @property
    def num_bytes(self) -> int:
        """Bytes that `allocate` takes on the device."""
        scales = 4 * self.sizes.places * sum(layer.num_outputs for layer in self.layers if not layer.num_experts)
        return self.sizes.pages * self.page_elements * self.dtype.itemsize + scales

    def allocate(self, limits: Limits) -> None:
        """Allocate the pool and the tables."""
        device, places = self.platform.device, self.sizes.places
        self._copy_stream = None if self._streams is None else self._streams.create_stream()
        self.place_pages = torch.zeros(places, self.sizes.max_pages, dtype=torch.int32, device=device)
        self._slots = _SlotTables.empty(limits.max_running_requests + 1, device)  # the padding slot included
        self._token_places = torch.full((limits.max_tokens_per_step,), -1, dtype=torch.int32, device=device)
        self._pool = torch.zeros(self.sizes.pages, self.page_elements, dtype=self.dtype, device=device)
        self._counts, self._has_scale = (torch.zeros(len(self.layers), places, dtype=torch.int32, device=device) for _ in range(2))
        for index, layer in enumerate(self.layers):
            scales = torch.ones(places, 0 if layer.num_experts else layer.num_outputs, device=device)
            splits = tuple(span.size for span in layer.outputs)
            flags = self._has_scale[index]
            layer.pages = LayerPages(*layer.view_page(self._pool), splits, self._counts[index], scales, flags, layer.num_experts)

    # steps ----------------------------------------------------------------------------------------

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Copy adapters to their places, and set up the step's slots."""
        for load in batch.adapter_loads:
            self._load(load)
        self._slots.update(batch)
        self.is_active = self._slots.has_adapters(batch.slots)
        if not self._copies:
            return
        used = set(self._slots.host[0, batch.slots].tolist())
        for copy in self._copies:
            if copy.place in used and self._streams is not None:
                self._streams.get_current_stream().wait_event(copy.event)
        self._copies = [copy for copy in self._copies if not copy.event.query()]

    def set_rows(self, batch: ForwardBatch) -> None:
        """See `StepAdapters.set_rows`."""
        self.place_tokens(batch, batch.num_tokens)
        self.plan_tokens(batch.num_tokens)

    def place_tokens(self, batch: ForwardBatch, size: int) -> None:
        """See `StepAdapters.place_tokens`."""
        slots, count = batch.request_slots, batch.num_tokens
        if batch.num_rows != count:
            slots = slots.repeat_interleave(batch.query_lens.long(), output_size=count)
        self._slots.find_places(slots, batch.positions, self._token_places[:count])
        self._token_places[count:size].fill_(-1)

    def plan_tokens(self, size: int) -> None:
        """See `StepAdapters.plan_tokens`."""
        self._rows = _Rows(self.operations.plan_rows(RowPlan(self._token_places[:size]), self.sizes.places))

    def end_step(self) -> None:
        """No further row has an adapter."""
        self.is_active, self._rows = False, _Rows()

    def get_plan(self, num_experts: int) -> RowPlan:
        """The rows that a layer computes now."""
        plan = self._rows.pairs if num_experts else self._rows.plan
        assert plan is not None, "the rows of a step are set before its layers run"
        return plan

    @contextmanager
    def select_rows(self, indices: torch.Tensor | None) -> Iterator[None]:
        """See `AdapterLayers.select_rows`."""
        if not self.is_active:
            yield
            return
        before, self._rows = self._rows, _Rows()
        self.is_active = indices is not None
        if indices is not None:
            places = self._token_places.index_select(0, indices)
            self._rows = _Rows(self.operations.plan_rows(RowPlan(places), self.sizes.places))
        try:
            yield
        finally:
            self.is_active, self._rows = True, before

    @contextmanager
    def select_pairs(self, tokens: torch.Tensor, experts: torch.Tensor) -> Iterator[None]:
        """See `AdapterLayers.select_pairs`."""
        places = self.get_plan(0).places.index_select(0, tokens)
        num_experts = max(layer.num_experts for layer in self.layers)
        self._rows.pairs = self.operations.plan_rows(RowPlan(places, experts, tokens), self.sizes.places, num_experts)
        try:
            yield
        finally:
            self._rows.pairs = None

    def start_order(self, order: AdapterOrder) -> PendingOrder:
        """See `ModelRunner.start_order`."""
        assert self.loader is not None, "the builder sets it"
        return self.loader.start_order(order)

    # loads ----------------------------------------------------------------------------------------

    def _load(self, load: AdapterLoad) -> None:
        """Copy an adapter to its place and pages beside the steps in flight, none of which reads
        them any more once those launched before have ended."""
        adapter = self.host[load.digest]
        scales = adapter.find_scales(self)  # the first time of DoRA: with all ranks, on the steps' stream
        if self._streams is None or self._copy_stream is None:
            self._copy(adapter, scales, load)
            return
        self._copy_stream.wait_stream(self._streams.get_current_stream())
        with self._streams.use_stream(self._copy_stream):
            self._copy(adapter, scales, load)
            event = self._streams.create_event()
            event.record()
        self._copies.append(_Copy(load.place, event, adapter))

    def _copy(self, adapter: HostAdapter, scales: dict[int, torch.Tensor], load: AdapterLoad) -> None:
        place = load.place
        for page, values in zip(load.pages, adapter.pages, strict=True):
            self._pool[page].copy_(values, non_blocking=True)
        row = torch.zeros(self.sizes.max_pages, dtype=torch.int32)
        row[: len(load.pages)] = torch.tensor(load.pages, dtype=torch.int32)
        self.place_pages[place].copy_(row, non_blocking=True)
        self._counts[:, place].copy_(adapter.counts, non_blocking=True)
        for index, values in scales.items():
            pages = self.layers[index].pages
            assert pages is not None, "the pool is allocated"
            pages.scales[place].copy_(values, non_blocking=True)
        flags = torch.zeros(len(self.layers), dtype=torch.int32)
        flags[list(scales)] = 1
        self._has_scale[:, place].copy_(flags, non_blocking=True)


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
            changed |= self.host[0, slot] >= 0
            self.host[0, slot] = -1
        for setup in batch.setups:
            changed |= setup.adapter >= 0 or self.host[0, setup.slot] >= 0
            self.host[:, setup.slot] = setup.adapter, setup.adapter_start
        if changed:
            self.device.copy_(torch.from_numpy(self.host.copy()), non_blocking=True)

    def has_adapters(self, slots: np.ndarray) -> bool:
        return bool((self.host[0, slots] >= 0).any())

    def find_places(self, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """The place of each token, whose slots and positions these are, int64 [tokens]."""
        places, starts = self.device.index_select(1, slots).unbind()
        out.copy_(torch.where(positions >= starts, places, -1))


def _align(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT

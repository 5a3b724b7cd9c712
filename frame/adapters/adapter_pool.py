"""`AdapterPool`: the memory of adapters on one rank's device, and the copies into it.

A page holds `PAGE_RANKS` ranks of all layers, so that an adapter takes its own rank. Used by
`DeviceAdapters`. Must not know a row, a request or a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from frame.adapters.output_scales import compute_scales
from frame.adapters.pooled_layers import PooledLayer, StepRows
from frame.core.interfaces.platform import SupportsStreams

if TYPE_CHECKING:
    from frame.adapters.host_adapters import HostAdapter
    from frame.core.interfaces.batch import AdapterLoad
    from frame.core.interfaces.collective import Collective
    from frame.core.interfaces.platform import Platform


_Layer = TypeVar("_Layer", bound=PooledLayer)


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """The sizes of the pool: places for adapters, pages of `PAGE_RANKS` ranks, and the most pages
    of one adapter."""

    places: int
    pages: int
    max_pages: int


@dataclass(slots=True)
class _Copy:
    """A copy to the device. `event`: when it is done."""

    place: int
    event: Any
    source: HostAdapter  # kept until then


class AdapterPool:
    """Layers are added while the model is built; `allocate` follows."""

    def __init__(self, sizes: AdapterSizes, platform: Platform, dtype: torch.dtype, tp: Collective) -> None:
        self.sizes = sizes
        self.platform = platform
        self.dtype = dtype
        self.layers: list[PooledLayer] = []
        self._tp = tp
        self._copies: list[_Copy] = []
        self._streams = platform if isinstance(platform, SupportsStreams) else None
        self._copy_stream: Any = None

    def add_layer(self, layer: _Layer) -> _Layer:
        """Give a layer its part of each page. -> the layer."""
        layer.begin_at(len(self.layers), self.page_elements)
        self.layers.append(layer)
        return layer

    @property
    def page_elements(self) -> int:
        """Elements of one page."""
        return self.layers[-1].first + sum(self.layers[-1].sizes) if self.layers else 0

    @property
    def num_bytes(self) -> int:
        """Bytes that `allocate` takes on the device."""
        scales = 4 * self.sizes.places * sum(layer.num_outputs for layer in self.layers if not layer.num_experts)
        return self.sizes.pages * self.page_elements * self.dtype.itemsize + scales

    def allocate(self, rows: StepRows) -> None:
        """Allocate the pages and the tables of places, to which `rows` gets a reference."""
        device, places = self.platform.device, self.sizes.places
        self._copy_stream = None if self._streams is None else self._streams.create_stream()
        self._place_pages = rows.place_pages = torch.zeros(places, self.sizes.max_pages, dtype=torch.int32, device=device)
        self._pages = torch.zeros(self.sizes.pages, self.page_elements, dtype=self.dtype, device=device)
        self._host_counts = rows.counts = np.zeros((len(self.layers), places), np.int32)
        self._counts, self._has_scale = (torch.zeros(len(self.layers), places, dtype=torch.int32, device=device) for _ in range(2))
        for index, layer in enumerate(self.layers):
            scales = torch.ones(places, 0 if layer.num_experts else layer.num_outputs, device=device)
            layer.open_pages(self._pages, self._counts[index], scales, self._has_scale[index])

    def load(self, load: AdapterLoad, adapter: HostAdapter) -> None:
        """Copy an adapter to its place and pages beside the steps in flight, none of which reads
        them any more once those launched before have ended."""
        self._find_scales(adapter)
        self._host_counts[:, load.place] = adapter.counts.numpy()
        if self._streams is None:
            self._copy(adapter, load)
            return
        self._copy_stream.wait_stream(self._streams.get_current_stream())
        with self._streams.use_stream(self._copy_stream):
            self._copy(adapter, load)
            event = self._streams.create_event()
            event.record()
        self._copies.append(_Copy(load.place, event, adapter))

    def await_copies(self, places: np.ndarray) -> None:
        """Let the current stream wait for the copies to these places that have not ended."""
        if not self._copies or self._streams is None:
            return
        used = set(places.tolist())
        for copy in self._copies:
            if copy.place in used:
                self._streams.get_current_stream().wait_event(copy.event)
        self._copies = [copy for copy in self._copies if not copy.event.query()]

    def _find_scales(self, adapter: HostAdapter) -> None:
        """Compute the factors of an adapter's rows the first time. All ranks do so in the same
        step, as the norm of a row whose inputs are divided is the sum over the ranks."""
        device = self.platform.device
        for index in sorted(adapter.norms):
            layer = self.layers[index]
            deltas = layer.view_page(adapter.pages[: int(adapter.counts[index])].to(device))
            adapter.scales[index] = compute_scales(layer, adapter.norms[index].to(device), deltas, self._tp).cpu()
        adapter.norms.clear()

    def _copy(self, adapter: HostAdapter, load: AdapterLoad) -> None:
        place = load.place
        for page, values in zip(load.pages, adapter.pages, strict=True):
            self._pages[page].copy_(values, non_blocking=True)
        self._place_pages[place, : len(load.pages)].copy_(torch.tensor(load.pages, dtype=torch.int32), non_blocking=True)
        self._counts[:, place].copy_(adapter.counts, non_blocking=True)
        for index, values in adapter.scales.items():
            pages = self.layers[index].pages
            assert pages is not None, "the pool is allocated"
            pages.scales[place].copy_(values, non_blocking=True)
        flags = torch.zeros(len(self.layers), dtype=torch.int32)
        flags[list(adapter.scales)] = 1
        self._has_scale[:, place].copy_(flags, non_blocking=True)

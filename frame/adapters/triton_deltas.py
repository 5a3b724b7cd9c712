"""`TritonDeltas`: the products of low-rank deltas on GPUs, by the kernels of `frame.kernels.lora`.

Used by `DeviceAdapters` where Triton runs. Must not know files, requests or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from frame import kernels
from frame.adapters.deltas import LayerPages, RowPlan
from frame.core.interfaces.adapter_layers import SortedPairs
from frame.kernels.lora.products import ProductSizes, Tiles, choose_sizes, expand, list_blocks, shrink
from frame.kernels.lora.row_tiles import choose_block, group_rows
from frame.kernels.moe.expert_deltas import shrink_sorted


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledPlan(RowPlan):
    """Rows grouped into tiles of one adapter and expert each."""

    tiles: Tiles


class TritonDeltas:
    """Two launches for each layer, and at most one for each plan of up to 512 rows; see
    `DeltaOperations`.

    The kernels are compiled, and a table of each layer's shape is copied to the device, at the
    first use, which therefore must not be captured in a CUDA graph. `choose`: the sizes of a
    layer's programs, by (rows of a tile, inputs, outputs of each part, pages of an adapter,
    bytes of a value, shared memory of a program).
    """

    def __init__(self, choose: Callable[[int, int, tuple[int, ...], int, int, int], ProductSizes] = choose_sizes) -> None:
        self._choose = choose
        self._sizes: dict[tuple[int, int, tuple[int, ...], int, int], ProductSizes] = {}
        self._blocks: dict[tuple[tuple[int, ...], int, torch.device], tuple[torch.Tensor, int]] = {}

    def plan_rows(self, plan: RowPlan, num_places: int, num_experts: int = 0) -> TiledPlan:
        places, experts, num_rows = plan.places, plan.experts, len(plan.places)
        block = choose_block(num_rows, num_places, num_experts)
        if block == 1:
            keys, rows, counters = places, places if experts is None else experts, None
        else:
            keys, rows, counters = group_rows(places, experts, num_places, num_experts, block)
        tiles = Tiles(keys, rows, block, num_rows, 0 if experts is None else num_experts, counters=counters)
        return TiledPlan(places, experts, tiles=tiles)

    def shrink(self, x: torch.Tensor, layer: LayerPages, plan: RowPlan, place_pages: torch.Tensor) -> torch.Tensor:
        """-> [splits, rows, parts, ranks]; `expand` adds up the splits of the inputs."""
        tiles = _get_tiles(plan)
        sizes = self._choose_sizes(tiles, layer, place_pages)
        return shrink(x, layer.a, layer.num_parts, tiles, layer.counts, place_pages, sizes)

    def expand(
        self,
        out: torch.Tensor,
        shrunk: torch.Tensor,
        layer: LayerPages,
        plan: RowPlan,
        place_pages: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._expand(out, shrunk, layer, plan, place_pages, bias, None)

    def expand_gated(
        self,
        product: torch.Tensor,
        shrunk: torch.Tensor,
        layer: LayerPages,
        plan: RowPlan,
        place_pages: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `SupportsGated`."""
        gated = product.new_empty(len(product), product.shape[1] // 2)
        self._expand(product, shrunk, layer, plan, place_pages, bias, gated)
        return gated

    def shrink_pairs(
        self,
        x: torch.Tensor,
        layer: LayerPages,
        places: torch.Tensor,
        ids: torch.Tensor,
        place_pages: torch.Tensor,
        order: SortedPairs | None = None,
    ) -> torch.Tensor:
        """See `SupportsPairs`."""
        if order is not None:
            return shrink_sorted(x, layer.a, layer.num_parts, order, places, (len(ids), ids.shape[1]), layer.counts, place_pages)
        tiles = Tiles(places, ids.flatten(), 1, ids.numel(), layer.num_experts, ids.shape[1])
        return shrink(x, layer.a, layer.num_parts, tiles, layer.counts, place_pages, self._choose_sizes(tiles, layer, place_pages))

    def _expand(
        self,
        out: torch.Tensor,
        shrunk: torch.Tensor,
        layer: LayerPages,
        plan: RowPlan,
        place_pages: torch.Tensor,
        bias: torch.Tensor | None,
        gated: torch.Tensor | None,
    ) -> None:
        tiles = _get_tiles(plan)
        if shrunk.dim() == 3:  # that an embedding has looked up
            shrunk = shrunk.unsqueeze(0)
        sizes = self._choose_sizes(tiles, layer, place_pages)
        splits, outputs = (layer.splits, sizes.outputs) if gated is None else (layer.splits[:1], sizes.gated_outputs)
        outputs *= sizes.steps
        key = splits, outputs, out.device
        if key not in self._blocks:
            blocks, unit = list_blocks(splits, outputs)
            self._blocks[key] = torch.tensor(blocks, dtype=torch.int32, device=out.device), unit
        scales = layer.scales, layer.has_scale
        expand(out, shrunk, layer.b, tiles, layer.counts, place_pages, scales, bias, self._blocks[key], sizes, gated)

    def _choose_sizes(self, tiles: Tiles, layer: LayerPages, place_pages: torch.Tensor) -> ProductSizes:
        key = tiles.block, layer.a.shape[-1], layer.splits, place_pages.shape[1], layer.a.element_size()
        if key not in self._sizes:
            self._sizes[key] = self._choose(*key, kernels.get_shared_memory(layer.a.device))
        return self._sizes[key]


def _get_tiles(plan: RowPlan) -> Tiles:
    if not isinstance(plan, TiledPlan):
        raise TypeError("the plan does not come from TritonDeltas.plan_rows")
    return plan.tiles

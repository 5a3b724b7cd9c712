"""`TritonDeltas` and `FixedDeltas`: the products of low-rank deltas on GPUs, by the kernels of
`frame.kernels.lora`.

Used by `DeviceAdapters` where Triton runs. Must not know files, requests or models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from frame import kernels
from frame.adapters.deltas import LayerPages, RowPlan
from frame.core.interfaces.adapter_layers import SortedPairs
from frame.interfaces.adapter import PAGE_RANKS
from frame.kernels.lora.products import ProductSizes, Tiles, choose_sizes, expand, list_blocks, look_up, shrink
from frame.kernels.lora.row_tiles import choose_block, group_rows
from frame.kernels.moe.expert_deltas import shrink_sorted

_FIXED_BLOCK = 32  # rows of a tile
_PROVEN_PAGES = 1, 2, 4  # of an adapter; more are added in a loop, as those of four
_PROVEN_ROWS = 2 * _FIXED_BLOCK + 5 if kernels.INTERPRETED else 525  # which PyTorch sorts


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledPlan(RowPlan):
    """Rows grouped into tiles of one adapter and expert each."""

    tiles: Tiles


class TiledDeltas:
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

    def plan_rows(self, plan: RowPlan, num_experts: int = 0) -> TiledPlan:
        places, experts, num_rows, num_places = plan.places, plan.experts, len(plan.places), len(plan.place_pages)
        block = self._choose_block(num_rows, num_places, num_experts)
        if block == 1:
            keys, rows, counters = places, places if experts is None else experts, None
        else:
            keys, rows, counters = group_rows(places, experts, num_places, num_experts, block)
        tiles = Tiles(keys, rows, block, num_rows, 0 if experts is None else num_experts, counters=counters)
        return TiledPlan(places, plan.place_pages, experts, tiles=tiles)

    def shrink(self, x: torch.Tensor, layer: LayerPages, plan: RowPlan) -> torch.Tensor:
        """-> [splits, rows, parts, ranks]; `expand` adds up the splits of the inputs."""
        tiles = _get_tiles(plan)
        sizes = self._choose_sizes(tiles, layer, plan.place_pages)
        return shrink(x, layer.a, layer.num_parts, tiles, layer.counts, plan.place_pages, sizes)

    def look_up(self, ids: torch.Tensor, layer: LayerPages, plan: RowPlan) -> torch.Tensor:
        return look_up(ids, layer.a, plan.places, layer.counts, plan.place_pages)

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, layer: LayerPages, plan: RowPlan, bias: torch.Tensor | None = None) -> None:
        self._expand(out, shrunk, layer, plan, bias)

    def _expand(
        self,
        out: torch.Tensor,
        shrunk: torch.Tensor,
        layer: LayerPages,
        plan: RowPlan,
        bias: torch.Tensor | None,
        gated: torch.Tensor | None = None,
    ) -> None:
        tiles, place_pages = _get_tiles(plan), plan.place_pages
        if shrunk.dim() == 3:  # that an embedding has looked up
            shrunk = shrunk.unsqueeze(0)
        sizes = self._choose_sizes(tiles, layer, place_pages)
        splits, outputs = (layer.splits, sizes.outputs) if gated is None else (layer.splits[:1], sizes.gated_outputs)
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

    def _choose_block(self, num_rows: int, num_places: int, num_experts: int) -> int:
        return choose_block(num_rows, num_places, num_experts)


class TritonDeltas(TiledDeltas):
    """With tiles by the number of rows, and the forms that spare launches."""

    def expand_gated(
        self, product: torch.Tensor, shrunk: torch.Tensor, layer: LayerPages, plan: RowPlan, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `SupportsGated`."""
        gated = product.new_empty(len(product), product.shape[1] // 2)
        self._expand(product, shrunk, layer, plan, bias, gated)
        return gated

    def shrink_pairs(
        self, x: torch.Tensor, layer: LayerPages, plan: RowPlan, ids: torch.Tensor, order: SortedPairs | None = None
    ) -> torch.Tensor:
        """See `SupportsPairs`."""
        places, place_pages = plan.places, plan.place_pages
        if order is not None:
            return shrink_sorted(x, layer.a, layer.num_parts, order, places, (len(ids), ids.shape[1]), layer.counts, place_pages)
        tiles = Tiles(places, ids.flatten(), 1, ids.numel(), layer.num_experts, ids.shape[1])
        return shrink(x, layer.a, layer.num_parts, tiles, layer.counts, place_pages, self._choose_sizes(tiles, layer, place_pages))


class FixedDeltas(TiledDeltas):
    """With tiles and sums of one form for any number of rows, so that the bits of a row do not
    depend on the others; for `RankContext.deterministic`."""

    def __init__(self) -> None:
        super().__init__()
        self._proven: set[tuple[object, ...]] = set()

    def _choose_block(self, num_rows: int, num_places: int, num_experts: int) -> int:
        return _FIXED_BLOCK

    def prove(self, layer: LayerPages) -> None:
        """See `SupportsProof`. The layer's pages are still empty, so others are drawn."""
        form = layer.a.shape[-1], layer.splits, layer.a.dtype, layer.a.device
        if form in self._proven:
            return
        self._proven.add(form)
        for num_pages in _PROVEN_PAGES:
            self._prove_pages(layer, num_pages)

    def _prove_pages(self, layer: LayerPages, num_pages: int) -> None:
        """With places of so many pages, of which programs take several at a time."""
        inputs, splits, dtype, device = layer.a.shape[-1], layer.splits, layer.a.dtype, layer.a.device
        random = torch.Generator("cpu").manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(device, dtype)

        pages = [[1, *[0] * (num_pages - 1)], [*range(2, 2 + num_pages)]]
        numbers = torch.tensor(pages, dtype=torch.int32, device=device)
        counts = torch.tensor([1, num_pages], dtype=torch.int32, device=device)
        factors, size = (torch.ones(2, sum(splits), device=device), torch.zeros_like(counts)), 2 + num_pages
        a, b = draw(size, len(splits), PAGE_RANKS, inputs), draw(size, 1, sum(splits), PAGE_RANKS)
        drawn = LayerPages(a, b, splits, counts, *factors)
        rows = _PROVEN_ROWS
        x, places = draw(rows, inputs), torch.arange(rows, dtype=torch.int32, device=device) % 3 - 1

        def compute(some: torch.Tensor) -> torch.Tensor:
            plan, out = self.plan_rows(RowPlan(places[some], numbers)), torch.ones(len(some), sum(splits), dtype=dtype, device=device)
            self.expand(out, self.shrink(x[some], drawn, plan), drawn, plan)
            return out

        order = torch.arange(rows, device=device)
        together, reverse = compute(order), compute(order.flip(0)).flip(0)
        alone = torch.cat([compute(order[row : row + 1]) for row in range(3)])
        if not (torch.equal(together, reverse) and torch.equal(together[:3], alone)):
            raise RuntimeError(
                f"execution.deterministic: the deltas of adapters for {inputs} inputs in {dtype} depend on a row's place on {device.type}; "
                "set it to false, or report the device and the version of Triton."
            )


def _get_tiles(plan: RowPlan) -> Tiles:
    if not isinstance(plan, TiledPlan):
        raise TypeError("the plan does not come from TritonDeltas.plan_rows")
    return plan.tiles

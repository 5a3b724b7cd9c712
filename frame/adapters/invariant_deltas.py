"""`InvariantDeltas`: the products of low-rank deltas whose result for a row does not depend on the
other rows, for `RankContext.deterministic`.

An adapter's pages are multiplied one after another, so that its rank changes no shape, and added in
their order in float32. Used by `DeviceAdapters`. Must not know files, requests or models.
"""

from __future__ import annotations

import torch

from frame.adapters.deltas import LayerPages, RowPlan, TorchDeltas, list_groups
from frame.interfaces.adapter import PAGE_RANKS
from frame.kernels.linear.invariant import InvariantMatmul


class InvariantDeltas(TorchDeltas):
    """One product for each page of each adapter in the step; see `DeltaOperations`."""

    def prove(self, layer: LayerPages) -> None:
        """See `SupportsProof`. The layer's pages are still empty, so values are drawn."""
        for weight in (_take_a(layer, 0, 0), *_split_b(layer, 0, 0)):
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
            InvariantMatmul(torch.empty_like(weight).copy_(drawn))

    def shrink(self, x: torch.Tensor, layer: LayerPages, plan: RowPlan) -> torch.Tensor:
        """See `DeltaOperations`."""
        out = x.new_zeros(len(plan.places), layer.num_parts, plan.place_pages.shape[1] * PAGE_RANKS)
        for place, expert, rows in list_groups(layer, plan):
            some, pages = x[rows], plan.place_pages[place, : int(layer.counts[place])].tolist()
            columns = [InvariantMatmul(_take_a(layer, page, expert))(some).unflatten(1, (layer.num_parts, PAGE_RANKS)) for page in pages]
            out[rows, :, : len(pages) * PAGE_RANKS] = torch.cat(columns, 2)
        return out

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, layer: LayerPages, plan: RowPlan, bias: torch.Tensor | None = None) -> None:
        """See `DeltaOperations`."""
        for place, expert, rows in list_groups(layer, plan):
            total, some = out[rows].float(), shrunk[rows]
            for index, page in enumerate(plan.place_pages[place, : int(layer.counts[place])].tolist()):
                ranks = some[:, :, index * PAGE_RANKS : (index + 1) * PAGE_RANKS].unbind(1)
                parts = zip(ranks, _split_b(layer, page, expert), strict=True)
                total = total + torch.cat([InvariantMatmul(part)(x.contiguous()) for x, part in parts], 1)
            if layer.has_scale[place]:
                shift = 0 if bias is None else bias
                total = (total - shift) * layer.scales[place] + shift
            out[rows] = total.to(out.dtype)


def _take_a(layer: LayerPages, page: int, expert: int) -> torch.Tensor:
    """[parts * PAGE_RANKS, inputs]"""
    parts = layer.num_parts
    return layer.a[page, expert * parts : (expert + 1) * parts].flatten(0, 1)


def _split_b(layer: LayerPages, page: int, expert: int) -> tuple[torch.Tensor, ...]:
    """[outputs, PAGE_RANKS] of each part."""
    return layer.b[page, expert].split(layer.splits)

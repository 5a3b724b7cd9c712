"""`LayerPages` and `RowPlan`: what the products of low-rank deltas read, and `DeltaOperations`, the
products.

Used by `DeviceAdapters`; implemented for any device by `TorchDeltas` and `InvariantDeltas`, for
GPUs by `TritonDeltas`. Must not know files, requests or models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from frame.core.interfaces.adapter_layers import SortedPairs
from frame.interfaces.adapter import PAGE_RANKS


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's part of the adapter pool. All tensors keep their addresses.

    `a` and `b` are views of pages that hold all layers, so the first stride is that of a page, and
    the others are contiguous. Ranks that an adapter does not have are zero in its last page; `b`
    includes the adapter's `scale`. `num_experts`: 0 for a layer without experts, for which expert 0
    stands.
    """

    a: torch.Tensor  # [pages, max(1, experts) * parts, PAGE_RANKS, inputs]; part p of expert e at e * parts + p
    b: torch.Tensor  # [pages, max(1, experts), outputs, PAGE_RANKS]
    splits: tuple[int, ...]  # outputs of each part, in order; their sum is `outputs`
    counts: torch.Tensor  # int32 [places]; pages of each place that this layer reads; 0: the adapter leaves it alone
    scales: torch.Tensor  # float32 [places, outputs]; factors of the whole rows
    has_scale: torch.Tensor  # int32 [places]; whether `scales` are to be read
    num_experts: int = 0

    @property
    def num_parts(self) -> int:
        return len(self.splits)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The adapter of each row that layers compute. `DeltaOperations.plan_rows` makes it; an
    implementation adds fields in a subclass."""

    places: torch.Tensor  # int32 [rows]; -1: no adapter
    place_pages: torch.Tensor  # int32 [places, n]; the pages of each place, in the order of the ranks
    experts: torch.Tensor | None = None  # int64 [rows]; the row's expert on this rank; None: no experts


class DeltaOperations(Protocol):
    """The products of low-rank deltas.

    No shape depends on the values of a plan, and nothing waits for the device, so that a CUDA graph
    can capture them; `TorchDeltas` is the exception.
    """

    def plan_rows(self, plan: RowPlan, num_experts: int = 0) -> RowPlan:
        """What both products need of the rows, computed once for all layers of a step."""
        ...

    def shrink(self, x: torch.Tensor, layer: LayerPages, plan: RowPlan) -> torch.Tensor:
        """x [rows, inputs], contiguous rows -> [rows, parts, ranks], ranks the width of
        `plan.place_pages` times `PAGE_RANKS`: x times `a` of the row's adapter (and expert). What
        belongs to pages that the adapter does not have, and to rows without one, is undefined."""
        ...

    def look_up(self, ids: torch.Tensor, layer: LayerPages, plan: RowPlan) -> torch.Tensor:
        """As `shrink`, of rows that are 1 at the input `ids[row]` and 0 elsewhere, of a layer with
        one part. ids int64 [rows]; those that are no input give zeros."""
        ...

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, layer: LayerPages, plan: RowPlan, bias: torch.Tensor | None = None) -> None:
        """For each row with an adapter that changes the layer, in place: out = (out - bias + shrunk
        times `b`) * scale + bias, where the scale is 1 without `has_scale`. out [rows, outputs],
        whose last stride is 1. Other rows are not written."""
        ...


@runtime_checkable
class SupportsGated(Protocol):
    """Optional, for layers of two equal parts without experts."""

    def expand_gated(
        self, product: torch.Tensor, shrunk: torch.Tensor, layer: LayerPages, plan: RowPlan, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """SiLU(first part) * second part of what `expand` computes, of all rows -> [rows, outputs
        // 2]. `product` is not written."""
        ...


@runtime_checkable
class SupportsPairs(Protocol):
    """Optional, for layers with experts, whose `b` another kernel multiplies."""

    def shrink_pairs(
        self, x: torch.Tensor, layer: LayerPages, plan: RowPlan, ids: torch.Tensor, order: SortedPairs | None = None
    ) -> torch.Tensor:
        """plan: of the tokens; others as of `LayerDelta.shrink_pairs` -> `PairDelta.shrunk`."""
        ...


@runtime_checkable
class SupportsProof(Protocol):
    """Optional, for products whose result for a row does not depend on the other rows."""

    def prove(self, layer: LayerPages) -> None:
        """Test the products of a layer, before its first step. Raises RuntimeError if the bits of a
        row depend on its place among the rows."""
        ...


class TorchDeltas:
    """The reference, for any device: one product for each adapter in the step."""

    def plan_rows(self, plan: RowPlan, num_experts: int = 0) -> RowPlan:
        return plan

    def shrink(self, x: torch.Tensor, layer: LayerPages, plan: RowPlan) -> torch.Tensor:
        parts, ranks = layer.num_parts, plan.place_pages.shape[1] * PAGE_RANKS
        out = x.new_zeros(len(plan.places), parts, ranks)
        for place, expert, rows in list_groups(layer, plan):
            pages = plan.place_pages[place, : int(layer.counts[place])].long()
            a = layer.a[pages, expert * parts : (expert + 1) * parts]  # [pages, parts, PAGE_RANKS, inputs]
            a = a.transpose(0, 1).flatten(1, 2)  # [parts, ranks, inputs]
            out[rows, :, : a.shape[1]] = torch.einsum("ni,pri->npr", x[rows], a)
        return out

    def look_up(self, ids: torch.Tensor, layer: LayerPages, plan: RowPlan) -> torch.Tensor:
        is_local = (ids >= 0) & (ids < layer.a.shape[-1])
        pages = plan.place_pages.index_select(0, plan.places.clamp_min(0)).long()  # [rows, pages]
        columns = layer.a[pages, 0, :, ids.masked_fill(~is_local, 0).unsqueeze(1)]  # [rows, pages, PAGE_RANKS]
        return columns.flatten(1).mul_(is_local.unsqueeze(1)).unsqueeze(1)

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, layer: LayerPages, plan: RowPlan, bias: torch.Tensor | None = None) -> None:
        for place, expert, rows in list_groups(layer, plan):
            pages = plan.place_pages[place, : int(layer.counts[place])].long()
            b = layer.b[pages, expert].transpose(0, 1).flatten(1)  # [outputs, ranks]
            parts = zip(shrunk[rows, :, : b.shape[1]].unbind(1), b.split(layer.splits), strict=True)
            result = out[rows] + torch.cat([x @ part.t() for x, part in parts], 1)
            if layer.has_scale[place]:
                shift = 0 if bias is None else bias
                result = ((result - shift) * layer.scales[place]).to(out.dtype) + shift
            out[rows] = result


def list_groups(layer: LayerPages, plan: RowPlan) -> list[tuple[int, int, torch.Tensor]]:
    """(place, expert, its rows int64) of each adapter and expert in the step that the layer has."""
    counts, keys = layer.counts.tolist(), plan.places.long()
    num_experts = max(1, layer.num_experts)
    if plan.experts is not None:
        keys = torch.where(keys < 0, -1, keys * num_experts + plan.experts)
    return [
        (*divmod(key, num_experts), (keys == key).nonzero().flatten())
        for key in keys.unique().tolist()
        if key >= 0 and counts[key // num_experts]
    ]

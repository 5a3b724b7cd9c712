"""`PooledLayer`: one layer's deltas of all adapters on the device; `StepRows`: the rows that layers
compute now.

Layers call a `PooledLayer` as their `LayerDelta`; `frame.adapters.deltas` has the products. Must
not know slots, requests or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from frame.adapters.deltas import DeltaOperations, LayerPages, RowPlan, SupportsGated, SupportsPairs
from frame.core.interfaces.adapter_layers import PairDelta, SortedPairs
from frame.interfaces.adapter import PAGE_RANKS

if TYPE_CHECKING:
    from frame.core.interfaces.adapter_layers import Span
    from frame.core.interfaces.platform import SupportsStreams

_ALIGNMENT = 64  # elements at which a layer's part of a page begins
_BESIDE_ROWS = 256  # up to so many rows, neither `shrink` nor the layer's product fills a GPU, so they overlap


@dataclass(slots=True)
class StepRows:
    """`plan`: of the rows that layers compute now; `pairs`: of layers with experts. None: no row
    has an adapter. place_pages: see `RowPlan`. streams: of a device where `shrink` may run
    beside the layer's product."""

    operations: DeltaOperations
    streams: SupportsStreams | None = None
    is_active: bool = False
    plan: RowPlan | None = None
    pairs: RowPlan | None = None
    place_pages: torch.Tensor | None = None  # None before the pool is allocated
    counts: np.ndarray | None = None  # int32 [layers, places]; as `LayerPages.counts`, on the host
    used: np.ndarray | None = None  # places of the step; None: it may have any
    heads: tuple[RowPlan, int, RowPlan, RowPlan] | None = None

    def plan_rows(self, places: torch.Tensor, experts: torch.Tensor | None = None, num_experts: int = 0) -> RowPlan:
        """The plan of rows with these `RowPlan.places` and `RowPlan.experts`."""
        assert self.place_pages is not None, "the pool is allocated before the first step"
        return self.operations.plan_rows(RowPlan(places, self.place_pages, experts), num_experts)

    def select_plan(self, num_experts: int) -> RowPlan:
        """The rows that a layer computes now."""
        plan = self.pairs if num_experts else self.plan
        assert plan is not None, "the rows of a step are set before its layers run"
        return plan

    def select_heads(self, count: int) -> tuple[RowPlan, RowPlan]:
        """The rows that a layer computes now, each `count` times: with their heads as experts, and
        without experts. Both plans are made once for all layers."""
        plan = self.select_plan(0)
        if self.heads is None or self.heads[0] is not plan or self.heads[1] != count:
            places = plan.places.repeat_interleave(count)
            heads = torch.arange(count, device=places.device).repeat(len(plan.places))
            self.heads = plan, count, self.plan_rows(places, heads, count), self.plan_rows(places)
        return self.heads[2:]

    def may_change(self, index: int) -> bool:
        """Whether an adapter of the step changes the layer of this index."""
        return self.is_active and (self.used is None or self.counts is None or bool(self.counts[index, self.used].any()))


@dataclass(slots=True)
class PooledLayer:
    """`names`: checkpoint layers, of each expert in turn. index: in the pool. first: element of a
    page at which the layer's part begins. gemm: x -> the product without deltas; the layer's
    `process_weights_after_loading` sets it."""

    names: Sequence[str]
    inputs: Span
    outputs: Sequence[Span]
    num_experts: int
    is_lookup: bool
    rows: StepRows
    index: int = 0
    first: int = 0
    pages: LayerPages | None = None  # None before the pool is allocated
    gemm: Any = None
    _is_beside: bool = False

    @property
    def is_active(self) -> bool:
        return self.rows.is_active

    @property
    def can_gate(self) -> bool:
        """See `LayerDelta.can_gate`."""
        sizes = [span.size for span in self.outputs]
        return not self.num_experts and len(sizes) == 2 and sizes[0] == sizes[1] and isinstance(self.rows.operations, SupportsGated)

    @property
    def num_stacks(self) -> int:
        """Matrices `a` of one page."""
        return max(1, self.num_experts) * len(self.outputs)

    @property
    def num_outputs(self) -> int:
        return sum(span.size for span in self.outputs)

    @property
    def sizes(self) -> tuple[int, int]:
        """Elements of `a` and of `b` in one page, aligned."""
        sizes = self.num_stacks * PAGE_RANKS * self.inputs.size, max(1, self.num_experts) * self.num_outputs * PAGE_RANKS
        return -(-sizes[0] // _ALIGNMENT) * _ALIGNMENT, -(-sizes[1] // _ALIGNMENT) * _ALIGNMENT

    def begin_at(self, index: int, first: int) -> None:
        """Set what the pool decides."""
        self.index, self.first = index, first

    def open_pages(self, pages: torch.Tensor, counts: torch.Tensor, scales: torch.Tensor, has_scale: torch.Tensor) -> None:
        """Take the layer's part of the pool's pages. The tables: see `LayerPages`."""
        self.pages = LayerPages(
            *self.view_page(pages), tuple(span.size for span in self.outputs), counts, scales, has_scale, self.num_experts
        )

    def list_pages(self) -> list[LayerPages]:
        """What the products of the layer read."""
        return [self.allocated]

    def write_page(self, page: torch.Tensor, place: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Write the delta a [ranks, inputs], b [outputs, ranks] of the name at `place` to a
        page."""
        expert, part = divmod(place, len(self.outputs))
        first = sum(span.size for span in self.outputs[:part])
        page_a, page_b = self.view_page(page)
        page_a[place, : len(a)] = a
        page_b[expert, first : first + len(b), : len(a)] = b

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        plan = self.rows.select_plan(self.num_experts)
        operations, streams = self.rows.operations, self.rows.streams
        self._is_beside = streams is not None and len(plan.places) <= _BESIDE_ROWS
        if streams is None or not self._is_beside:
            return operations.shrink(x, self.allocated, plan)
        side = streams.get_side_stream()
        side.wait_stream(streams.get_current_stream())
        with streams.use_stream(side):
            return operations.shrink(x, self.allocated, plan)

    @property
    def can_pair(self) -> bool:
        """See `LayerDelta.can_pair`."""
        return self.num_experts > 0 and isinstance(self.rows.operations, SupportsPairs)

    def shrink_pairs(self, x: torch.Tensor, ids: torch.Tensor, order: SortedPairs | None = None) -> PairDelta | None:
        """See `LayerDelta.shrink_pairs`."""
        if not self.is_active:
            return None
        plan = self.rows.select_plan(0)
        operations, pages = self.rows.operations, self.allocated
        assert isinstance(operations, SupportsPairs), "can_pair"
        shrunk = operations.shrink_pairs(x, pages, plan, ids, order)
        return PairDelta(shrunk, pages.b, plan.places, plan.place_pages, pages.counts)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """See `LayerDelta.look_up`."""
        plan = self.rows.select_plan(0)
        self._is_beside = False
        return self.rows.operations.look_up(ids, self.allocated, plan)

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        plan = self.rows.select_plan(self.num_experts)
        self._await_shrink()
        self.rows.operations.expand(out, shrunk, self.allocated, plan, bias)
        return out

    def expand_gated(self, product: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `LayerDelta.expand_gated`."""
        plan = self.rows.select_plan(self.num_experts)
        self._await_shrink()
        operations = self.rows.operations
        assert isinstance(operations, SupportsGated), "can_gate"
        return operations.expand_gated(product, shrunk, self.allocated, plan, bias)

    def _await_shrink(self) -> None:
        if self._is_beside and (streams := self.rows.streams) is not None:
            streams.get_current_stream().wait_stream(streams.get_side_stream())

    @property
    def allocated(self) -> LayerPages:
        """`pages`, once they are allocated."""
        assert self.pages is not None, "the pool is allocated before the first step"
        return self.pages

    def view_page(self, page: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's part of pages [..., elements]: `a` [..., stacks, PAGE_RANKS, inputs] and `b`
        [..., max(1, experts), outputs, PAGE_RANKS]."""
        shape_a = self.num_stacks, PAGE_RANKS, self.inputs.size
        shape_b = max(1, self.num_experts), self.num_outputs, PAGE_RANKS
        second = self.first + self.sizes[0]
        a = page[..., self.first : self.first + shape_a[0] * shape_a[1] * shape_a[2]].unflatten(-1, shape_a)
        return a, page[..., second : second + shape_b[0] * shape_b[1] * shape_b[2]].unflatten(-1, shape_b)

"""What layers call to apply low-rank deltas (`BuildContext.adapters`), and what a runner calls in
each step.

`frame.adapters` implements both. Must not know a file, a kernel or a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.batch import ForwardBatch, ScheduledBatch
    from frame.core.interfaces.runner import AdapterOrder, PendingOrder

    ShrinkPairs = Callable[[torch.Tensor, torch.Tensor, "SortedPairs | None"], "PairDelta | None"]


class Span(Protocol):
    """A rank's range of a dimension; see `frame.models.layers.parameter.Range`."""

    @property
    def full(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PairDelta:
    """What a runner's kernel adds to its GEMM of (token, expert) pairs: `shrunk`, summed over the
    splits, times `b` of the pair's adapter and expert; undefined where the adapter has no page."""

    shrunk: torch.Tensor  # float32 [splits, pairs, parts, pages of an adapter * 16]
    b: torch.Tensor  # [pages, experts, outputs, 16]; the first stride is any, the others are contiguous
    places: torch.Tensor  # int32 [tokens]; place of each token's adapter; -1: none
    place_pages: torch.Tensor  # int32 [places, pages of an adapter]
    counts: torch.Tensor  # int32 [places]; pages of each place that the layer reads, perhaps 0


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs in blocks of `block` rows of one expert. by_row: x has these rows, not the tokens'."""

    pairs: torch.Tensor  # int32 [rows]; the number of pairs for a padding row
    experts: torch.Tensor  # int32 [blocks]
    used: torch.Tensor  # int32 [1]; blocks in use
    block: int
    by_row: bool = False


class LayerDelta(Protocol):
    """The deltas of one layer, of every adapter on the device. A layer calls `shrink` with its
    input, computes its product, and calls `expand` with both. It sets `gemm` once its weights are
    loaded."""

    gemm: Any  # x [rows, inputs] -> the product without bias and deltas

    @property
    def is_active(self) -> bool:
        """Whether a row of this step may have an adapter; False: the layer computes as without."""
        ...

    def shrink(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, inputs] -> the product with each row's `a`, float32 or the model's dtype [rows,
        parts * ranks]. May run beside the layer's product."""
        ...

    @property
    def can_pair(self) -> bool:
        """Whether the layer has `shrink_pairs`."""
        ...

    def shrink_pairs(self, x: torch.Tensor, ids: torch.Tensor, order: SortedPairs | None = None) -> PairDelta | None:
        """`shrink` of a layer with experts, for a kernel that adds the deltas itself. ids int64
        [tokens, k]; x [tokens, inputs], or without `order` [tokens * k, inputs]. None: no adapter
        of this step changes the layer."""
        ...

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """As `shrink`, of rows that are 1 at the input `ids[row]` and 0 elsewhere, of a layer with
        `lookup`. ids int64 [rows], counted from the rank's first input; others' give zeros."""
        ...

    def expand(self, out: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Add the deltas to the layer's product `out` [rows, outputs] in place, and scale its rows.
        Rows without an adapter are not written. bias: what `out` has already got. -> `out`."""
        ...

    @property
    def can_gate(self) -> bool:
        """Whether the layer has `expand_gated`."""
        ...

    def expand_gated(self, product: torch.Tensor, shrunk: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """SiLU(first half of the outputs) * second half of what `expand` computes, of all rows ->
        [rows, outputs // 2]. `product` is not written."""
        ...


class LatentDelta(Protocol):
    """The deltas of a latent attention's projection from the latent to keys and values. Queries and
    results have them, not the cached tokens, whose keys and values so follow the adapter of the
    query. `gemm`: as that of `LayerDelta`."""

    gemm: Any

    @property
    def is_active(self) -> bool:
        """Whether an adapter of this step may change the layer."""
        ...

    @property
    def adapted_rows(self) -> torch.Tensor:
        """Whether each row that layers compute now has an adapter, bool [rows]."""
        ...

    def absorb(self, q_nope: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[rows, heads, nope] -> [rows, heads, rank]. multiply: the product without deltas."""
        ...

    def unabsorb(self, out: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """[rows, heads, rank] -> [rows, heads, value]. multiply: as that of `absorb`."""
        ...


class AdaptedRows(Protocol):
    """Told by those that compute some rows of a step alone."""

    def select_rows(self, indices: torch.Tensor | None) -> AbstractContextManager[object]:
        """In the block, layers compute these rows of the batch's tokens alone, int64 [n]; None:
        rows that have no adapter."""
        ...


class AdapterLayers(AdaptedRows, Protocol):
    """What layers register with (`BuildContext.adapters`), which tells them each row's adapter."""

    adapts_routers: bool  # whether adapters may change routers of experts

    def add_layer(
        self, names: Sequence[str], inputs: Span, outputs: Sequence[Span], num_experts: int = 0, lookup: bool = False
    ) -> LayerDelta:
        """The deltas of the checkpoint layers `names`, whose outputs are `outputs`, concatenated.
        num_experts: of this rank; `names` are then those of one expert after another, and rows are
        pairs of a token and an expert (`select_pairs`). lookup: an embedding, whose inputs are ids:
        its deltas are transposed, so b.t() stands for `a`, and a.t() for `b`."""
        ...

    def add_latent_layer(self, name: str, latent: Span, heads: Span, widths: tuple[Span, Span]) -> LatentDelta:
        """The deltas of the checkpoint layer `name`, whose inputs are the latent, and whose outputs
        are the heads, each of as many keys and values as `widths` has entries."""
        ...

    def select_pairs(self, tokens: torch.Tensor, experts: torch.Tensor) -> AbstractContextManager[object]:
        """In the block, row i of a layer with experts is row `tokens[i]` of those that other layers
        compute, with the rank's expert `experts[i]`; both int64 [pairs]."""
        ...


class StepAdapters(AdaptedRows, Protocol):
    """A rank's adapters, as its runner uses them. In each step `begin_step`, then before each
    forward pass `place_tokens` and `plan_tokens`, and `end_step` after the last layer."""

    is_active: bool  # whether a row of the step has an adapter; set also to capture graphs of such steps
    is_warming_up: bool  # every step counts as one of rows with adapters

    def begin_step(self, batch: ScheduledBatch) -> None:
        """Copy adapters to the device, and set up and release slots."""
        ...

    def place_tokens(self, batch: ForwardBatch, size: int) -> None:
        """Write each token's adapter to a fixed address, and none for further ones up to `size`."""
        ...

    def plan_tokens(self, size: int) -> None:
        """Layers compute the first `size` tokens of that address."""
        ...

    def end_step(self) -> None:
        """No row has an adapter."""
        ...

    def start_order(self, order: AdapterOrder) -> PendingOrder:
        """See `ModelRunner.start_order`."""
        ...

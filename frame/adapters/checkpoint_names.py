"""`place_delta`: where the layers of a model bind the weight that a delta changes.

A model divides, stacks and renames checkpoint tensors when it loads them. A tensor of coordinates
in place of the weight takes the same way, and shows which rows and columns arrive where. Used by
`AdapterReader`. Must not know a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from frame.core.interfaces.adapter import LowRankDelta
from frame.core.interfaces.adapter_layers import Span


@dataclass(frozen=True, slots=True)
class PlacedDelta:
    """What a bound layer's whole weight is made of. `expert`: of the stored tensor. `outputs` and
    `inputs` int64: for each of the layer's, the row or column of the stored tensor; with
    `is_transposed` the column or row."""

    name: str  # of the bound layer
    expert: int | None
    outputs: torch.Tensor
    inputs: torch.Tensor
    is_transposed: bool

    def cut(self, delta: LowRankDelta, outputs: Span, inputs: Span) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts of these ranges: a [r, inputs] and b [outputs, r]."""
        a, b = (delta.a, delta.b) if self.expert is None else (delta.a[self.expert], delta.b[self.expert])
        rows = self.outputs[outputs.start : outputs.start + outputs.size]
        columns = self.inputs[inputs.start : inputs.start + inputs.size]
        if self.is_transposed:
            return b.index_select(0, columns).t(), a.index_select(1, rows).t()
        return a.index_select(1, columns), b.index_select(0, rows)


class _Coordinates:
    """A lazy tensor [outputs, inputs] or [experts, outputs, inputs] whose values are the numbers of
    its elements."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        indices = () if index is Ellipsis else index if isinstance(index, tuple) else (index,)
        values = torch.zeros((), dtype=torch.int64)
        for dim, size in enumerate(self.shape):
            selected = torch.arange(size)[indices[dim] if dim < len(indices) else slice(None)]
            values = values.unsqueeze(-1) * size + selected
        return values


def place_delta(
    name: str, shape: tuple[int, ...], rename: Callable[[Iterable[tuple[str, Any]]], Iterable[tuple[str, Any]]]
) -> Iterator[PlacedDelta]:
    """The layers that bind parts of the weight `name`, a layer of the checkpoint or, with experts,
    a stacked tensor. rename: see `AdapterReader`."""
    stored = name if len(shape) == 3 else f"{name}.weight"
    rows, columns = shape[-2:]
    for bound, view in rename([(stored, _Coordinates(shape))]):
        first_column, first_row = (torch.as_tensor(part).flatten() for part in (view[:, 0:1], view[0:1, :]))
        origin = int(first_column[0])
        expert, row, column = origin // (rows * columns), origin // columns % rows, origin % columns
        is_transposed = _varies(first_column % columns, column) or _varies(first_row // columns % rows, row)
        outputs, inputs = (first_column, first_row) if not is_transposed else (first_row, first_column)
        outputs, inputs = outputs // columns % rows, inputs % columns
        if is_transposed:
            outputs, inputs = inputs, outputs
        yield PlacedDelta(bound.removesuffix(".weight"), expert if len(shape) > 2 else None, outputs, inputs, is_transposed)


def _varies(values: torch.Tensor, first: int) -> bool:
    return bool((values != first).any())

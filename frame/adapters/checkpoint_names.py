"""`place_delta`: where the layers of a model bind the weight that a delta changes.

A model divides, stacks and renames checkpoint tensors when it loads them. A tensor of coordinates
in place of the weight takes the same way, and shows which rows and columns arrive where. Used by
`AdapterReader`. Must not know a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from frame.core.interfaces.adapter_layers import Span
from frame.interfaces.adapter import LowRankDelta

Rename = Callable[[Iterable[tuple[str, Any]]], Iterable[tuple[str, Any]]]  # see `AdapterReader`
FindSize = Callable[[str], tuple[int, int] | None]  # outputs and inputs of a bound layer; None: this rank has none of the name


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


def place_delta(name: str, shape: tuple[int, ...], rename: Rename) -> Iterator[PlacedDelta]:
    """The layers that bind parts of the weight `name`, a layer of the checkpoint or, with experts,
    a stacked tensor as it is stored."""
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


def place_experts(
    name: str, shape: tuple[int, int, int], rename: Rename, find_size: FindSize, stacks: Sequence[Sequence[str]]
) -> Iterator[PlacedDelta]:
    """The same for the delta [experts, outputs, inputs] of the stacked tensor `name`, whichever way
    the checkpoint stores it.

    stacks: the layers of each stack of experts, expert after expert, for checkpoints that store
    them one by one.
    """
    experts, outputs, inputs = shape
    is_stored_transposed = _is_stored_transposed(name, shape, rename, find_size)
    if is_stored_transposed is not None:
        stored = (experts, inputs, outputs) if is_stored_transposed else shape
        for placed in place_delta(name, stored, rename):
            yield replace(placed, is_transposed=placed.is_transposed != is_stored_transposed)
        return
    match = re.fullmatch(r"(.*\blayers\.\d+\.).*\bexperts\.(gate_up_proj|down_proj)", name)
    if match is None:
        return
    parts = 2 if match[2] == "gate_up_proj" else 1
    for stack in stacks:
        numbers = [int(number) for each in stack for number in re.findall(r"\bexperts\.(\d+)\.", each)]
        if not stack[0].startswith(match[1]) or numbers.count(numbers[0]) != parts:
            continue
        size = outputs // parts
        for place, (bound, expert) in enumerate(zip(stack, numbers, strict=True)):
            rows = torch.arange(place % parts * size, (place % parts + 1) * size)
            yield PlacedDelta(bound, expert, rows, torch.arange(inputs), is_transposed=False)


def _is_stored_transposed(name: str, shape: tuple[int, int, int], rename: Rename, find_size: FindSize) -> bool | None:
    """Whether the checkpoint's tensor is [experts, inputs, outputs]; None: it has no such
    tensor."""
    experts, outputs, inputs = shape
    if outputs == inputs:  # then the other tensor of the experts tells
        prefix, _, last = name.rpartition(".")
        if last == "down_proj":
            return _is_stored_transposed(f"{prefix}.gate_up_proj", (experts, 2 * inputs, outputs), rename, find_size)
        return _is_stored_transposed(f"{prefix}.down_proj", (experts, inputs, outputs // 2), rename, find_size)
    for is_transposed in (False, True):
        stored = (experts, inputs, outputs) if is_transposed else shape
        placed = [(each, size) for each in place_delta(name, stored, rename) if (size := find_size(each.name)) is not None]
        if placed and all((len(each.outputs), len(each.inputs)) == size for each, size in placed):
            return is_transposed
    return None


def _varies(values: torch.Tensor, first: int) -> bool:
    return bool((values != first).any())

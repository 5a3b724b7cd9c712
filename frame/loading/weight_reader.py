"""Reads the tensors of a weight source in order: lazily, or, for a GPU, ahead of their use from the
ranges of files that the source names.

Used by the loader. Must not know models or file formats.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frame.core.interfaces.model import LazyTensor
from frame.core.interfaces.platform import Platform
from frame.host.progress import show_progress
from frame.interfaces.weights import FileRange, WeightSource
from frame.loading.weight_stream import WeightStream, cut_rows


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Tensors to read in advance to a platform's device."""

    platform: Platform
    rows: Mapping[str, slice | None]  # by tensor name: rows of the first dimension; None: all


class AheadTensor:
    """A tensor of which `rows` were read in advance; other slices are read from the source."""

    def __init__(self, stored: LazyTensor, rows: slice | None, value: torch.Tensor) -> None:
        self.shape = stored.shape
        self._stored, self._rows, self._value = stored, rows, value

    def __getitem__(self, index: Any) -> torch.Tensor:
        if self._rows is None:
            return self._value[index]
        first, *others = index if isinstance(index, tuple) else (index,)
        if first == self._rows:
            return self._value[(slice(None), *others)]
        return self._stored[index]


def read_weights(source: WeightSource, progress: bool = False, ahead: ReadAhead | None = None) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of a source; those of `ahead` are on its device. `progress`: show how many
    are loaded."""
    names = source.list_names()
    ranges = {} if ahead is None else _plan_ranges(source, names, ahead)
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(show_progress("loading weights", len(names))) if progress else None
        values: Iterator[torch.Tensor] = iter(())
        if ahead is not None and ranges:
            values = stack.enter_context(WeightStream(ahead.platform)).read(ranges.values())
        for name in names:
            tensor = source.open_tensor(name)
            yield name, AheadTensor(tensor, ahead.rows[name], next(values)) if ahead is not None and name in ranges else tensor
            if advance is not None:
                advance(1)


class HeaderTensor:
    """A tensor of a checkpoint without its values: slices are on the meta device. A scalar has its
    value."""

    def __init__(self, stored: LazyTensor, dtype: torch.dtype | None) -> None:
        self.shape = stored.shape
        self._stored, self._dtype = stored, dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        if not self.shape:
            return self._stored[index]
        dtype = self._dtype or self._stored[0:0].dtype  # which raises the error of an unreadable tensor
        return torch.empty(self.shape, dtype=dtype, device="meta")[index]


def read_headers(source: WeightSource) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the tensors of a source without their values."""
    for name in source.list_names():
        place = source.find_range(name)
        yield name, HeaderTensor(source.open_tensor(name), None if place is None else place.dtype)


def _plan_ranges(source: WeightSource, names: Sequence[str], ahead: ReadAhead) -> dict[str, FileRange]:
    """The ranges of the wanted rows, by tensor name, in the order of `names`."""
    ranges = {name: source.find_range(name) for name in names if name in ahead.rows}
    return {name: cut_rows(place, ahead.rows[name]) for name, place in ranges.items() if place is not None}

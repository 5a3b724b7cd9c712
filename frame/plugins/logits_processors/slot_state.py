"""Compact device state of logits processors: tensors with one row per request that uses the
processor, indexed by slot; `SlotProcessor`, the base of the processors that have one; and `add_to`,
by which they change logits.

Allocated with the first such request; rows grow by doubling, and all memory is freed with the last
row. Must not know a processor: tensors are declared by name, trailing shape, dtype and fill value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from frame.core.interfaces.sampling import LogitsProcessor, ProcessorContext


@dataclass(frozen=True, slots=True)
class Column:
    """One tensor of the state, [rows, *shape]. New rows and new columns are filled with `fill`."""

    dtype: torch.dtype
    fill: float = 0
    shape: tuple[int, ...] = ()


class SlotState:
    """Rows by slot: `state[name]` is a tensor, `rows(slots)` the rows of slots.

    A failed allocation leaves the state unchanged: the slot has no row, and the others keep theirs.
    """

    def __init__(self, max_slots: int, device: torch.device, columns: Mapping[str, Column]) -> None:
        self._columns = dict(columns)
        self._device = device
        self._row_of = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._tensors: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    @property
    def capacity(self) -> int:
        """Allocated rows."""
        return len(next(iter(self._tensors.values()))) if self._tensors else 0

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of slots, int64 [m] -> int64 [m]."""
        return self._row_of.index_select(0, slots)

    def admit(self, slot: int, values: Mapping[str, torch.Tensor | float]) -> None:
        """Assign a row to a slot and set `values` by name (narrower ones are padded); the other
        tensors get their fill value."""
        if slot in self._rows:
            self.release(slot)
        if not self._free:
            self._grow(max(1, 2 * self.capacity))
        row = self._free[-1]
        for name, column in self._columns.items():
            value = values.get(name)
            if isinstance(value, torch.Tensor):
                self._widen(name, value.shape)
                target = self._tensors[name][row].fill_(column.fill)
                target[tuple(slice(size) for size in value.shape)] = value.to(self._device, column.dtype, non_blocking=True)
            else:
                self._tensors[name][row].fill_(column.fill if value is None else value)
        self._row_of[slot].fill_(row)  # assigning a number would synchronise with the GPU
        self._rows[slot] = self._free.pop()

    def release(self, slot: int) -> None:
        """Free a slot's row. With the last row all memory is freed."""
        self._free.append(self._rows.pop(slot))
        if not self._rows:
            self._free.clear()
            self._tensors.clear()

    def _grow(self, capacity: int) -> None:
        old, grown = self.capacity, {}
        for name, column in self._columns.items():
            before = self._tensors.get(name)
            shape = column.shape if before is None else before.shape[1:]
            grown[name] = self._filled(column, (capacity, *shape))
            if before is not None:
                grown[name][:old] = before
        self._tensors = grown
        self._free.extend(range(capacity - 1, old - 1, -1))

    def _widen(self, name: str, shape: torch.Size) -> None:
        """Widen every row for a value of this shape."""
        before = self._tensors[name]
        if all(have >= want for have, want in zip(before.shape[1:], shape, strict=True)):
            return
        wider = [max(have, want) for have, want in zip(before.shape[1:], shape, strict=True)]
        after = self._filled(self._columns[name], (len(before), *wider))
        after[tuple(slice(size) for size in before.shape)] = before
        self._tensors[name] = after

    def _filled(self, column: Column, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, column.fill, dtype=column.dtype, device=self._device)


class SlotProcessor(LogitsProcessor):
    """A processor whose state, `SlotState`, does not change with sampled tokens unless a subclass
    observes them."""

    def __init__(self, context: ProcessorContext, columns: Mapping[str, Column]) -> None:
        self._state = SlotState(context.max_slots, context.device, columns)

    def observe_tokens(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        return

    def remove_slot(self, slot: int) -> None:
        self._state.release(slot)


def add_to(logits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """logits[rows[i], columns[i, j]] += values[i, j]. rows int64 [m], columns int64 [m, k], values
    [m, k] of the logits' dtype. If a row has a column twice, all but one of its values must be 0,
    or all must be minus infinity."""
    if logits.is_cuda and logits.is_contiguous():  # `index_put_` would sort, with several kernels; the order of additions does not matter
        places = rows.unsqueeze(1) * logits.shape[1] + columns
        logits.view(-1).index_add_(0, places.view(-1), values.reshape(-1))
    else:
        logits.index_put_((rows.unsqueeze(1), columns), values, accumulate=True)

"""The orchestrator of logits processors: which slots want which processor, and calls on whole
batches.

Costs one integer comparison a step while no request wants any. Knows no processor by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.batch import SlotSetup
    from frame.core.interfaces.sampling import LogitsProcessor


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """Which processors a step calls. Their rows, slots and positions are in `arrays`, named
    `processor.INDEX.…`; `processor.rows` are all rows that one of them changes, and
    `processor.INDEX.places` where its own are among those."""

    indices: tuple[int, ...]
    arrays: dict[str, np.ndarray]


class Processors:
    """All processors of one sampler, in the order in which they are applied."""

    def __init__(self, processors: Sequence[LogitsProcessor], num_slots: int) -> None:
        self._processors = tuple(processors)
        self._wants = np.zeros((len(self._processors), num_slots), np.bool_)
        self._num_wants = 0

    def update(self, setups: Sequence[SlotSetup], released: Sequence[int]) -> None:
        """Forget released slots, then admit the new ones."""
        if self._num_wants:
            for slot in released:
                self._release(slot)
        for setup in setups:
            if self._num_wants:
                self._release(setup.slot)
            for index, processor in enumerate(self._processors):
                if processor.applies_to(setup.params):
                    processor.add_slot(setup)
                    self._wants[index, setup.slot] = True
                    self._num_wants += 1

    def plan(self, slots: np.ndarray, positions: np.ndarray) -> ProcessorPlan | None:
        """What to call for these sampling rows; None when nobody wants anything. Both int64
        [rows]."""
        if not self._num_wants:
            return None
        wants = self._wants[:, slots]
        indices = tuple(np.flatnonzero(wants.any(axis=1)).tolist())
        if not indices:
            return None
        changed = np.flatnonzero(wants.any(axis=0))
        arrays = {"processor.rows": changed}
        for index in indices:
            rows = np.flatnonzero(wants[index])
            arrays[f"processor.{index}.rows"] = rows
            arrays[f"processor.{index}.places"] = np.searchsorted(changed, rows)
            arrays[f"processor.{index}.slots"] = slots[rows]
            arrays[f"processor.{index}.positions"] = positions[rows]
        return ProcessorPlan(indices, arrays)

    def apply(self, logits: torch.Tensor, plan: ProcessorPlan, tensors: Mapping[str, torch.Tensor], *, changed_only: bool = False) -> None:
        """Change logits [rows, vocab], float32, in place; with `changed_only` they are those of
        `processor.rows` alone."""
        for index in plan.indices:
            names = ("places" if changed_only else "rows", "slots", "positions")
            rows, slots, positions = (tensors[f"processor.{index}.{name}"] for name in names)
            self._processors[index].apply(logits, rows, slots, positions)

    def observe_tokens(self, token_ids: torch.Tensor, plan: ProcessorPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tell the processors what was sampled, int64 [rows]."""
        for index in plan.indices:
            chosen = token_ids.index_select(0, tensors[f"processor.{index}.rows"])
            self._processors[index].observe_tokens(tensors[f"processor.{index}.slots"], chosen)

    def _release(self, slot: int) -> None:
        for index in np.flatnonzero(self._wants[:, slot]).tolist():
            self._processors[index].remove_slot(slot)
            self._wants[index, slot] = False
            self._num_wants -= 1

"""`Processors`: applies logits processors to whole batches, each to the slots whose requests use
it.

Costs one integer comparison per step while no request uses a logits processor. Must not know a
processor by name.
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
    """The logits processors of one step, by index. `arrays` has for each:

      processor.INDEX.rows       int64 [n]; its sampling rows
      processor.INDEX.places     int64 [n]; indices of these rows in `processor.rows`
      processor.INDEX.slots      int64 [n]; their request slots
      processor.INDEX.positions  int64 [n]; positions of the tokens to sample

    and `processor.rows`, int64 [m]: all rows that a processor changes.
    """

    indices: tuple[int, ...]
    arrays: dict[str, np.ndarray]


class Processors:
    """The logits processors of one sampler, in the order in which they are applied."""

    def __init__(self, processors: Sequence[LogitsProcessor], num_slots: int) -> None:
        self._processors = tuple(processors)
        self._uses = np.zeros((len(self._processors), num_slots), np.bool_)
        self._num_uses = 0

    def update(self, setups: Sequence[SlotSetup], released: Sequence[int]) -> None:
        """Remove released slots, then add the new ones."""
        if self._num_uses:
            for slot in released:
                self._release(slot)
        for setup in setups:
            if self._num_uses:
                self._release(setup.slot)
            for index, processor in enumerate(self._processors):
                if processor.applies_to(setup.params):
                    processor.add_slot(setup)
                    self._uses[index, setup.slot] = True
                    self._num_uses += 1

    def plan(self, slots: np.ndarray, positions: np.ndarray) -> ProcessorPlan | None:
        """The processors to call for the sampling rows with these slots and positions, both int64
        [rows]. None: no row uses a processor."""
        if not self._num_uses:
            return None
        uses = self._uses[:, slots]
        indices = tuple(np.flatnonzero(uses.any(axis=1)).tolist())
        if not indices:
            return None
        changed = np.flatnonzero(uses.any(axis=0))
        arrays = {"processor.rows": changed}
        for index in indices:
            rows = np.flatnonzero(uses[index])
            arrays[f"processor.{index}.rows"] = rows
            arrays[f"processor.{index}.places"] = np.searchsorted(changed, rows)
            arrays[f"processor.{index}.slots"] = slots[rows]
            arrays[f"processor.{index}.positions"] = positions[rows]
        return ProcessorPlan(indices, arrays)

    def apply(self, logits: torch.Tensor, plan: ProcessorPlan, tensors: Mapping[str, torch.Tensor], *, changed_only: bool = False) -> None:
        """Change logits [rows, vocab], float32, in place. `changed_only`: the logits are those of
        `processor.rows` only."""
        for index in plan.indices:
            names = ("places" if changed_only else "rows", "slots", "positions")
            rows, slots, positions = (tensors[f"processor.{index}.{name}"] for name in names)
            self._processors[index].apply(logits, rows, slots, positions)

    def observe_tokens(self, token_ids: torch.Tensor, plan: ProcessorPlan, tensors: Mapping[str, torch.Tensor]) -> None:
        """Pass the sampled tokens, int64 [rows], to the processors of the step."""
        for index in plan.indices:
            chosen = token_ids.index_select(0, tensors[f"processor.{index}.rows"])
            self._processors[index].observe_tokens(tensors[f"processor.{index}.slots"], chosen)

    def _release(self, slot: int) -> None:
        for index in np.flatnonzero(self._uses[:, slot]).tolist():
            self._processors[index].remove_slot(slot)
            self._uses[index, slot] = False
            self._num_uses -= 1

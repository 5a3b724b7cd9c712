"""`Processors`: applies logits processors to whole batches, each to the slots whose requests use
it, and tells a sampler with slots of them.

Costs one integer comparison per step while no request uses a logits processor. Must not know a
processor by name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np

from frame.core.blame import describe, remedy
from frame.core.interfaces.sampling import LogitsProcessor
from frame.core.messages import Finish
from frame.core.sampling.batch_layout import A

if TYPE_CHECKING:
    import torch

    from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
    from frame.core.interfaces.device_operations import SupportsSlots
    from frame.core.interfaces.sampling_params import SamplingParams
    from frame.core.sampling.batch_layout import BatchLayout

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ProcessorRows(Generic[A]):
    """The rows that one logits processor changes. All int64 [n]."""

    rows: A  # the sampling rows
    indices: A  # of these rows in `ProcessorArrays.rows`
    slots: A  # their request slots
    positions: A  # of the tokens to sample


@dataclass(slots=True)
class ProcessorArrays(Generic[A]):
    """The rows of one step that logits processors change, on the host or on the device."""

    rows: A  # int64 [m]; all rows that a processor changes
    by_processor: tuple[ProcessorRows[A], ...]  # in the order of `ProcessorPlan.indices`


@dataclass(frozen=True, slots=True)
class ProcessorPlan:
    """The logits processors of one step, by index."""

    indices: tuple[int, ...]
    arrays: ProcessorArrays[np.ndarray]


class Processors:
    """The logits processors of one sampler, in the order in which they are applied. `sampler`: the
    sampler plugin, if it keeps something by slot."""

    def __init__(self, processors: Sequence[LogitsProcessor], num_slots: int, sampler: SupportsSlots | None = None) -> None:
        self.sampler = sampler
        self._processors = tuple(processors)
        self._uses = np.zeros((len(self._processors), num_slots), np.bool_)
        self._num_uses = 0
        self._faults: dict[int, str] = {}  # by slot: why the request ends

    def check_params(self, params: SamplingParams) -> Finish | None:
        """How a request ends whose parameters a processor refuses or fails on; None: all accept."""
        plugins: list[LogitsProcessor | SupportsSlots] = [*self._processors]
        plugins += [] if self.sampler is None else [self.sampler]
        for plugin in plugins:
            try:
                if not isinstance(plugin, LogitsProcessor) or plugin.applies_to(params):
                    plugin.validate_params(params)
            except ValueError as error:
                sentence = str(error).strip().split("\n", 1)[0]
                return Finish("error", error=sentence, code="invalid_request", param=_field(params, sentence))
            except Exception as error:  # noqa: BLE001 - the request is refused, the engine goes on
                return Finish("error", error=_fault(plugin, error))
        return None

    def describe_all(self) -> str:
        """The names of all processors, with their packages."""
        return ", ".join(map(describe, self._processors))

    def find_faults(self, slots: np.ndarray) -> dict[int, str] | None:
        """The faults of processors on these sampling rows, by row; None for none."""
        if not self._faults:
            return None
        return {row: self._faults[slot] for row, slot in enumerate(slots.tolist()) if slot in self._faults} or None

    def update(self, setups: Sequence[SlotSetup], released: Sequence[int]) -> None:
        """Remove released slots, then add the new ones. A processor that fails on a request ends
        that request alone."""
        if self._num_uses or self._faults:
            for slot in released:
                self._release(slot)
        for setup in setups:
            if self._num_uses or self._faults:
                self._release(setup.slot)
            for index, processor in enumerate(self._processors):
                try:
                    if processor.applies_to(setup.params):
                        processor.add_slot(setup)
                        self._uses[index, setup.slot] = True
                        self._num_uses += 1
                except Exception as error:  # noqa: BLE001 - the fault of one request must not end the others of its batch
                    self._faults[setup.slot] = _fault(processor, error)

        if self.sampler is not None:
            self._update_sampler(self.sampler, setups, released)

    def _update_sampler(self, sampler: SupportsSlots, setups: Sequence[SlotSetup], released: Sequence[int]) -> None:
        for slot in released:
            try:
                sampler.remove_slot(slot)
            except Exception as error:  # noqa: BLE001 - the request has ended
                _fault(sampler, error)
        for setup in setups:
            try:
                sampler.add_slot(setup)
            except Exception as error:  # noqa: BLE001 - as of logits processors
                self._faults[setup.slot] = _fault(sampler, error)

    def observe_draws(self, token_ids: torch.Tensor, slots: torch.Tensor, host_slots: np.ndarray) -> None:
        """Pass the drawn tokens and their slots, int64 [rows], to the sampler."""
        if self.sampler is None or not len(host_slots):
            return
        try:
            self.sampler.observe_tokens(slots, token_ids)
        except Exception as error:
            if type(error).__name__ == "AcceleratorError":
                raise
            self._faults.update(dict.fromkeys(host_slots.tolist(), _fault(self.sampler, error)))

    def begin_step(self, batch: ScheduledBatch, layout: BatchLayout) -> ProcessorPlan | None:
        """`update`, and the plan of the step."""
        self.update(batch.setups, batch.released)
        return self.plan(layout.sample_slots, layout.sample_positions)

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
        by_processor = []
        for index in indices:
            rows = np.flatnonzero(uses[index])
            by_processor.append(ProcessorRows(rows, np.searchsorted(changed, rows), slots[rows], positions[rows]))
        return ProcessorPlan(indices, ProcessorArrays(changed, tuple(by_processor)))

    def apply(
        self, logits: torch.Tensor, plan: ProcessorPlan, tensors: ProcessorArrays[torch.Tensor], *, changed_only: bool = False
    ) -> None:
        """Change logits [rows, vocab], float32, in place. `changed_only`: the logits are those of
        `tensors.rows` only."""
        for index, each in zip(plan.indices, tensors.by_processor, strict=True):
            try:
                self._processors[index].apply(logits, each.indices if changed_only else each.rows, each.slots, each.positions)
            except Exception as error:  # noqa: BLE001 - as in `update`
                self._end_requests(index, plan, error)

    def observe_tokens(
        self,
        token_ids: torch.Tensor,
        plan: ProcessorPlan,
        tensors: ProcessorArrays[torch.Tensor],
        is_output: torch.Tensor | None = None,
    ) -> None:
        """Pass the sampled tokens, int64 [rows], to the processors of the step. is_output: bool
        [rows], False for tokens after a rejected draft, which are left out; None: all are
        output."""
        for index, each in zip(plan.indices, tensors.by_processor, strict=True):
            rows, slots = each.rows, each.slots
            if is_output is not None:
                kept = is_output.index_select(0, rows)
                rows, slots = rows[kept], slots[kept]
            try:
                self._processors[index].observe_tokens(slots, token_ids.index_select(0, rows))
            except Exception as error:  # noqa: BLE001 - as in `update`
                self._end_requests(index, plan, error)

    def _end_requests(self, index: int, plan: ProcessorPlan, error: Exception) -> None:
        """Let the requests of a step that a processor failed on end. Raises an error of the device
        again."""
        if type(error).__name__ == "AcceleratorError":
            raise error
        sentence = _fault(self._processors[index], error)
        slots = plan.arrays.by_processor[plan.indices.index(index)].slots
        self._faults.update(dict.fromkeys(slots.tolist(), sentence))

    def _release(self, slot: int) -> None:
        self._faults.pop(slot, None)
        for index in np.flatnonzero(self._uses[:, slot]).tolist():
            self._uses[index, slot] = False
            self._num_uses -= 1
            try:
                self._processors[index].remove_slot(slot)
            except Exception as error:  # noqa: BLE001 - the request has ended
                _fault(self._processors[index], error)


def _fault(plugin: LogitsProcessor | SupportsSlots, error: Exception) -> str:
    """Log the fault; returns the sentence for the client."""
    sentence = f"{describe(plugin)} failed on this request: {type(error).__name__}: {error}"
    _log.error("%s; %s", sentence, remedy(plugin), exc_info=error)
    return f"{sentence}; send it without the parameters of this {'logits processor' if isinstance(plugin, LogitsProcessor) else 'sampler'}"


def _field(params: SamplingParams, sentence: str) -> str:
    """The field of the request that a sentence names: a key of `custom`, or a parameter."""
    words = re.findall(r"\w+", sentence)
    known = (*params.custom, *params.__struct_fields__)
    return next((word for word in words if word in known), "custom")

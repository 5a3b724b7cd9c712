"""The orchestrator calls what is wanted, for the rows that want it, and nothing else."""

from __future__ import annotations

import numpy as np
import torch

from frame.core.execution.staging import SharedMemory
from frame.core.interfaces.batch import SlotSetup
from frame.core.interfaces.sampling import LogitsProcessor
from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.sampling.logits_pipeline import Processors


class Adds(LogitsProcessor):
    """Adds 1 to the logit named in `custom[key]`, and writes down all calls."""

    def __init__(self, key):
        self.key, self.calls, self.slots = key, [], set()

    def applies_to(self, params):
        return self.key in params.custom

    def add_slot(self, setup):
        assert setup.slot not in self.slots
        self.slots.add(setup.slot)

    def apply(self, logits, rows, slots, positions):
        self.calls.append(("apply", rows.tolist(), slots.tolist(), positions.tolist()))
        logits[rows, 0] += 1

    def observe_tokens(self, slots, token_ids):
        self.calls.append(("observe", slots.tolist(), token_ids.tolist()))

    def remove_slot(self, slot):
        self.slots.remove(slot)


def setup(slot, *keys):
    return SlotSetup(slot, SamplingParams(custom=dict.fromkeys(keys, "1")), 0, 1, np.array([1], np.int32))


def step(processors, slots):
    slots = np.array(slots, np.int64)
    plan = processors.plan(slots, slots + 100)
    if plan is None:
        return None
    tensors = SharedMemory().move(plan.arrays)
    logits = torch.zeros(len(slots), 4)
    processors.apply(logits, plan, tensors)
    processors.observe_tokens(torch.arange(len(slots)) + 50, plan, tensors)
    return logits[:, 0].tolist()


def test_only_wanting_rows_reach_a_processor():
    a, b = Adds("a"), Adds("b")
    processors = Processors([a, b], 8)
    assert step(processors, [0, 1]) is None
    processors.update([setup(0), setup(1, "a"), setup(2, "a", "b"), setup(5, "b")], [])
    assert step(processors, [5, 0, 2]) == [1.0, 0.0, 2.0]
    assert a.calls == [("apply", [2], [2], [102]), ("observe", [2], [52])]
    assert b.calls == [("apply", [0, 2], [5, 2], [105, 102]), ("observe", [5, 2], [50, 52])]
    assert step(processors, [0]) is None


def test_released_and_reused_slots():
    a = Adds("a")
    processors = Processors([a], 8)
    processors.update([setup(1, "a"), setup(2, "a")], [])
    processors.update([setup(1)], [1])  # left, and taken over by a request that wants nothing
    assert (a.slots, step(processors, [1])) == ({2}, None)
    processors.update([setup(2, "a")], [])  # came back without having been released
    assert a.slots == {2}
    processors.update([], [2, 3])
    assert a.slots == set()
    assert processors.plan(np.array([2]), np.array([1])) is None

"""The mean length of drafts that are accepted at random."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from frame.core.execution.staging import SharedMemory
from frame.core.sampling.batch_layout import DraftLayout
from frame.core.sampling.step_plan import plan_verification
from frame.core.sampling.verification import verify_drafts
from frame.speculation.synthetic_acceptance import SyntheticAcceptance


@pytest.mark.parametrize(("length", "num_steps"), [(1.0, 3), (1.5, 3), (3.0, 3), (2.0, 1), (2.5, 7)])
def test_synthetic_acceptance_has_the_mean_length(length: float, num_steps: int) -> None:
    acceptance, rows = SyntheticAcceptance(length, num_steps), 4000
    num_samples = np.full(rows, num_steps + 1)
    slots = np.repeat(np.arange(rows), num_steps + 1)
    offsets = np.tile(np.arange(num_steps + 1), rows)
    targets = np.where(offsets < num_steps, 1000 + offsets, -1)
    drafts = DraftLayout(np.arange(rows), num_samples, np.arange(rows) * (num_steps + 1), offsets, targets, slots, num_steps + 1)
    layout: Any = SimpleNamespace(sample_slots=slots)
    plan = plan_verification(layout, drafts)
    plan.arrays.chosen = acceptance.choose(layout.sample_slots, 50 + offsets, targets)
    drawn = torch.arange(len(offsets)) % 100
    found = verify_drafts(drawn, plan, SharedMemory().move(plan.arrays))
    assert float(found.counts.float().mean()) == pytest.approx(length, abs=0.06)
    is_draft = torch.from_numpy(offsets) < (found.counts - 1).repeat_interleave(num_steps + 1)
    assert torch.equal(found.token_ids, torch.where(is_draft, torch.from_numpy(targets), drawn))

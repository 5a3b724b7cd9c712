"""Results of steps in flight equal those of steps that complete at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from frame.core.execution.async_output import DoneStep, QueuedStep, StepOutput
from frame.core.interfaces.platform import PlatformContext
from frame.core.sampling.sampler import Sampled
from frame.core.sampling.sampling_metadata import SamplingArrays, SamplingPlan
from tests.plugins.fake_platform import FakePlatform


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("length", [1, 7])
def test_copies_of_several_tensors_are_those_of_each(has_drafts: bool, length: int) -> None:
    """Rows of odd numbers, so that the 8 bytes of an integer begin at any multiple of 4."""
    numbers = torch.arange(-4, 200)
    best = torch.tensor([0.5, torch.nan, 2.0])
    logprobs = (torch.tensor([-0.5, -1.5, -2.5]), numbers[:6].view(3, 2), torch.arange(6.0).view(3, 2)) if has_drafts else ()
    drafts = numbers[20:100].view(2, 2, 20)[:, :, :length]  # not contiguous
    more = (numbers[5:7], drafts, torch.tensor([1, 0, 2])) if has_drafts else ()
    rows = np.arange(3)
    plan = SamplingPlan(
        slots=rows, positions=rows, num_drawn=0, num_filtered=0, max_top_k=0, has_unlimited=False, has_min_p=False,
        num_top_logprobs=2, by_row=True, arrays=SamplingArrays(logprob_rows=rows if has_drafts else None),
    )  # fmt: skip
    output = StepOutput(7, Sampled(numbers[:3], best, *logprobs), plan, None, None, *more)
    expected, found = DoneStep(output).wait(), QueuedStep(output, FakePlatform(PlatformContext())).wait()
    np.testing.assert_equal(structs.asdict(found), structs.asdict(expected))
    assert (found.drafts is not None) == has_drafts and found.token_ids.tolist() == ([-3, -4, -2] if has_drafts else [-4, -3, -2])

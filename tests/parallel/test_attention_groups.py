"""Padding of groups to equal numbers of tokens, and the scheduler of several groups."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.interfaces.batch import ScheduledBatch
from frame.core.messages import Finish, StepTokens
from frame.parallel.attention_groups import pad_group
from frame.parallel.grouped_scheduler import join_tokens

PADDING = 99


def batch(decodes: int, *prompts: int, step: int = 7) -> ScheduledBatch:
    rows = decodes + len(prompts)
    return ScheduledBatch(
        step=step,
        num_decodes=decodes,
        slots=np.arange(rows, dtype=np.int32),
        num_computed=np.full(rows, 5, np.int32),
        num_scheduled=np.array([1] * decodes + list(prompts), np.int32),
        token_ids=np.arange(sum(prompts), dtype=np.int32),
        samples=np.ones(rows, np.bool_),
        new_pages=np.empty((0, 3), np.int32),
        skip_kv_store=np.zeros(rows, np.bool_),
    )


@pytest.mark.parametrize(
    ("groups", "tokens", "has_prompts"),
    [
        ([batch(3), batch(1)], 3, False),
        ([batch(3), None], 3, False),
        ([None, batch(0, 40)], 40, True),
        ([batch(2, 7), batch(9)], 10, True),  # a group without prompts gets one, so that no group replays a decode graph
        ([batch(9), batch(8, 1)], 10, True),
        ([batch(1, 90), batch(4, 3), None], 91, True),
    ],
)
def test_all_groups_compute_as_many_tokens(groups: list[ScheduledBatch | None], tokens: int, has_prompts: bool) -> None:
    for number, own in enumerate(groups):
        padded = pad_group(groups, number, PADDING, max_context=32)
        rows = 0 if own is None else len(own.slots)
        assert int(padded.num_scheduled.sum()) == tokens
        assert (len(padded.slots) > padded.num_decodes) == has_prompts
        assert len(padded.token_ids) == int(padded.num_scheduled[padded.num_decodes :].sum())
        assert padded.samples.sum() == rows  # padding draws nothing
        assert (padded.slots[rows:] == PADDING).all() and (padded.num_scheduled[rows:] <= 32).all()
        if own is not None:
            assert padded.step == own.step and (padded.slots[:rows] == own.slots).all() and len(padded.skip_kv_store) == len(padded.slots)


def test_the_tokens_of_groups_are_joined() -> None:
    first = StepTokens(rids=["a", "b"], token_ids=[[1], [2]], finishes={1: Finish("stop")}, queue_times={0: 0.5})
    second = StepTokens(rids=["c"], token_ids=[[3]], finishes={0: Finish("length")})
    joined = join_tokens([first, second])
    assert (joined.rids, joined.token_ids) == (["a", "b", "c"], [[1], [2], [3]])
    assert joined.finishes == {1: Finish("stop"), 2: Finish("length")} and joined.queue_times == {0: 0.5}

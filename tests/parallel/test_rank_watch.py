"""A wait that takes long names the rank, the collective and the step, and its end is reported."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from frame.core.interfaces.collective import CollectiveContext, LocalGroup
from frame.parallel.rank_watch import RankWatch, WatchedGroup


class Slow(LocalGroup):
    """Waits in the sum."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        time.sleep(0.5)
        return tensor + 1


def test_a_long_wait_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    watch = RankWatch(1, 4, long_wait=0.06)
    group = WatchedGroup(Slow(CollectiveContext(1, 4)), watch, "tp0")
    watch.step = 17
    with caplog.at_level(logging.WARNING):
        assert group.all_reduce(torch.ones(1)) == 2
        time.sleep(0.1)
    group.close()
    first, second = caplog.messages
    assert first.startswith("rank 1 of 4 has waited 0 s in all-reduce (tp0) of step 17: another rank")
    assert second == "rank 1 of 4 goes on after all-reduce (tp0)"


def test_operations_are_those_of_the_group() -> None:
    watch = RankWatch(0, 1)
    group, x = WatchedGroup(LocalGroup(), watch, "tp"), torch.randn(2, 3)
    assert group.all_reduce(x) is group.all_gather(x) is group.broadcast(x) is group.reduce_scatter(x) is group.all_to_all(x, [2], [2]) is x
    for call in (group.send, group.recv):
        with pytest.raises(ValueError, match="group of one"):
            call(x, 0)
    assert watch.describe_wait(time.monotonic() + 60) is None
    group.close()

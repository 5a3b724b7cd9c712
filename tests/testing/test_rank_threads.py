"""Ranks that are threads of one process: results by rank, the first error, and ranks that hang."""

from __future__ import annotations

import threading

import pytest
import torch

from frame.core.interfaces.plugin import PluginRecord
from frame.plugins.collectives.gloo import Gloo
from frame.testing.conformance import Setting, Subject
from frame.testing.ranks.rank_threads import run_ranks, run_threads

SUBJECT = Subject(PluginRecord("collective", "gloo", "tests:Gloo", "any/1"), Gloo, None, Setting())


def test_results_are_by_rank() -> None:
    results = run_ranks(SUBJECT, lambda group, device: [group.rank, *group.all_reduce(torch.ones(2) * (group.rank + 1)).tolist()], 2)
    assert results == [[0, 3.0, 3.0], [1, 3.0, 3.0]]


def test_the_error_of_a_rank_is_raised() -> None:
    def act(group: Gloo, device: torch.device) -> None:
        if group.rank:
            raise KeyError("of rank 1")

    with pytest.raises(KeyError, match="of rank 1"):
        run_ranks(SUBJECT, act, 2)


def test_threads_that_hang_are_told() -> None:
    ends = threading.Event()
    assert not run_threads(2, lambda rank: rank and ends.wait(30), 0.1)
    ends.set()
    assert run_threads(2, lambda rank: None, 30)

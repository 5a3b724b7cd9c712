"""`random`: a random order, the baseline for measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from frame.core.interfaces.scheduling import SchedulableRequest, SchedulerView, SchedulingPolicy


class RandomOrder(SchedulingPolicy):
    """A random permutation, equal for equal requests and time."""

    def sort_waiting(self, waiting: Sequence[SchedulableRequest], view: SchedulerView) -> Iterable[SchedulableRequest]:
        return Random(view.now).sample(waiting, len(waiting))

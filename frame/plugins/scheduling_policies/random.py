"""`random`: a random order, the baseline for measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy

if TYPE_CHECKING:
    from frame.core.scheduling.request import Request


class RandomOrder(SchedulingPolicy):
    """A random permutation, equal for equal requests and time."""

    def sort_waiting(self, waiting: Sequence[Request], view: SchedulerView) -> Iterable[Request]:
        return Random(view.now).sample(waiting, len(waiting))

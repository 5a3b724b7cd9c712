"""`PolicyOrder`: a policy's order of waiting requests, of which a policy at fault can spoil no more than the order. Knows no queue."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from operator import is_

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.request import Request

log = logging.getLogger(__name__)

QUIET = 60.0  # seconds between two complaints of one policy


class PolicyOrder:
    """Asks a policy. One that raises, or returns no requests, is named in the log, and what waits keeps its order for this step; requests
    that it returns twice, or that it was not given, are left out."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._quiet_until = -math.inf

    def __call__(self, window: Sequence[Request], view: SchedulerView) -> list[Request]:
        given = tuple(window)  # in their order, whatever the policy does to the window
        try:
            ordered = list(self._policy.order(window, view))
        except Exception as error:  # noqa: BLE001 - a stranger's code, and no waiting request's fault
            self._complain(view, f"failed ({type(error).__name__}: {error}); what waits keeps its order instead", error)
            return list(given)
        if len(ordered) <= len(given) and all(map(is_, ordered, given)):
            return ordered
        names, known = set(map(id, ordered)), set(map(id, given))
        if len(names) == len(ordered) and names <= known:
            return ordered
        self._complain(view, "returned requests twice, or such as it was not given; these are left out")
        return [request for request in {id(request): request for request in ordered}.values() if id(request) in known]

    def _complain(self, view: SchedulerView, sentence: str, error: Exception | None = None) -> None:
        if view.now < self._quiet_until:
            return
        self._quiet_until = view.now + QUIET
        kind = type(self._policy)
        log.error("the scheduling policy %s.%s, asked for an order, %s", kind.__module__, kind.__qualname__, sentence, exc_info=error)

"""`GuardedPolicy`: a scheduling policy, of which one at fault can spoil no more than the order and the choice of who gives way.

Knows no queue, and not what comes of the answers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.request import Request

log = logging.getLogger(__name__)

QUIET = 60.0  # seconds between two complaints of one policy


class GuardedPolicy:
    """Asks a policy. One that raises, or answers what it may not, is named in the log, and the default is done instead."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._quiet_until = -math.inf
        self.needs_matches = policy.needs_matches
        self.by_priority = policy.by_priority
        self.may_preempt = type(policy).preempts is not SchedulingPolicy.preempts

    def order(self, window: Sequence[Request], view: SchedulerView) -> Iterator[Request]:
        """What waits, as the policy orders it; read as far as the caller does. What is left when the policy fails keeps its order. Requests
        that the policy returns twice, or that it was not given, are left out."""
        left = {id(request): request for request in window}  # in their order, whatever the policy does to the window
        try:
            for request in islice(self._policy.order(window, view), 2 * len(left) + 1):  # whatever it yields, it ends
                if left.pop(id(request), None) is not None:
                    yield request
                else:
                    self._complain(view.now, "an order, returned requests twice, or such as it was not given; these are left out")
        except Exception as error:  # noqa: BLE001 - a stranger's code, and no waiting request's fault
            self._complain(view.now, f"an order, failed ({_named(error)}); what waits keeps its order instead", error)
            yield from list(left.values())

    def victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        """Whom the policy would retract of `running`, oldest first; None where it names nobody, fails, or names one that may not be."""
        given = tuple(running)
        try:
            victim = self._policy.victim(given, view)
        except Exception as error:  # noqa: BLE001 - as above
            self._complain(view.now, f"a victim, failed ({_named(error)}); the newest gives way instead", error)
            return None
        if victim is None or any(victim is request for request in given[1:]):
            return victim
        self._complain(view.now, "a victim, named the oldest request, or one that is not running; the newest gives way instead")
        return None

    def preempts(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether `waiting` may push `running` off the device; not where the policy fails."""
        try:
            return bool(self._policy.preempts(waiting, running))
        except Exception as error:  # noqa: BLE001 - as above
            self._complain(now, f"who may push whom off the device, failed ({_named(error)}); nobody is pushed off", error)
            return False

    def _complain(self, now: float, sentence: str, error: Exception | None = None) -> None:
        if now < self._quiet_until:
            return
        self._quiet_until = now + QUIET
        kind = type(self._policy)
        log.error("the scheduling policy %s.%s, asked for %s", kind.__module__, kind.__qualname__, sentence, exc_info=error)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

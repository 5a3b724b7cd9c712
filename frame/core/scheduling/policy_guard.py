"""`GuardedPolicy`: isolates faults in scheduling-policy plugins. On an error the default order or
victim is used.

Used by the step planner. It must not know the queue or the running set.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import islice

from frame.core.blame import describe, remedy
from frame.core.interfaces.scheduling import SchedulerView, SchedulingPolicy
from frame.core.scheduling.request import Request

log = logging.getLogger(__name__)

LOG_INTERVAL = 60.0  # seconds between two log entries about one policy


class GuardedPolicy:
    """Calls a `SchedulingPolicy`. Where it raises or returns an invalid value, logs the policy's
    name and uses the default."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._no_log_until = -math.inf
        self.needs_matches = policy.needs_matches
        self.by_priority = policy.by_priority
        self.may_preempt = type(policy).can_preempt is not SchedulingPolicy.can_preempt

    def sort_waiting(self, window: Sequence[Request], view: SchedulerView) -> Iterator[Request]:
        """Yield the requests of `window` in the policy's order, lazily. If the policy fails, the
        rest follow in their own order.

        Requests that the policy returns twice, or that are not in `window`, are skipped.
        """
        left = {id(request): request for request in window}  # a copy: the policy may change `window`
        try:
            for request in islice(self._policy.sort_waiting(window, view), 2 * len(left) + 1):  # bounds an endless iterator
                if (known := left.pop(id(request), None)) is not None:
                    yield known
                else:
                    self._log_fault(view.now, "an order, returned requests twice or ones that it was not given; these are skipped")
        except Exception as error:  # noqa: BLE001 - third-party code must not end waiting requests
            self._log_fault(view.now, f"an order, failed ({_named(error)}); waiting requests keep their order", error)
            yield from list(left.values())

    def select_victim(self, running: Sequence[Request], view: SchedulerView) -> Request | None:
        """The request of `running` (oldest first) that the policy preempts; None where it chooses
        none, fails, or chooses an invalid one."""
        candidates = tuple(running)
        try:
            victim = self._policy.select_victim(candidates, view)
        except Exception as error:  # noqa: BLE001 - as above
            self._log_fault(view.now, f"a victim, failed ({_named(error)}); the newest request is preempted", error)
            return None
        match = next((request for request in candidates[1:] if request is victim), None)
        if match is not None or victim is None:
            return match
        self._log_fault(view.now, "a victim, returned the oldest request or one that does not run; the newest request is preempted")
        return None

    def can_preempt(self, waiting: Request, running: Request, now: float) -> bool:
        """Whether `waiting` may preempt `running`; False where the policy fails."""
        try:
            return bool(self._policy.can_preempt(waiting, running))
        except Exception as error:  # noqa: BLE001 - as above
            self._log_fault(now, f"a preemption, failed ({_named(error)}); no request is preempted", error)
            return False

    def _log_fault(self, now: float, sentence: str, error: Exception | None = None) -> None:
        if now < self._no_log_until:
            return
        self._no_log_until = now + LOG_INTERVAL
        log.error("%s, asked for %s; %s", describe(self._policy), sentence, remedy(self._policy), exc_info=error)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

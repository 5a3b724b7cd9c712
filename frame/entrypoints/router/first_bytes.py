"""`FirstBytes` and `judge_slowness`: which replicas are slow against their peers although their
health checks succeed (gray failures).

Times to the first byte of streams are compared, those of requests that still wait among them. A
slow replica gets fewer requests; one that is very slow gets none for a while, then is tried again.
Used by `Backends`. Must not know a request or a policy.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from statistics import median

WINDOW = 32  # times of a replica that are compared
MIN_TIMES = 8  # below, a replica is not judged
SLOW, VERY_SLOW = 2.0, 5.0  # times the median of the peers' medians
MIN_EXCESS = 0.25  # seconds above it; less is no failure
MAX_FACTOR = 8.0
SUSPENSION = 10.0  # seconds without requests, and as many more each time that it is as slow again
MAX_SUSPENSION = 120.0
MAX_SUSPENDED = 0.5  # share of the replicas


class FirstBytes:
    """The times of one replica. factor: how much more one of its requests counts as load."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.suspended_until = 0.0  # time.monotonic
        self.is_silent = False  # a request had no answer in its time, and none had one since
        self._times: deque[float] = deque(maxlen=WINDOW)  # seconds
        self._waiting: dict[int, float] = {}  # requests without a first byte: when they were sent
        self._numbers = itertools.count()
        self._num_suspensions = 0

    def start(self, now: float) -> int:
        """A stream was asked for. -> its number for `finish`."""
        number = next(self._numbers)
        self._waiting[number] = now
        return number

    def finish(self, number: int, now: float, *, has_answer: bool) -> float:
        """Its first byte came, or it ended without one. -> seconds that it took."""
        started = self._waiting.pop(number)
        if has_answer:
            self._times.append(now - started)
        return now - started

    def list_ages(self, now: float) -> list[float]:
        """Seconds that requests without a first byte wait so far."""
        return [now - started for started in self._waiting.values()]

    def typical(self, now: float) -> float | None:
        """The median of the times; None: too few. A request that waits longer than half of those
        that were answered counts with the time so far."""
        known = sorted(self._times)
        usual = median(known) if known else 0.0
        late = [age for started in self._waiting.values() if (age := now - started) > usual]
        times = known + late
        return median(times) if len(times) >= MIN_TIMES else None

    def judge(self, peers: float, own: float, now: float, may_suspend: bool) -> None:
        """Compare with the peers' median, in seconds."""
        ratio = own / max(peers, 1e-3)
        if ratio < SLOW or own - peers < MIN_EXCESS:
            self.factor, self._num_suspensions = 1.0, 0
            return
        self.factor = min(ratio, MAX_FACTOR)
        if ratio >= VERY_SLOW and may_suspend:
            self.suspend(now)

    def note_answer(self) -> None:
        """It is not silent."""
        if self.is_silent:
            self.is_silent, self._num_suspensions = False, 0

    def suspend(self, now: float, *, is_silent: bool = False) -> None:
        """No requests for a while. It is judged anew after. is_silent: a request had no answer."""
        self.is_silent |= is_silent
        self._num_suspensions += 1
        self.suspended_until = now + min(MAX_SUSPENSION, self._num_suspensions * SUSPENSION)
        self._times.clear()


def judge_slowness(replicas: Sequence[FirstBytes], now: float) -> list[FirstBytes]:
    """Judge each replica by the others. -> those that are suspended from now on."""
    typical = [each.typical(now) for each in replicas]
    num_suspended, suspended = sum(each.suspended_until > now for each in replicas), []
    for number, (each, own) in enumerate(zip(replicas, typical, strict=True)):
        peers = [time for other, time in enumerate(typical) if other != number and time is not None]
        if own is None or not peers or each.suspended_until > now:
            continue
        each.judge(median(peers), own, now, num_suspended + 1 <= MAX_SUSPENDED * len(replicas))
        if each.suspended_until > now:
            num_suspended += 1
            suspended.append(each)
    return suspended

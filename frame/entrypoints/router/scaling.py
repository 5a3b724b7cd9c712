"""`DesiredReplicas`: how many replicas a fleet needs for its latency targets, as a function of what
the router sees. It learns how many requests a replica serves within the targets.

Used by the router's metrics (`frame_desired_replicas`). Starts and stops nothing, reads no clock
and must not know a replica.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

UP, DOWN = 0.9, 0.7  # shares of the learned limit that replicas are added, and removed, for
HIGH, LOW = 0.8, 0.4  # latency over its target: above, a load is no longer known to be good; below, a replica may be too many
RELAX = 1.02  # growth of the limit per update in which a load near it is within the targets
SMOOTHING = 10.0  # seconds
RAMP = 2.0  # most times as many replicas as serve now
GOOD_SHARE = 0.5  # of the load at a violation, that the limit becomes at least
STUCK = 3.0  # times `lead` after which replicas that still join are not waited for
MAX_HISTORY = 4096
MAX_SECONDS = 3600.0  # of a latency that a replica tells


@dataclass(frozen=True, slots=True)
class ScalingTargets:
    """Latencies in seconds, None: no target. `hold`: seconds in which a replica must not have been
    needed before it is removed. `lead`: seconds that a replica takes to start."""

    first_token: float | None
    inter_token: float | None
    minimum: int = 1
    maximum: int = 64
    hold: float = 300.0
    lead: float = 60.0


@dataclass(frozen=True, slots=True)
class FleetSignals:
    """What the router sees. `now`: seconds, monotonic. `serving`, `joining`: replicas. `load`:
    requests that wait or run. Latencies in seconds, 0.0: there were none lately."""

    now: float
    serving: int
    joining: int
    load: float
    first_token: float
    inter_token: float


def read_inter_token(header: str) -> float:
    """The seconds between tokens in a replica's `LOAD` header; 0.0: they are unknown."""
    try:
        seconds = float(header)
    except ValueError:
        return 0.0
    return seconds if 0.0 < seconds < MAX_SECONDS else 0.0


def find_percentile(seconds: Sequence[float]) -> float:
    """The 90th percentile; 0.0 without values."""
    return sorted(seconds)[int(0.9 * len(seconds))] if seconds else 0.0


class DesiredReplicas:
    """Replicas are added at once, for the load that the present trend reaches when they serve, and
    removed one by one when none of the last `hold` seconds needed them. In its first `hold` seconds
    it keeps what it finds. `limit`: requests of a replica within the targets, as far as it is
    known."""

    def __init__(self, targets: ScalingTargets) -> None:
        self.targets = targets
        self.value = targets.minimum
        self.limit = math.inf
        self._load: float | None = None
        self._history: deque[tuple[float, float]] = deque(maxlen=MAX_HISTORY)  # (time, load) of the last `lead` seconds
        self._needed: deque[tuple[float, int]] = deque(maxlen=MAX_HISTORY)  # (time, replicas), decreasing, of the last `hold` seconds
        self._good = 0.0  # requests of a replica when the latencies were last well within the targets
        self._violations = 0  # updates in a row
        self._lowered_at = self._removed_at = -math.inf
        self._started: float | None = None
        self._num_joining, self._joined_at = 0, -math.inf  # replicas at the last update, and when there were more than before

    def update(self, signals: FleetSignals) -> int:
        """The replicas that the fleet should have now."""
        targets, serving = self.targets, max(1, signals.serving)
        started = self._started = signals.now if self._started is None else self._started
        load, predicted = self._smooth(signals)
        pressure, each, is_joining = self._find_pressure(signals), load / serving, self._waits_for_joining(signals)
        self._learn(signals, pressure, each, is_joining=is_joining)
        up = down = min(serving, self.value)
        if not math.isinf(self.limit):
            up, down = (math.ceil(predicted / (share * self.limit) - 1e-9) for share in (UP, DOWN))
            if self._violations > 1 and not is_joining:
                up = max(up, serving + 1)
                down = max(down, up)
        elif pressure < LOW:
            up = down = serving - 1
        if signals.now - started < targets.hold:
            up = max(up, serving)
        maximum = max(serving + 1, math.ceil(RAMP * serving))
        up, down = (max(targets.minimum, min(targets.maximum, maximum, count)) for count in (up, down))
        while self._needed and self._needed[-1][1] <= down:
            self._needed.pop()
        self._needed.append((signals.now, down))
        while self._needed[0][0] < signals.now - targets.hold:
            self._needed.popleft()
        fewer = self._needed[0][1] < self.value and signals.now - self._removed_at > targets.lead
        value = max(up, self.value - fewer)
        if value < self.value:
            self._removed_at = signals.now
        self.value = value
        return value

    def _smooth(self, signals: FleetSignals) -> tuple[float, float]:
        """The load now, and where its trend leads."""
        lead = self.targets.lead
        if self._load is None:
            self._load = signals.load
        elif self._history:
            share = 1 - math.exp(-(signals.now - self._history[-1][0]) / SMOOTHING)
            self._load += max(0.0, share) * (signals.load - self._load)
        self._history.append((signals.now, self._load))
        while self._history[0][0] < signals.now - lead:
            self._history.popleft()
        since, before = self._history[0]
        span = signals.now - since
        trend = (self._load - before) / span if span >= lead / 2 else 0.0
        return self._load, self._load + max(0.0, trend) * lead

    def _waits_for_joining(self, signals: FleetSignals) -> bool:
        """Whether replicas join that may soon take a part of the load."""
        if signals.joining > self._num_joining:
            self._joined_at = signals.now
        self._num_joining = signals.joining
        return signals.joining > 0 and signals.now - self._joined_at <= STUCK * self.targets.lead

    def _find_pressure(self, signals: FleetSignals) -> float:
        """The greatest latency over its target; 0.0 without requests."""
        pairs = ((signals.first_token, self.targets.first_token), (signals.inter_token, self.targets.inter_token))
        return max((seconds / target for seconds, target in pairs if target is not None), default=0.0)

    def _learn(self, signals: FleetSignals, pressure: float, each: float, *, is_joining: bool) -> None:
        """Move the limit. `each`: requests of a replica."""
        self._violations = self._violations + 1 if pressure > 1 else 0
        if pressure <= HIGH:
            self._good = each
            if each > UP * self.limit:
                self.limit *= RELAX
        elif self._violations > 1 and not is_joining and signals.now - self._lowered_at > self.targets.lead:
            self.limit = max(1.0, min(self.limit, max(self._good, GOOD_SHARE * each)))
            self._lowered_at = signals.now

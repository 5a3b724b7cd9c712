"""`find_alerts`: what an operator should look at, by rules over the last samples of `LiveHistory`.

Used by the page's data. Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from frame.entrypoints.http.operations.live_history import COLUMNS, INTERVAL

MINUTE = int(60 / INTERVAL)  # samples
MIN_QUEUE = 8  # waiting requests below which a queue is none
KV_PRESSURE = 0.95  # of the KV cache's pages in use
ERROR_SHARE = 0.02  # of requests
MIN_ERRORS = 3


class Alert(NamedTuple):
    """`rule`: a short name that stays the same."""

    rule: str
    level: Literal["warning", "critical"]
    text: str


class Samples:
    """The last samples by column."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def last(self, name: str, count: int) -> np.ndarray:
        """Of the last `count` samples those where the value is known, float64."""
        values = self._rows[-count:, COLUMNS.index(name)]
        known: np.ndarray = values[~np.isnan(values)]
        return known

    def count(self, name: str, count: int) -> float:
        """How often a thing with this rate happened in the last `count` samples."""
        return float(self.last(name, count).sum() * INTERVAL)


def find_alerts(rows: np.ndarray) -> list[Alert]:
    """rows: `LiveHistory.list_rows`, ten minutes of it at least where the server is that old."""
    samples = Samples(rows)
    return [alert for rule in RULES if (alert := rule(samples)) is not None]


def _queue_grows(samples: Samples) -> Alert | None:
    waiting = samples.last("waiting", MINUTE)
    third = len(waiting) // 3
    if third < 2:
        return None
    before, now = waiting[:third].mean(), waiting[-third:].mean()
    if now < MIN_QUEUE or now < 1.5 * before + 1:
        return None
    return Alert("queue", "warning", f"The queue grows: {now:.0f} requests wait, {before:.0f} a minute ago.")


def _kv_is_full(samples: Samples) -> Alert | None:
    used, total = samples.last("used_pages", MINUTE // 2), samples.last("total_pages", MINUTE // 2)
    preempted = samples.count("preempted", MINUTE)
    share = used[-1] / max(total[-1], 1) if len(used) else 0.0
    if preempted >= 0.5:
        return Alert("kv", "critical", f"{preempted:.0f} preemptions in the last minute: the KV cache ({share:.0%} in use) is too small.")
    if len(used) < MINUTE // 2 or not bool((used >= KV_PRESSURE * total).all()):
        return None
    return Alert("kv", "warning", f"{share:.0%} of the KV cache has been in use for half a minute.")


def _has_restarted(samples: Samples) -> Alert | None:
    restarts = int(samples.last("restarts", 10 * MINUTE).sum())
    if not restarts:
        return None
    return Alert("restarts", "critical", f"{restarts} restart{'s' * (restarts > 1)} of a process in the last ten minutes; see the log.")


def _has_errors(samples: Samples) -> Alert | None:
    failed, finished = samples.count("failed", 5 * MINUTE), samples.count("finished", 5 * MINUTE)
    share = failed / max(failed, finished, 1)
    if round(failed) < MIN_ERRORS or share < ERROR_SHARE:
        return None
    return Alert("errors", "critical", f"{failed:.0f} errors in the last five minutes, {share:.1%} of requests.")


def _refuses(samples: Samples) -> Alert | None:
    rejected = samples.count("rejected", MINUTE)
    if rejected < 0.5:
        return None
    return Alert("rejected", "warning", f"{rejected:.0f} requests were refused in the last minute because too many waited.")


RULES: tuple[Callable[[Samples], Alert | None], ...] = (_has_restarted, _has_errors, _kv_is_full, _queue_grows, _refuses)

"""`Measures`: what a simulation counts: latencies, rates, and what its steps spent their time on.
Must not know a scheduler or a workload."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import numpy as np

from frame.core.messages import Finish
from frame.core.scheduling.request import Request
from frame.entrypoints.tools.bench.summary import PERCENTILES, percentiles
from frame.entrypoints.tools.simulate.step_times import CAUSES

_BINS_A_DECADE = 200  # so a percentile is right within 1.2 %
_LOWEST = 1e-6  # seconds
_DECADES = 10


class Gaps:
    """Durations as a histogram with logarithmic bins: a simulated hour has billions of them."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BINS_A_DECADE * _DECADES, np.int64)
        self._sum = 0.0

    def add(self, seconds: np.ndarray, weight: int = 1) -> None:
        """Count durations, each `weight` times."""
        if not len(seconds):
            return
        bins = (np.log10(np.maximum(seconds, _LOWEST) / _LOWEST) * _BINS_A_DECADE).astype(np.int64)
        np.add.at(self._counts, np.minimum(bins, len(self._counts) - 1), weight)
        self._sum += float(seconds.sum()) * weight

    def describe(self) -> dict[str, float]:
        """Mean and percentiles in milliseconds, as `percentiles`."""
        total = np.cumsum(self._counts)
        if not total[-1]:
            return {}
        ranks = np.searchsorted(total, np.array(PERCENTILES) / 100 * total[-1])
        values = _LOWEST * 10 ** ((ranks + 0.5) / _BINS_A_DECADE) * 1e3
        mean = self._sum / int(total[-1]) * 1e3
        return {"mean": round(mean, 3), **{f"p{rank}": round(float(value), 3) for rank, value in zip(PERCENTILES, values, strict=True)}}


class Measures:
    """Filled by all engines of a simulation. `entry`: seconds added to each TTFT."""

    def __init__(self, entry: float) -> None:
        self.gaps = Gaps()
        self.first_tokens, self.arrivals = array("d"), array("d")  # of finished requests
        self._between, self._whole = array("d"), array("d")
        self._entry = entry
        self._causes = np.zeros(len(CAUSES))
        self._refused: Counter[str] = Counter()
        self.output_tokens = self.prompt_tokens = self._cached_tokens = self._preempted = self._steps = 0
        self._busy, self._last = 0.0, 0.0

    def add_steps(self, causes: tuple[float, ...], ends: np.ndarray, start: float, growth: float) -> None:
        """Steps that begin at `start`. `causes`: seconds of the first one; each further one reads
        `growth` seconds more of the KV cache."""
        count = len(ends)
        seconds = np.array(causes) * count
        seconds[CAUSES.index("reading the KV cache")] += growth * count * (count - 1) / 2
        self._causes += seconds
        self._busy += float(ends[-1]) - start
        self._steps += count
        self._last = max(self._last, float(ends[-1]))

    def refuse(self, reason: str) -> None:
        """A request is refused."""
        self._refused[reason] += 1

    def finish(self, request: Request, finish: Finish, now: float) -> None:
        """A request ends."""
        if finish.reason != "length":
            self._refused[finish.error or finish.reason] += 1
            return
        self.arrivals.append(request.arrival)
        self.first_tokens.append(request.first_token_at - request.arrival + self._entry)
        self._whole.append(now - request.arrival + self._entry)
        if request.output_len > 1:
            self._between.append((now - request.first_token_at) / (request.output_len - 1))
        self.output_tokens += request.output_len
        self.prompt_tokens += request.prompt_len
        self._cached_tokens += max(0, request.num_cached_tokens)
        self._preempted += request.num_preemptions

    def describe(self, replicas: float) -> dict[str, Any]:
        """A row of a report. `replicas`: mean number of those that there were."""
        seconds = max(self._last, 1e-9)
        busy = max(float(self._causes.sum()), 1e-12)
        parts = {cause: round(float(part / busy), 4) for cause, part in zip(CAUSES, self._causes, strict=True)}
        return {
            "requests": len(self.first_tokens) + sum(self._refused.values()),
            "failed": sum(self._refused.values()),
            "errors": [reason for reason, _ in self._refused.most_common(5)],
            "seconds": round(seconds, 3),
            "requests_per_s": round(len(self.first_tokens) / seconds, 3),
            "output_tokens_per_s": round(self.output_tokens / seconds, 1),
            "prompt_tokens_per_s": round(self.prompt_tokens / seconds, 1),
            "output_tokens": self.output_tokens,
            "first_token_ms": percentiles(self.first_tokens),
            "between_tokens_ms": percentiles(self._between),
            "between_events_ms": self.gaps.describe(),
            "end_to_end_ms": percentiles(self._whole),
            "hit_rate": round(self._cached_tokens / max(1, self.prompt_tokens), 4),
            "preempted": self._preempted,
            "steps": self._steps,
            "busy": round(self._busy / seconds / max(replicas, 1e-9), 4),
            "time_of": parts,
            "bound": max(parts, key=lambda cause: parts[cause]),
        }

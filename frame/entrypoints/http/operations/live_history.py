"""`LiveHistory`: an hour of samples of the server's load in arrays of a fixed size, for the page;
`StepLatencies`: the latencies between two samples.

A sample is taken every few seconds from counters that exist anyway. Must not know HTTP or a format.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.replicas import ReplicaClient, list_clients
from frame.interfaces.stats import RequestRecord, StatLogger, StepRecord

INTERVAL = 5.0  # seconds between two samples
CAPACITY = 720  # samples: an hour
WINDOW = 12  # samples of which `summarize_latencies` tells: a minute
QUANTILES = (0.5, 0.9, 0.99)
MAX_KEPT = 256  # latencies that are not counted yet, besides those of one step
BOUNDS = np.geomspace(1e-4, 1e3, 169)  # seconds; bins of 10 %

GAUGES = ("running", "waiting", "used_pages", "evictable_pages", "total_pages")
# Per second
RATES = ("generated", "prompt", "cached", "finished", "failed", "rejected", "preempted")
# `acceptance`: accepted over drafted tokens; `imbalance`: of experts, the mean over layers;
# `restarts`: since the sample before
COLUMNS = (
    "time", *GAUGES, *RATES, "ttft_p50", "ttft_p90", "ttft_p99", "itl_p50", "itl_p90", "itl_p99", "acceptance", "imbalance", "restarts",
)  # fmt: skip


class StepLatencies(StatLogger):
    """Counts the latencies of steps by bins of `BOUNDS`: to the first token, and between tokens."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._inter: list[float] = []
        self._counts = np.zeros((2, len(BOUNDS) + 1), np.int64)

    def record_step(self, step: StepRecord) -> None:
        self._inter += step.inter_token_latencies
        self._first += step.first_token_latencies
        if len(self._inter) >= MAX_KEPT or len(self._first) >= MAX_KEPT:
            self._count()

    def record_request(self, request: RequestRecord) -> None:
        pass

    def take_counts(self) -> np.ndarray:
        """The counts since the last call, int64 [2, bins]."""
        self._count()
        counts, self._counts = self._counts, np.zeros_like(self._counts)
        return counts

    def _count(self) -> None:
        for counts, values in zip(self._counts, (self._first, self._inter), strict=True):
            if values:
                counts += np.bincount(np.searchsorted(BOUNDS, values), minlength=len(counts))
                values.clear()


def find_quantiles(counts: np.ndarray) -> list[float]:
    """`QUANTILES` of counts by bin, in seconds, within 5 %; NaN without values."""
    totals = np.cumsum(counts)
    if not totals[-1]:
        return [float("nan")] * len(QUANTILES)
    bins = np.searchsorted(totals, np.array(QUANTILES) * totals[-1])
    lower, upper = BOUNDS[np.maximum(bins - 1, 0)], BOUNDS[np.minimum(bins, len(BOUNDS) - 1)]
    return [float(value) for value in np.sqrt(lower * upper)]


class LiveHistory:
    """Samples of `client`. `count_failures`: HTTP responses with a status of 500 or more, since the
    start."""

    def __init__(self, client: EngineClient | ReplicaClient, count_failures: Callable[[], int]) -> None:
        self.latencies = StepLatencies()
        self.num_samples = 0  # since the start
        self._client = client
        self._count_failures = count_failures
        self._rows = np.full((CAPACITY, len(COLUMNS)), np.nan)
        self._recent: deque[np.ndarray] = deque(maxlen=WINDOW)  # counts of latencies
        self._before: tuple[float, np.ndarray] | None = None

    def take_sample(self, now: float) -> None:
        """Add a sample. `now`: seconds, monotonic."""
        totals = self._read_totals()
        seconds, change = 0.0, np.zeros_like(totals)
        if self._before is not None:  # an engine that was started again counts from 0
            seconds, change = max(now - self._before[0], 1e-3), np.maximum(totals - self._before[1], 0)
        self._before = now, totals
        counts = self.latencies.take_counts()
        self._recent.append(counts)
        rates, (failures, drafted, accepted, restarts) = change[: len(RATES)] / (seconds or 1.0), change[len(RATES) :]
        failed = RATES.index("failed")  # an error ends a sequence, or a response before there is one, or both
        rates[failed] = max(rates[failed], failures / (seconds or 1.0))
        load = self._client.load
        gauges = [float("nan") if load is None else getattr(load, name) for name in GAUGES]
        speculation = accepted / drafted if drafted else float("nan")
        latencies = chain.from_iterable(find_quantiles(each) for each in counts)
        self._rows[self.num_samples % CAPACITY] = [now, *gauges, *rates, *latencies, speculation, self._measure_imbalance(), restarts]
        self.num_samples += 1

    def list_rows(self, count: int = CAPACITY) -> np.ndarray:
        """The last `count` samples, oldest first, float64 [n, columns]; NaN: not known."""
        order = np.arange(max(self.num_samples - min(count, CAPACITY), 0), self.num_samples) % CAPACITY
        return self._rows[order]

    def summarize_latencies(self) -> dict[str, Sequence[float]]:
        """`QUANTILES` of the last minute's latencies in seconds, and their number."""
        counts = np.sum(self._recent, axis=0) if self._recent else np.zeros((2, len(BOUNDS) + 1), np.int64)
        return {name: [*find_quantiles(each), int(each.sum())] for name, each in zip(("ttft", "itl"), counts, strict=True)}

    def _read_totals(self) -> np.ndarray:
        """Counters in the order of `RATES`, then responses that failed, drafted and accepted
        tokens, and restarts."""
        stats, load = self._client.stats, self._client.load
        preempted, drafted, accepted = (0, 0, 0) if load is None else (load.preempted, load.drafted_tokens, load.accepted_tokens)
        tokens = (stats.generated_tokens, stats.prompt_tokens, stats.cached_tokens)
        ends = (sum(stats.finished.values()), stats.finished.get("error", 0), stats.rejected)
        further = (self._count_failures(), drafted, accepted, sum(stats.restarts.values()))
        return np.array([*tokens, *ends, preempted, *further], np.float64)

    def _measure_imbalance(self) -> float:
        """Of the worst replica."""
        clients = list_clients(self._client)
        layers = [each.load.expert_imbalance for each in clients if each.load is not None and each.load.expert_imbalance]
        return max((float(np.mean(each)) for each in layers), default=float("nan"))

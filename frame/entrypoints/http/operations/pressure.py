"""`Pressure`: how much room a server has left: seconds of queued work, token rate against the
highest that was measured, KV cache against what requests need, and its inter-token latency.

Measured by `ServerMetrics`; shown by the metrics. `/health` tells the routers of its fleet the
latency.
Must not know a format or a request.
"""

from __future__ import annotations

import time

from frame.entrypoints.engine_client.client import EngineClient
from frame.entrypoints.engine_client.replicas import ReplicaClient
from frame.entrypoints.handoff import LOAD

SETTLED = 3  # measurements with work, before which a rate is no ceiling


class Pressure:
    """`ceiling`: tokens/s, computed prompt tokens and generated ones, of the best measurement so
    far; 0.0: too few had work."""

    def __init__(self, client: EngineClient | ReplicaClient, page_size: int) -> None:
        self._client, self._page_size = client, page_size
        self._before = (time.monotonic(), 0, 0.0, 0)  # when, tokens, seconds and number of gaps between tokens until then
        self._num_measured = 0
        self._rate, self._best, self.inter_token = 0.0, 0.0, 0.0

    @property
    def ceiling(self) -> float:
        return self._best if self._num_measured >= SETTLED else 0.0

    @property
    def rate_ratio(self) -> float:
        """Tokens/s lately over the ceiling."""
        return self._rate / self.ceiling if self.ceiling else 0.0

    def measure(self) -> None:
        """Measure rate and inter-token latency since the last call."""
        stats, (since, done, seconds, count) = self._client.stats, self._before
        tokens = stats.computed_tokens + stats.generated_tokens
        now = time.monotonic()
        self._before = (now, tokens, stats.gap_seconds, stats.num_gaps)
        self._rate = (tokens - done) / max(now - since, 1e-3)
        self._best, self._num_measured = max(self._best, self._rate), self._num_measured + (self._rate > 0)
        gaps = stats.num_gaps - count
        self.inter_token = (stats.gap_seconds - seconds) / gaps if gaps else 0.0

    def count_queued_seconds(self) -> float:
        """Seconds that the prompts without a first token take at the ceiling; 0.0 without one."""
        return self._client.stats.count_queued_tokens() / self.ceiling if self.ceiling else 0.0

    def find_kv_pressure(self) -> float:
        """Pages that running requests hold, and that waiting prompts need, over all pages. Above 1,
        requests wait for others to end."""
        load = self._client.load
        if load is None or not load.total_pages:
            return 0.0
        waiting = self._client.stats.count_queued_tokens() / self._page_size if load.waiting else 0.0
        return (load.used_pages + waiting) / load.total_pages

    def describe(self) -> tuple[tuple[bytes, bytes], ...]:
        """Headers of /health for the routers of the fleet. Everyone reads them, so they hold
        nothing that a client could not measure."""
        return ((LOAD, f"{self.inter_token:.6g}".encode()),)

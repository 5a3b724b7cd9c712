"""`/metrics` in Prometheus' text format, prefix `frame:`. Latencies are kept as lists while tokens flow and counted into buckets when
somebody reads (or a list grows long), so that a token costs one append.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from frame.entrypoints.http.services import Services

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
INTER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
END_TO_END = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
GAUGES = (
    ("num_running_reqs", "running", "Requests on the device."),
    ("num_queue_reqs", "waiting", "Requests that wait for a place."),
    ("kv_used_pages", "used_pages", "Pages of the KV cache that running requests hold."),
    ("kv_evictable_pages", "evictable_pages", "Pages of cached prefixes that nobody uses now."),
    ("kv_total_pages", "total_pages", "Pages of the KV cache."),
)


class Histogram:
    """Bucket counts of values in seconds."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:  # noqa: A002 - Prometheus' word
        self._name = name
        self._help = help
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def take(self, values: list[float]) -> None:
        """Count and empty the list."""
        if values:
            array = np.array(values)
            values.clear()
            self._counts += np.bincount(np.searchsorted(self._bounds, array), minlength=len(self._counts))
            self._sum += float(array.sum())

    def metric(self, labels: list[str]) -> Metric:
        """As Prometheus' cumulative buckets."""
        totals = np.cumsum(self._counts).tolist()
        bounds = [*map(str, self._bounds.tolist()), "+Inf"]
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        family.add_metric(labels, list(zip(bounds, totals, strict=True)), self._sum)
        return family


class ServerMetrics(Collector):
    """Everything of one server; `collect` is called by the exposition."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._labels = [services.resolved.served_name]
        self._histograms = {
            "first_token": Histogram("frame:time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN),
            "inter_token": Histogram("frame:inter_token_latency_seconds", "Between two tokens of a request.", INTER_TOKEN),
            "end_to_end": Histogram("frame:e2e_request_latency_seconds", "From a request's arrival to its end.", END_TO_END),
        }

    def fold(self) -> None:
        """Count what was measured since the last call."""
        for name, histogram in self._histograms.items():
            histogram.take(getattr(self._services.client.stats, name))

    def collect(self) -> Iterator[Metric]:
        self.fold()
        stats, load = self._services.client.stats, self._services.client.load
        for histogram in self._histograms.values():
            yield histogram.metric(self._labels)
        for name, value, text in (
            ("prompt_tokens", stats.prompt_tokens, "Prompt tokens of requests that were taken."),
            ("generation_tokens", stats.generated_tokens, "Tokens that were sent."),
            ("cached_tokens", stats.cached_tokens, "Prompt tokens that came from the prefix cache."),
            ("num_rejected_requests", stats.rejected, "Requests that were refused because too many waited."),
        ):
            yield _counter(name, text, value, self._labels)
        finished = CounterMetricFamily("frame:num_finished_requests", "Requests that ended, by reason.", labels=["model_name", "reason"])
        for reason, count in stats.finished.items():
            finished.add_metric([*self._labels, reason], count)
        yield finished
        outstanding = self._services.client.num_outstanding
        yield _gauge("num_outstanding_reqs", "Requests that this server has taken and not finished.", outstanding, self._labels)
        if load is None:
            return
        for name, source, text in GAUGES:
            yield _gauge(name, text, getattr(load, source), self._labels)
        yield _gauge("token_usage", "Share of the KV cache that is in use.", load.used_pages / max(1, load.total_pages), self._labels)
        hits = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
        yield _gauge("cache_hit_rate", "Share of all prompt tokens that came from the prefix cache.", hits, self._labels)
        yield _counter("num_retracted_requests", "Times that a request left the device for want of memory.", load.retracted, self._labels)
        yield _counter("engine_steps", "Steps of the engine.", load.step, self._labels)


def exposition(metrics: ServerMetrics) -> bytes:
    """The text that a scrape gets."""
    registry = CollectorRegistry(auto_describe=False)  # of its own, so that two servers in one process do not meet
    registry.register(metrics)
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float, labels: list[str]) -> Metric:
    family = GaugeMetricFamily(f"frame:{name}", text, labels=["model_name"])
    family.add_metric(labels, value)
    return family


def _counter(name: str, text: str, value: float, labels: list[str]) -> Metric:
    family = CounterMetricFamily(f"frame:{name}", text, labels=["model_name"])
    family.add_metric(labels, value)
    return family

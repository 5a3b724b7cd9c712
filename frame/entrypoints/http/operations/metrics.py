"""`/metrics` in Prometheus' text format, prefix `frame_`. Latencies are kept as lists while tokens
flow and counted into buckets when somebody reads (or a list grows long), so that a token costs one
append. Other servers' names are `metric_aliases`'.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from frame.entrypoints.http.operations.metric_aliases import aliases_of
from frame.entrypoints.logs import configured_writer
from frame.entrypoints.version import package_version

if TYPE_CHECKING:
    from frame.core.config.resolved import Resolved
    from frame.entrypoints.engine_client.client import EngineClient
    from frame.entrypoints.processes.resource_monitor import ResourceMonitor

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
INTER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
END_TO_END = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
RATE_WINDOW = 1.0  # seconds; the shortest over which tokens per second are counted

# list of `ClientStats` -> (name, meaning, bounds)
HISTOGRAMS: Mapping[str, tuple[str, str, tuple[float, ...]]] = MappingProxyType(
    {
        "first_token": ("time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN),
        "inter_token": ("inter_token_latency_seconds", "Between two tokens of a request.", INTER_TOKEN),
        "end_to_end": ("e2e_request_latency_seconds", "From a request's arrival to its end.", END_TO_END),
        "queue": ("request_queue_time_seconds", "From the engine's receiving a request to its place on the device.", FIRST_TOKEN),
        "prefill": ("request_prefill_time_seconds", "From a request's place on the device to its first token.", FIRST_TOKEN),
        "decode": ("request_decode_time_seconds", "From a request's first token to its end.", END_TO_END),
        "inference": ("request_inference_time_seconds", "From a request's place on the device to its end.", END_TO_END),
        "per_output_token": ("request_time_per_output_token_seconds", "A request's mean time between two tokens.", INTER_TOKEN),
        "prompt_sizes": ("request_prompt_tokens", "Prompt tokens of requests that ended.", TOKENS),
        "output_sizes": ("request_generation_tokens", "Generated tokens of requests that ended.", TOKENS),
        "output_limits": ("request_max_tokens", "Tokens that requests that ended were allowed (max_tokens).", TOKENS),
    }
)
# name, field of `Heartbeat`, meaning
GAUGES = (
    ("requests_running", "running", "Requests on the device."),
    ("requests_waiting", "waiting", "Requests that wait for a place on the device."),
    ("kv_pages_used", "used_pages", "Pages of the KV cache that running requests hold."),
    ("kv_pages_evictable", "evictable_pages", "Pages of cached prefixes that no running request uses."),
    ("kv_pages", "total_pages", "Pages of the KV cache."),
)
# name, field of `ClientStats`, meaning
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of requests that were taken."),
    ("generation_tokens", "generated_tokens", "Tokens that were sent."),
    ("cached_tokens", "cached_tokens", "Prompt tokens that came from the prefix cache."),
    ("requests_rejected", "rejected", "Requests that were refused because too many waited."),
    ("requests_recovered", "recovered", "Times that a request went on in a restarted engine."),
)
# name, field of `Usage`, meaning
HELD = (
    ("process_memory_bytes", "memory", "Memory that a process holds, without mapped files."),
    ("process_threads", "threads", "Threads of a process."),
    ("process_open_files", "files", "Files and sockets that a process has open."),
    ("process_device_memory_bytes", "device_memory", "Device memory that a process holds."),
)
REASONS = ("stop", "length", "abort", "error")


class Histogram:
    """Bucket counts of values."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:  # noqa: A002 - Prometheus' word
        self._name = name
        self._help = help
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0

    def take(self, values: list[float]) -> None:
        """Count and empty the list."""
        if values:
            array = np.array(values, np.float64)
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


class Throughput:
    """Tokens per second over the time between two looks."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._count = 0
        self._since = time.monotonic()

    def look(self, count: int) -> None:
        now = time.monotonic()
        if now - self._since >= RATE_WINDOW:
            self.rate = (count - self._count) / (now - self._since)
            self._count, self._since = count, now


class MetricSources(Protocol):
    """What metrics are read from, which `Services` has."""

    resolved: Resolved
    client: EngineClient
    info: dict[str, Any]
    watch: ResourceMonitor | None


class ServerMetrics(Collector):
    """Everything of one server; `collect` is called by the exposition."""

    def __init__(self, services: MetricSources) -> None:
        self._services = services
        self._labels = [services.resolved.served_name]
        self._histograms = {source: Histogram(f"frame_{name}", text, bounds) for source, (name, text, bounds) in HISTOGRAMS.items()}
        self._throughput = Throughput()
        self._responses: dict[tuple[str, int], int] = {}  # bounded by routes times statuses
        self._families = services.resolved.user.server.metrics_aliases

    def fold(self) -> None:
        """Count what was measured since the last call."""
        stats = self._services.client.stats
        for source, histogram in self._histograms.items():
            histogram.take(getattr(stats, source))
        self._throughput.look(stats.generated_tokens)

    def count_response(self, route: str, status: int) -> None:
        """A response went out; `route` is a path of the table of routes."""
        key = (route, status)
        self._responses[key] = self._responses.get(key, 0) + 1

    def collect(self) -> Iterator[Metric]:
        for metric in self._own():
            yield metric
            yield from aliases_of(metric, self._families)

    def _own(self) -> Iterator[Metric]:
        self.fold()
        client, labels = self._services.client, self._labels
        for histogram in self._histograms.values():
            yield histogram.metric(labels)
        for name, source, text in COUNTERS:
            yield _counter(name, text, getattr(client.stats, source), labels)
        yield self._finished()
        yield self._restarts()
        yield from self._held()
        yield _counter("requests_aborted", "Requests that ended because their client left or somebody stopped them.",
                       client.stats.finished.get("abort", 0), labels)  # fmt: skip
        yield _gauge("requests_outstanding", "Requests that this server has taken and not finished.", client.num_outstanding, labels)
        yield _gauge("generation_tokens_per_second", "Tokens sent per second, lately.", self._throughput.rate, labels)
        writer = configured_writer()
        yield _counter("log_lines_dropped", "Log lines that were dropped because standard error was not read or not writable.",
                       0 if writer is None else writer.num_dropped, labels)  # fmt: skip
        yield self._http_responses()
        yield from self._start()
        yield from self._load()

    def _load(self) -> Iterator[Metric]:
        """What the engine's heartbeat tells."""
        load, labels = self._services.client.load, self._labels
        if load is None:
            return
        for name, source, text in GAUGES:
            yield _gauge(name, text, getattr(load, source), labels)
        page_size = self._services.resolved.page_size
        yield _gauge("kv_tokens_used", "Tokens whose pages of the KV cache running requests hold.", load.used_pages * page_size, labels)
        yield _gauge("kv_tokens", "Tokens that the KV cache has room for.", load.total_pages * page_size, labels)
        names = ["model_name", "page_size", "pages"]
        info = GaugeMetricFamily("frame_kv_cache_info", "1; the KV cache's pages and their size.", labels=names)
        info.add_metric([*labels, str(page_size), str(load.total_pages)], 1)
        yield info
        used = load.used_pages / max(1, load.total_pages)
        yield _gauge("kv_usage_ratio", "Share of the KV cache that running requests hold.", used, labels)
        hits = load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
        yield _gauge("prefix_cache_hit_ratio", "Share of all prompt tokens that came from the prefix cache.", hits, labels)
        yield _counter("preemptions", "Times that a request left the device for lack of memory.", load.preempted, labels)
        yield _counter("jumped_tokens", "Output tokens that a grammar forced and no step had to draw.", load.jumped_tokens, labels)
        yield _counter("engine_steps", "Steps of the engine.", load.step, labels)

    def _finished(self) -> Metric:
        finished = self._services.client.stats.finished
        family = CounterMetricFamily("frame_requests_finished", "Requests that ended, by reason.", labels=["model_name", "reason"])
        for reason in dict.fromkeys((*REASONS, *finished)):
            family.add_metric([*self._labels, reason], finished.get(reason, 0))
        return family

    def _restarts(self) -> Metric:
        restarts = self._services.client.stats.restarts
        family = CounterMetricFamily("frame_engine_restarts", "Restarts of processes.", labels=["model_name", "process"])
        for process in dict.fromkeys(("engine", *restarts)):
            family.add_metric([*self._labels, process], restarts.get(process, 0))
        return family

    def _held(self) -> Iterator[Metric]:
        """What each process holds, as of the last look at it."""
        watch = self._services.watch
        if watch is None:
            return
        for name, source, text in HELD:
            family = GaugeMetricFamily(f"frame_{name}", text, labels=["model_name", "process"])
            for process, usage in watch.usage.items():
                if amount := getattr(usage, source):  # only the engine holds device memory
                    family.add_metric([*self._labels, process], amount)
            yield family

    def _http_responses(self) -> Metric:
        family = CounterMetricFamily("frame_http_responses", "Responses, by route and status.", labels=["model_name", "route", "status"])
        for (route, status), count in self._responses.items():
            family.add_metric([*self._labels, route, str(status)], count)
        return family

    def _start(self) -> Iterator[Metric]:
        names = ["model_name", "version", "architecture", "device", "dtype"]
        info = GaugeMetricFamily("frame_server_info", "1; what runs here.", labels=names)
        resolved = self._services.resolved
        info.add_metric([*self._labels, package_version(), resolved.model.architecture, resolved.device, resolved.dtype], 1)
        yield info
        family = GaugeMetricFamily("frame_start_seconds", "Seconds of the engine's start, by phase.", labels=["model_name", "phase"])
        for phase, seconds in (self._services.info.get("phases") or {}).items():
            family.add_metric([*self._labels, phase], seconds)
        yield family
        kernels = self._services.info.get("kernels")
        if kernels:
            family = GaugeMetricFamily(
                "frame_start_kernels", "Kernels that the engine's start compiled, or found compiled.", labels=["model_name", "source"]
            )
            family.add_metric([*self._labels, "compiled"], kernels["compiled"])
            family.add_metric([*self._labels, "cache"], kernels["loaded"])
            yield family


def exposition(metrics: ServerMetrics) -> bytes:
    """The text that a scrape gets; the main process's memory, processor time and descriptors
    too."""
    registry = CollectorRegistry(auto_describe=False)  # of its own, so that two servers in one process do not meet
    registry.register(metrics)
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def _gauge(name: str, text: str, value: float, labels: list[str]) -> Metric:
    family = GaugeMetricFamily(f"frame_{name}", text, labels=["model_name"])
    family.add_metric(labels, value)
    return family


def _counter(name: str, text: str, value: float, labels: list[str]) -> Metric:
    family = CounterMetricFamily(f"frame_{name}", text, labels=["model_name"])
    family.add_metric(labels, value)
    return family

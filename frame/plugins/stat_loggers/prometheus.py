"""`prometheus`: the text of `GET /metrics` in Prometheus' format, prefix `frame_`.

Times and sizes are kept as lists and counted into the buckets of histograms when a list grows long
or the text is read. The names of other servers are in `prometheus_aliases`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from pydantic import BaseModel

from frame.interfaces.stats import Metric, RenderedMetrics, RequestRecord, StatLogger, StatLoggerContext, StepRecord
from frame.plugins.stat_loggers.prometheus_aliases import aliases_of

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
INTER_TOKEN = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
END_TO_END = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = tuple(float(base * 10**power) for power in range(6) for base in (1, 2, 5))
COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
MAX_KEPT = 256  # values of a list that are not yet counted, besides those of one step

# key of `Prometheus._values` -> (name, meaning, bounds)
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
        "computed_sizes": ("request_computed_prompt_tokens", "Prompt tokens that did not come from the prefix cache.", TOKENS),
        "counts": ("request_n", "Sequences that the request of a sequence that ended asked for (n).", COUNTS),
        "step_sizes": ("step_tokens", "Tokens of a step: of prompts that are complete, and generated ones.", TOKENS),
    }
)


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

    def metric(self, labels: list[str]) -> Family:
        """As Prometheus' cumulative buckets."""
        totals = np.cumsum(self._counts).tolist()
        bounds = [*map(str, self._bounds.tolist()), "+Inf"]
        family = HistogramMetricFamily(self._name, self._help, labels=["model_name"])
        family.add_metric(labels, list(zip(bounds, totals, strict=True)), self._sum)
        return family


class Prometheus(StatLogger, Collector):
    """Histograms from the records, and the counters and gauges of the context."""

    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        self._context = context
        self._labels = [context.model]
        self._histograms = {key: Histogram(f"frame_{name}", text, bounds) for key, (name, text, bounds) in HISTOGRAMS.items()}
        self._values: dict[str, list[float]] = {key: [] for key in HISTOGRAMS}
        self._inter_token, self._step_sizes = self._values["inter_token"], self._values["step_sizes"]  # most steps have no others

    def record_step(self, step: StepRecord) -> None:
        self._inter_token += step.inter_token_latencies
        self._step_sizes.append(step.prompt_tokens + step.generated_tokens)
        num_kept = max(len(self._inter_token), len(self._step_sizes))
        if step.queue_times or step.first_token_latencies:
            values = self._values
            values["first_token"] += step.first_token_latencies
            values["queue"] += step.queue_times
            values["prefill"] += step.prefill_times
            num_kept = max(num_kept, len(values["first_token"]), len(values["queue"]))
        if num_kept >= MAX_KEPT:
            self._count()

    def record_request(self, request: RequestRecord) -> None:
        if request.is_abandoned:  # its times say when the client left
            return
        values = self._values
        values["end_to_end"].append(request.end_to_end)
        values["prompt_sizes"].append(request.prompt_tokens)
        values["output_sizes"].append(request.output_tokens)
        values["computed_sizes"].append(request.prompt_tokens - request.cached_tokens)
        values["counts"].append(request.n)
        if request.max_tokens is not None:
            values["output_limits"].append(request.max_tokens)
        if request.time_to_first_token is not None:
            decode = request.end_to_end - request.time_to_first_token
            values["decode"].append(decode)
            values["inference"].append(request.inference_time or 0.0)
            if request.output_tokens > 1:
                values["per_output_token"].append(decode / (request.output_tokens - 1))
        if len(values["end_to_end"]) >= MAX_KEPT:
            self._count()

    def render_metrics(self) -> RenderedMetrics:
        registry = CollectorRegistry(auto_describe=False)  # of its own, so that two servers in one process do not meet
        registry.register(self)
        ProcessCollector(registry=registry)  # memory, processor time and descriptors of the main process
        return RenderedMetrics(CONTENT_TYPE_LATEST, generate_latest(registry))

    def collect(self) -> Iterator[Family]:
        """All metrics, each with its aliases; called by `generate_latest`."""
        for family in self._make_families():
            yield family
            yield from aliases_of(family, self._context.metrics_aliases)

    def _make_families(self) -> Iterator[Family]:
        self._count()
        for histogram in self._histograms.values():
            yield histogram.metric(self._labels)
        for metric in self._context.read_metrics():
            yield self._make_family(metric)

    def _make_family(self, metric: Metric) -> Family:
        make = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
        family = make(f"frame_{metric.name}", metric.text, labels=["model_name", *metric.labels])
        for labels, value in metric.samples:
            family.add_metric([*self._labels, *labels], value)
        return family

    def _count(self) -> None:
        for key, histogram in self._histograms.items():
            histogram.take(self._values[key])

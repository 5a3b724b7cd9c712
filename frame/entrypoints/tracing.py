"""Traces of requests: each process makes the spans of its own work, and gives them to its tracer, a
plugin.

Messages carry the trace context as a W3C `traceparent` (`logs.TRACE`, `Generate.trace`). Spans are
created when a request ends, from recorded times, so a token costs nothing. Without tracing no
tracer is imported. Must not know a route or a tracer by name.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frame.core.errors import ConfigurationError
from frame.entrypoints.logs import TRACE
from frame.host.installation import install_command, is_installed
from frame.interfaces.tracing import TracerContext

if TYPE_CHECKING:
    from frame.config.resolved import Resolved
    from frame.config.server_sections import ServerSection
    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.messages import Finish, StartDetokenize, StepText, Tokenize
    from frame.core.scheduling.request import Request
    from frame.entrypoints.engine_client.response_state import RequestState
    from frame.interfaces.tracing import Span, Tracer
    from frame.parallel.rank_channels import Traced
    from frame.plugins.registry import Registry

log = logging.getLogger(__name__)

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MAX_REQUESTS = 65536  # traced at once in a text process or follower


def check_tracing(server: ServerSection) -> None:
    """Raise ConfigurationError for `server.otlp_endpoint` without OpenTelemetry."""
    if server.otlp_endpoint is not None and server.tracer is None and not _is_installed():
        raise ConfigurationError(f"server.otlp_endpoint needs OpenTelemetry; run {install_command('frame-serve[tracing]')}")


def _is_installed() -> bool:
    return all(map(is_installed, ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")))


def open_tracing(resolved: Resolved, load_registry: Callable[[], Registry], process: str) -> Tracing | None:
    """The tracing of a process; None unless the configuration names a tracer or a collector, or an
    OpenTelemetry variable names a collector. `load_registry` is called only where there is tracing.
    Raises ConfigurationError."""
    server, chosen = resolved.user.server, resolved.plugins.get("tracer", ())
    from_environment = any(os.environ.get(name) for name in VARIABLES)
    if not chosen and server.otlp_endpoint is None and not from_environment:
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    context, registry = TracerContext(process, server.otlp_endpoint), load_registry()
    if chosen:
        return Tracing(registry.create(chosen[0], context))
    check_tracing(server)
    usable = [record for record in registry.records("tracer") if not record.problems and record.rank >= 0]
    if not usable:
        log.warning("%s is set, but OpenTelemetry is not installed; run %s", VARIABLES[1], install_command("frame-serve[tracing]"))
        return None
    return Tracing(registry.load(usable[0])(context, registry.options(usable[0], {})))


class Tracing:
    """Makes the spans of one process. Times are of `time.perf_counter`."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._lag = time.perf_counter() - time.monotonic()

    def start(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> RequestSpan:
        """Start the span of a request, a child of the span in its headers; sets `TRACE`."""
        span = RequestSpan(self, self._tracer.start_span(name, headers))
        TRACE.set(span.traceparent)
        return span

    def add(self, name: str, trace: str, start: float, end: float, **attributes: Any) -> None:
        """Add a finished span as a child of `trace`. Values of attributes must not be None."""
        if trace:
            self._tracer.add_span(name, trace, start, end, attributes)

    def add_engine_spans(self, request: Request, finish: Finish) -> None:
        """Add the queue, prefill and decode spans of a request that has just ended."""
        if not request.trace:
            return
        now = time.perf_counter()
        admitted, first = (self._lag + moment if moment else now for moment in (request.admitted_at, request.first_token_at))
        names: dict[str, Any] = {"frame.rid": request.rid}
        self.add("queue", request.trace, request.arrival + self._lag, admitted, **names)
        if request.admitted_at:
            counts = {"frame.prompt_tokens": request.prompt_len, "frame.cached_tokens": max(0, request.num_cached_tokens)}
            self.add("prefill", request.trace, admitted, first, **names, **counts)
        if request.first_token_at:
            outcome = {"frame.output_tokens": request.output_len, "frame.finish_reason": finish.reason}
            self.add("decode", request.trace, first, now, **names, **outcome, **{"frame.preemptions": request.num_preemptions})

    def close(self) -> None:
        """Send the remaining spans, within two seconds."""
        self._tracer.close()


class RequestSpan:
    """The server's span of one request."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self.traceparent = span.traceparent
        self._tracing = tracing
        self._span = span

    def end(self, attributes: Mapping[str, Any], request: RequestState | None = None, error: str | None = None) -> None:
        """End the span. `request`: the state of the generation, if there was one."""
        if request is not None:
            self._tracing.add("tokenize", self.traceparent, request.created, request.submitted)
            attributes = {**attributes, **_usage(request)}
        self._span.end(attributes, error)


class TextSpans:
    """The spans of the detokenizer: one per request, from its StartDetokenize to its last text."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._started: dict[str, tuple[str, float]] = {}

    def start_request(self, message: StartDetokenize) -> None:
        if message.trace and len(self._started) < MAX_REQUESTS:
            self._started[message.rid] = (message.trace, time.perf_counter())

    def end_requests(self, text: StepText) -> None:
        for rid in (text.rids[place] for place in text.finishes):
            trace, since = self._started.pop(rid, ("", 0.0))
            self._tracing.add("detokenize", trace, since, time.perf_counter(), **{"frame.rid": rid})


@dataclass(slots=True)
class RankWork:
    """The work of a rank for one request."""

    begun: float  # time of its first step
    steps: int = 0
    has_sampled: bool = False  # its first token was sampled
    decode_start: float = 0.0  # time of its first decode step; 0.0: not yet


class RankSpans:
    """The spans of a follower rank: prefill and decode of each traced request, from the launches of
    its steps to the request's end."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._works: dict[str, RankWork] = {}  # by rid
        self._slots: dict[int, RankWork] = {}  # of the requests on the device

    def on_launch(self, batch: ScheduledBatch) -> None:
        """Record the requests of a step."""
        now = time.perf_counter()
        for slot in batch.released:
            self._slots.pop(slot, None)
        for setup in batch.setups:
            self._slots.pop(setup.slot, None)
            if setup.rid and (setup.rid in self._works or len(self._works) < MAX_REQUESTS):
                self._slots[setup.slot] = self._works.setdefault(setup.rid, RankWork(now))
        if not self._slots:
            return
        for slot, samples in zip(batch.slots.tolist(), batch.samples.tolist(), strict=True):
            work = self._slots.get(slot)
            if work is not None:
                work.steps += 1
                work.decode_start = work.decode_start or (now if work.has_sampled else 0.0)
                work.has_sampled |= samples

    def on_end(self, traced: Traced) -> None:
        """Add the spans of a request that has ended."""
        work = self._works.pop(traced.rid, None)
        if work is None:  # it ended before its first step
            return
        now = time.perf_counter()
        names: dict[str, Any] = {"frame.rid": traced.rid, "frame.steps": work.steps}
        self._tracing.add("prefill", traced.trace, work.begun, work.decode_start or now, **names)
        if work.decode_start:
            self._tracing.add("decode", traced.trace, work.decode_start, now, **names)


def add_tokenizer_span(tracing: Tracing, message: Tokenize, since: float, count: int) -> None:
    """Add the span of a tokenizer process for one text."""
    tracing.add("tokenize.encode", message.trace, since, time.perf_counter(), **{"frame.prompt_tokens": count})


def _usage(request: RequestState) -> dict[str, Any]:
    """Attributes of a response, by OpenTelemetry's conventions for generative AI."""
    firsts = [sequence.times.first for sequence in request.sequences if sequence.times.first]
    usage: dict[str, Any] = {
        "gen_ai.usage.input_tokens": sum(len(first.prompt) for first in request.first_sequences),
        "gen_ai.usage.output_tokens": sum(sequence.num_tokens for sequence in request.sequences),
        "gen_ai.response.finish_reasons": [s.finish.reason for s in request.sequences if s.finish is not None],
        "frame.cached_tokens": sum(sequence.cached for sequence in request.sequences),
        "frame.rid": request.rid,
    }
    if firsts:
        usage["gen_ai.server.time_to_first_token"] = min(firsts) - request.created
    return usage

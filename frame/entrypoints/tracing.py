"""OpenTelemetry traces of requests: each process creates the spans of its own work and sends them
by OTLP over HTTP.

Messages carry the trace context as a W3C `traceparent` (`logs.TRACE`, `Generate.trace`). Spans are
created when a request ends, from recorded times, so a token costs nothing. Without an endpoint
OpenTelemetry is not imported. Must not know a route.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from frame.core.errors import ConfigurationError
from frame.entrypoints.logs import TRACE
from frame.host.installation import install_command, is_installed

if TYPE_CHECKING:
    from frame.config.server_sections import ServerSection
    from frame.core.interfaces.batch import ScheduledBatch
    from frame.core.messages import Finish, StartDetokenize, StepText, Tokenize
    from frame.core.scheduling.request import Request
    from frame.entrypoints.engine_client.response_state import RequestState
    from frame.parallel.rank_channels import Traced

log = logging.getLogger(__name__)

VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
EXPORT_TIMEOUT = 5  # seconds
EXPORT_INTERVAL = 1000  # milliseconds
CLOSE_TIMEOUT = 2.0  # seconds for sending the last spans
MAX_REQUESTS = 65536  # traced at once in a text process or follower


def check_tracing(server: ServerSection) -> None:
    """Raise ConfigurationError for `server.otlp_endpoint` without OpenTelemetry."""
    if server.otlp_endpoint is not None and not _is_installed():
        raise ConfigurationError(f"server.otlp_endpoint needs OpenTelemetry; run {install_command('frame-serve[tracing]')}")


def _is_installed() -> bool:
    return all(map(is_installed, ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")))


def open_tracing(server: ServerSection, process: str) -> Tracing | None:
    """The tracing of a process; None unless `server.otlp_endpoint` or an OpenTelemetry variable
    names a collector. Raises ConfigurationError."""
    from_environment = any(os.environ.get(name) for name in VARIABLES)
    if server.otlp_endpoint is None and not from_environment:
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    check_tracing(server)
    if not _is_installed():
        log.warning("%s is set, but OpenTelemetry is not installed; run %s", VARIABLES[1], install_command("frame-serve[tracing]"))
        return None
    return Tracing(_exporter(server.otlp_endpoint), process)


def _exporter(endpoint: str | None) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint is None:
        return OTLPSpanExporter(timeout=EXPORT_TIMEOUT)
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigurationError(f"server.otlp_endpoint is {endpoint!r}; give a URL, such as http://localhost:4318")
    has_path = endpoint.split("://", 1)[1].rstrip("/").count("/") > 0
    return OTLPSpanExporter(endpoint=endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT)


class Tracing:
    """Creates the spans of one process. Times are of `time.perf_counter`."""

    def __init__(self, exporter: Any, process: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "frame"}
        self._provider = TracerProvider(resource=Resource.create({**name, "frame.process": process}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL))
        self._tracer = self._provider.get_tracer("frame")
        self._propagator = TraceContextTextMapPropagator()
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._lag = time.perf_counter() - time.monotonic()
        self._server_kind = SpanKind.SERVER

    def start(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> RequestSpan:
        """Start the span of a request, a child of the span in its headers; sets `TRACE`."""
        names = (b"traceparent", b"tracestate")
        carrier = {key.decode(): value.decode("latin-1") for key, value in headers if key in names}
        span = RequestSpan(self, self._tracer.start_span(name, self._propagator.extract(carrier), kind=self._server_kind))
        TRACE.set(span.traceparent)
        return span

    def add(self, name: str, trace: str, start: float, end: float, **attributes: Any) -> None:
        """Add a finished span as a child of `trace`. Values of attributes must not be None."""
        if not trace:
            return
        context = self._propagator.extract({"traceparent": trace})
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=self._nanoseconds(start))
        span.end(self._nanoseconds(max(start, end)))

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
        """Send the remaining spans, within `CLOSE_TIMEOUT`."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT)

    def _nanoseconds(self, moment: float) -> int:
        return self._epoch + int(moment * 1e9)


class RequestSpan:
    """The server's span of one request."""

    def __init__(self, tracing: Tracing, span: Any) -> None:
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        self._tracing = tracing
        self._span = span

    def end(self, attributes: Mapping[str, Any], request: RequestState | None = None, error: str | None = None) -> None:
        """End the span. `request`: the state of the generation, if there was one."""
        from opentelemetry.trace import StatusCode

        span = self._span
        span.set_attributes(attributes)
        if request is not None:
            self._tracing.add("tokenize", self.traceparent, request.created, request.submitted)
            span.set_attributes(_usage(request))
        if error is not None:
            span.set_status(StatusCode.ERROR, error)
        span.end()


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

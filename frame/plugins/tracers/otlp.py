"""`OtlpTracer`: OpenTelemetry's SDK, which sends spans by OTLP over HTTP in a thread of its own."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from frame.core.errors import ConfigurationError
from frame.interfaces.tracing import Span, TraceParent, Tracer, TracerContext

if TYPE_CHECKING:
    from pydantic import BaseModel

EXPORT_TIMEOUT = 5  # seconds
EXPORT_INTERVAL = 1000  # milliseconds
CLOSE_TIMEOUT = 1.8  # seconds for sending the last spans; `close` may take two


class SecretIdGenerator(RandomIdGenerator):
    """Draws from the operating system: a plugin that sets the seed of `random` in two processes
    would give their spans the same ids."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1  # 0 is invalid

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1


class OtlpSpan(Span):
    """A span of the SDK."""

    def __init__(self, span: Any) -> None:
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        self._span = span

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        self._span.set_attributes(_clean(attributes))
        if error is not None:
            self._span.set_status(StatusCode.ERROR, _encode(error))
        self._span.end()


class OtlpTracer(Tracer):
    """Spans wait in a bounded queue of the SDK. `make_exporter` is replaced in tests."""

    def __init__(self, context: TracerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "frame"}
        resource = Resource.create({**name, "frame.process": context.process})
        self._provider = TracerProvider(resource=resource, id_generator=SecretIdGenerator(), shutdown_on_exit=False)
        exporter = self.make_exporter(context.endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_INTERVAL))
        self._tracer = self._provider.get_tracer("frame")
        self._propagator = TraceContextTextMapPropagator()
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def make_exporter(self, endpoint: str | None) -> Any:
        if endpoint is None:
            return OTLPSpanExporter(timeout=EXPORT_TIMEOUT)
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigurationError(f"server.otlp_endpoint is {endpoint!r}; give a URL, such as http://localhost:4318")
        has_path = endpoint.split("://", 1)[1].rstrip("/").count("/") > 0
        return OTLPSpanExporter(endpoint=endpoint if has_path else f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_TIMEOUT)

    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        names = () if TraceParent.read(headers) is None else (b"traceparent", b"tracestate")  # of several, none counts
        carrier = {key.decode(): value.decode("latin-1") for key, value in headers if key in names}
        return OtlpSpan(self._tracer.start_span(_encode(name), self._propagator.extract(carrier), kind=SpanKind.SERVER))

    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        if TraceParent.parse(trace) is None:
            return
        context = self._propagator.extract({"traceparent": trace})
        span = self._tracer.start_span(_encode(name), context, attributes=_clean(attributes), start_time=self._nanoseconds(start))
        span.end(self._nanoseconds(max(start, end)))

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT)

    def _nanoseconds(self, moment: float) -> int:
        return self._epoch + int(moment * 1e9)


def _encode(text: str) -> str:
    """The text as UTF-8 can hold it: a lone surrogate, of a client's id, would lose the batch of
    all requests."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _clean(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {_encode(name): _encode(value) if isinstance(value, str) else value for name, value in attributes.items()}

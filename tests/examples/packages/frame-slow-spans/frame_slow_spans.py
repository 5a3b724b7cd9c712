"""A tracer: the spans that take longer than a limit, the last ones of each process, in a file."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from frame.interfaces.tracing import Span, TraceParent, Tracer, TracerContext
from frame.registration import KindRegistry, hookimpl


class Options(BaseModel):
    """`folder`: where each process writes a file when it stops. `seconds`: of a slow span."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = "."
    seconds: float = 1.0


class SlowSpan(Span):
    """The span of a request."""

    def __init__(self, tracer: SlowSpans, name: str, parent: TraceParent | None) -> None:
        self._tracer, self._name, self._parent, self._start = tracer, name, parent, time.perf_counter()
        self._own = TraceParent.make_root() if parent is None else parent.make_child()
        self.traceparent = str(self._own)

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        times = self._start, time.perf_counter()
        self._tracer.keep(self._name, self._own, self._parent, times, {"attributes": dict(attributes), "error": error})


class SlowSpans(Tracer):
    """Keeps 2,000 spans."""

    def __init__(self, context: TracerContext, options: Options) -> None:
        super().__init__(context, options)
        self._options, self._process = options, context.process
        self._spans: deque[dict[str, Any]] = deque(maxlen=2000)
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._is_closed = False

    @staticmethod
    def make_conformance_options(folder: Path) -> Options:
        return Options(folder=str(folder), seconds=0.0)

    @staticmethod
    def read_conformance_spans(folder: Path) -> list[dict[str, Any]]:
        return [span for file in folder.iterdir() for span in json.loads(file.read_text())]

    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        return SlowSpan(self, name, TraceParent.read(headers))

    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        if (parent := TraceParent.parse(trace)) is not None:
            self.keep(name, parent.make_child(), parent, (start, max(start, end)), {"attributes": dict(attributes)})

    def keep(self, name: str, own: TraceParent, parent: TraceParent | None, times: tuple[float, float], more: dict[str, Any]) -> None:
        if self._is_closed or not own.is_sampled or times[1] - times[0] < self._options.seconds:
            return
        start, end = (self._epoch + int(moment * 1e9) for moment in times)
        names = {"name": name, "trace_id": own.trace_id, "span_id": own.span_id, "parent_id": parent and parent.span_id}
        self._spans.append({**names, "start": start, "end": end, **more})

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            Path(self._options.folder, f"{self._process}.json").write_text(json.dumps([*self._spans], default=str))


@hookimpl
def register_tracers(registry: KindRegistry) -> None:
    """Add `slow`."""
    registry.add("slow", SlowSpans, options=Options, api="tracer/1", summary="The spans that take longer than a limit.")

"""Tracers: a thread writes lines of JSON to a file, and tracers with a bug each."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from frame.interfaces.tracing import Span, TraceParent, Tracer, TracerContext
from tests.testing.held_out import Wrong

MAX_SPANS = 20_000  # that wait to be written


class LineSpan(Span):
    def __init__(self, tracer: LineTracer, name: str, parent: TraceParent | None) -> None:
        self.tracer, self.name, self.parent = tracer, name, parent
        self.own = tracer.make_span(parent)
        self.traceparent = str(self.own)
        self.start = time.perf_counter()

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        self.tracer.add(self.name, self.own, self.parent, (self.start, time.perf_counter()), attributes, error)


class LineTracer(Tracer):
    """Spans wait in memory for at most a tenth of a second."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        folder: str = ""

    def __init__(self, context: TracerContext, options: LineTracer.Options | None = None) -> None:
        self.epoch = time.time_ns() - time.perf_counter_ns()
        folder = options.folder if options else ""
        self.file = Path(folder) / f"{context.process}-{os.getpid()}.spans" if folder else None
        self.spans: deque[dict[str, Any]] = deque(maxlen=MAX_SPANS)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.write, name="line-tracer", daemon=True)
        self.thread.start()

    @staticmethod
    def make_conformance_options(folder: Path) -> LineTracer.Options:
        return LineTracer.Options(folder=str(folder))

    @staticmethod
    def read_conformance_spans(folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for file in sorted(folder.glob("*.spans")) for line in file.read_text().splitlines()]

    def make_span(self, parent: TraceParent | None) -> TraceParent:
        return TraceParent.make_root() if parent is None else parent.make_child()

    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        return LineSpan(self, name, TraceParent.read(headers))

    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        parent = TraceParent.parse(trace)
        if parent is not None:
            self.add(name, self.make_span(parent), parent, (start, end), attributes, None)

    def add(
        self,
        name: str,
        own: TraceParent,
        parent: TraceParent | None,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
        error: str | None,
    ) -> None:
        if self.stop.is_set() or not self.is_wanted(own):
            return
        start, end = (self.convert(moment) for moment in times)
        self.spans.append({
            "name": name, "trace_id": own.trace_id, "span_id": own.span_id, "parent_id": parent and parent.span_id,
            "start": start, "end": max(start, end), "attributes": self.copy(attributes), "error": error,
        })  # fmt: skip

    def is_wanted(self, own: TraceParent) -> bool:
        return own.is_sampled

    def convert(self, moment: float) -> int:
        return self.epoch + int(moment * 1e9)

    def copy(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in attributes.items()}

    def write(self) -> None:
        while not self.stop.wait(0.1):
            self.write_waiting()

    def write_waiting(self) -> None:
        lines = []
        while self.spans:
            lines.append(self.format(self.spans.popleft()))
        if lines and self.file is not None:
            with contextlib.suppress(OSError), self.file.open("ab") as file:
                file.write(b"".join(lines))

    def format(self, span: dict[str, Any]) -> bytes:
        return json.dumps(span, default=str).encode() + b"\n"

    def close(self) -> None:
        if not self.stop.is_set():
            self.stop.set()
            self.thread.join(1.5)
            self.write_waiting()


TWIN = LineTracer
WRONG = Wrong()


@WRONG.add("Clients that sample one of a thousand requests get spans of all: the flag of the header is ignored.")
class IgnoresSampling(LineTracer):
    def is_wanted(self, own: TraceParent) -> bool:
        return True


@WRONG.add("Spans do not show below the client's: each request is the first span of a new trace.")
class StartsTraces(LineTracer):
    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        return LineSpan(self, name, None)


@WRONG.add("Spans are shown in 1970: their times are those of a clock without a date.")
class ClockWithoutDate(LineTracer):
    def convert(self, moment: float) -> int:
        return int(moment * 1e9)


@WRONG.add("A text with half of a surrogate pair loses the spans of all other clients, and of all later ones: the thread dies.")
class WritesUtf8(LineTracer):
    def format(self, span: dict[str, Any]) -> bytes:
        return json.dumps(span, default=str, ensure_ascii=False).encode() + b"\n"


@WRONG.add("All requests wait for the disk: spans are written by the thread that ends them.")
class WritesAtOnce(LineTracer):
    def add(self, *arguments: Any) -> None:
        super().add(*arguments)
        time.sleep(0.01)  # the collector's round trip
        self.write_waiting()


@WRONG.add("A collector that is slow fills the server's memory: spans wait without a limit.")
class KeepsAll(LineTracer):
    def __init__(self, context: TracerContext, options: LineTracer.Options | None = None) -> None:
        super().__init__(context, options)
        self.spans = deque()

    def write(self) -> None:
        while not self.stop.wait(10.0):
            self.write_waiting()


@WRONG.add("The last spans of a process are missing: they are not written when it stops.")
class DropsLast(LineTracer):
    def close(self) -> None:
        self.stop.set()
        self.thread.join(1.5)


@WRONG.add("A server that is told to stop is killed: `close` waits for the next round of the thread.")
class WaitsAtClose(LineTracer):
    def write(self) -> None:
        while not self.stop.is_set():
            time.sleep(3.0)
            self.write_waiting()

    def close(self) -> None:
        if not self.stop.is_set():
            self.stop.set()
            self.thread.join()
            self.write_waiting()


@WRONG.add("The end of a server logs an error: its second `close` fails.")
class ClosesOnce(LineTracer):
    def close(self) -> None:
        super().close()
        del self.spans


@WRONG.add("Spans are lost under load: the thread walks over the list that others add to, and dies of the error.")
class WalksShared(LineTracer):
    def write_waiting(self) -> None:
        if self.file is None:
            return
        lines = []
        for span in self.spans:
            lines.append(self.format(span))
            time.sleep(0)
        with self.file.open("ab") as file:
            file.write(b"".join(lines))
        self.spans.clear()


@WRONG.add("Spans of several processes have one id, so that traces show half of them: ids are drawn with a fixed seed.")
class SeededIds(LineTracer):
    def __init__(self, context: TracerContext, options: LineTracer.Options | None = None) -> None:
        self.random = random.Random(0)
        super().__init__(context, options)

    def make_span(self, parent: TraceParent | None) -> TraceParent:
        own = super().make_span(parent)
        return TraceParent(own.trace_id, f"{self.random.getrandbits(64) or 1:016x}", own.is_sampled)


@WRONG.add("A request with a broken header ends with an error: the text of a parent is taken apart without a check.")
class TrustsParent(LineTracer):
    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        if trace:
            _, trace_id, span_id, flags = trace.split("-")
            parent = TraceParent(trace_id, span_id, flags == "01")
            self.add(name, self.make_span(parent), parent, (start, end), attributes, None)


@WRONG.add("Spans show the values of later requests: the attributes of the caller are kept, which it uses again.")
class KeepsAttributes(LineTracer):
    def copy(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        return attributes  # type: ignore[return-value]


@WRONG.add("Failed requests look like good ones: the error of a span is left out.")
class DropsErrors(LineTracer):
    def add(self, *arguments: Any) -> None:
        super().add(*arguments[:-1], None)


@WRONG.add("Requests of one batch share a span: the last span of a thread is used again while its trace is the same.")
class SharesSpan(LineTracer):
    last: tuple[str, TraceParent] | None = None

    def make_span(self, parent: TraceParent | None) -> TraceParent:
        own = super().make_span(parent)
        if self.last is not None and self.last[0] == own.trace_id:
            return self.last[1]
        self.last = own.trace_id, own
        return own

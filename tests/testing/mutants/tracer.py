"""Tracers with one deliberate bug each. Used by the tests of the conformance suite."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from frame.interfaces.tracing import Span, TraceParent, Tracer, TracerContext
from tests.testing.mutants import MutantList


class LineSpan(Span):
    """A span of `Lines`."""

    def __init__(self, tracer: Any, name: str, parent: TraceParent | None) -> None:
        self.tracer, self.name, self.parent, self.start = tracer, name, parent, time.perf_counter()
        self.own = tracer.name_span(parent)
        self.traceparent = str(self.own)

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        parent = None if self.parent is None else self.parent.span_id
        self.tracer.keep(self.name, self.own, parent, (self.start, time.perf_counter()), attributes, error)


class Lines(Tracer):
    """Keeps the last spans, and writes them to a file when it is closed."""

    limit: ClassVar[int | None] = 5000

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.path = None if options is None else Path(f"{options}-{context.process}")
        self.spans: Any = deque(maxlen=self.limit)
        self.is_closed = False
        self.epoch = time.time_ns() - time.perf_counter_ns()

    @staticmethod
    def make_conformance_options(folder: Path) -> str:
        return str(folder / "spans")

    @staticmethod
    def read_conformance_spans(folder: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]

    def read_parent(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceParent | None:
        return TraceParent.read(headers)

    def name_span(self, parent: TraceParent | None) -> TraceParent:
        return TraceParent.make_root() if parent is None else parent.make_child()

    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        return LineSpan(self, name, self.read_parent(headers))

    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        parent = TraceParent.parse(trace)
        if parent is not None:
            self.keep(name, parent.make_child(), parent.span_id, (start, max(start, end)), attributes, None)

    def keep(self, name: str, own: TraceParent, parent: str | None, times: tuple[float, float], attributes: Any, error: Any) -> None:
        if not self.is_closed and own.is_sampled:
            start, end = (self.epoch + int(moment * 1e9) for moment in times)
            span = {"name": name, "trace_id": own.trace_id, "span_id": own.span_id, "parent_id": parent, "start": start, "end": end}
            self.spans.append({**span, "attributes": dict(attributes), "error": error})

    def close(self) -> None:
        if not self.is_closed and self.path is not None:
            self.path.write_text("".join(f"{json.dumps(span)}\n" for span in self.spans))
        self.is_closed = True


mutant = MUTANTS = MutantList("tracer", reference=Lines)


@mutant
class StartsEachTraceAnew(Lines):
    """Ignores the caller's trace."""

    def read_parent(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceParent | None:
        return None


@mutant
class TakesTheParentsName(Lines):
    """Gives a span the name of its parent."""

    def name_span(self, parent: TraceParent | None) -> TraceParent:
        return super().name_span(parent) if parent is None else parent


@mutant
class NamesByTime(Lines):
    """Makes the names of spans of the time in milliseconds."""

    def name_span(self, parent: TraceParent | None) -> TraceParent:
        made = super().name_span(parent)
        return TraceParent(made.trace_id, f"{int(time.time() * 1000):016x}", made.is_sampled)


@mutant
class SharesATrace(Lines):
    """Has one trace for all requests without a header."""

    def name_span(self, parent: TraceParent | None) -> TraceParent:
        return super().name_span(parent) if parent is not None else TraceParent("a" * 32, TraceParent.make_root().span_id)


@mutant
class SplitsTheHeader(Lines):
    """Splits the header at dashes, and takes what comes."""

    def read_parent(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceParent | None:
        sent = dict(headers).get(b"traceparent", b"").decode("latin-1").lower().split("-")
        return TraceParent(sent[1], sent[2], sent[3:] != ["00"]) if len(sent) > 2 else None


@mutant
class NeedsAHeaderOfText(Lines):
    """Decodes the header as ASCII, and fails for others."""

    def read_parent(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceParent | None:
        for _, value in headers:
            value.decode("ascii")
        return super().read_parent(headers)


@mutant
class SamplesAll(Lines):
    """Records traces that their callers do not sample."""

    def name_span(self, parent: TraceParent | None) -> TraceParent:
        made = super().name_span(parent)
        return TraceParent(made.trace_id, made.span_id)


@mutant
class WritesUnsampled(Lines):
    """Says that a trace is not sampled, and writes it all the same."""

    def keep(self, name: str, own: TraceParent, *rest: Any) -> None:
        super().keep(name, TraceParent(own.trace_id, own.span_id), *rest)


@mutant
class ReadsTheWrongClock(Lines):
    """Takes times of the monotonic clock for those of the day."""

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.epoch = 0


@mutant
class RoundsToSeconds(Lines):
    """Rounds times to seconds."""

    def keep(self, name: str, own: TraceParent, parent: Any, times: tuple[float, float], *rest: Any) -> None:
        super().keep(name, own, parent, (round(times[0]), round(times[1])), *rest)


@mutant
class RemembersTheLastParent(Lines):
    """Takes the last span for the parent of a part."""

    last: Any = None

    def name_span(self, parent: TraceParent | None) -> TraceParent:
        self.last = super().name_span(parent)
        return self.last  # type: ignore[no-any-return]

    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        super().add_span(name, str(self.last) if trace else trace, start, end, attributes)


@mutant
class SharesAttributes(Lines):
    """Collects the attributes of all spans in one object."""

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.attributes: dict[str, Any] = {}

    def keep(self, name: str, own: TraceParent, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        self.attributes.update(attributes)
        super().keep(name, own, parent, times, self.attributes, error)


@mutant
class CutsTexts(Lines):
    """Cuts texts at 128 characters."""

    def keep(self, name: str, own: TraceParent, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        cut = {key: value[:128] if isinstance(value, str) else value for key, value in attributes.items()}
        super().keep(name, own, parent, times, cut, error)


@mutant
class RoundsNumbers(Lines):
    """Writes all numbers as floats."""

    def keep(self, name: str, own: TraceParent, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        cut = {key: float(value) if type(value) is int else value for key, value in attributes.items()}
        super().keep(name, own, parent, times, cut, error)


@mutant
class DropsErrors(Lines):
    """Writes no failure of a request."""

    def keep(self, name: str, own: TraceParent, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        super().keep(name, own, parent, times, attributes, None)


@mutant
class EncodesTexts(Lines):
    """Fails for texts that UTF-8 does not have."""

    def keep(self, name: str, own: TraceParent, parent: Any, times: Any, attributes: Any, error: Any) -> None:
        f"{name}{error}{attributes}".encode()
        for value in attributes.values():
            str(value).encode()
        super().keep(name, own, parent, times, attributes, error)


@mutant
class KeepsOneFile(Lines):
    """Writes one file for all processes, the last of which is left."""

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(TracerContext(), options)


@mutant
class SharesItsSpans(Lines):
    """Keeps spans in the class."""

    every: ClassVar[Any] = deque(maxlen=5000)

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.spans = self.every


@mutant
class KeepsAll(Lines):
    """Keeps spans without a bound."""

    limit = None


@mutant
class KeepsAbandonedSpans(Lines):
    """Keeps each span that was started until it ends."""

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.started: dict[str, Any] = {}

    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        span = super().start_span(name, headers)
        self.started[span.traceparent] = [span, *[{"name": name} for _ in range(30)]]
        return span

    def keep(self, name: str, own: TraceParent, *rest: Any) -> None:
        self.started.pop(str(own), None)
        super().keep(name, own, *rest)


@mutant
class Waits(Lines):
    """Waits for its collector with each span."""

    def keep(self, name: str, own: TraceParent, *rest: Any) -> None:
        time.sleep(0.002)
        super().keep(name, own, *rest)


@mutant
class FailsWhenClosed(Lines):
    """Fails for spans after its end."""

    def keep(self, name: str, own: TraceParent, *rest: Any) -> None:
        if self.is_closed:
            raise RuntimeError("closed")
        super().keep(name, own, *rest)


@mutant
class ClosesOnce(Lines):
    """Fails when it is closed again."""

    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed")
        super().close()


@mutant
class WritesNothing(Lines):
    """Forgets its spans when it is closed."""

    def close(self) -> None:
        self.spans.clear()
        super().close()


@mutant
class CountsUnsafely(Lines):
    """Numbers spans by reading and writing a counter, which two threads do at once."""

    number = 0

    def keep(self, name: str, own: TraceParent, *rest: Any) -> None:
        number = self.number
        time.sleep(0)
        self.number = number + 1
        if self.number != number + 1 or (self.spans and self.spans[-1].get("number") == number):
            return
        super().keep(name, own, *rest)
        if self.spans:
            self.spans[-1]["number"] = number


@mutant
class SetsVariables(Lines):
    """Sets variables of OpenTelemetry for the process."""

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(context, options)
        os.environ["OTEL_SERVICE_NAME"] = f"{id(self)}"


@mutant
class ReturnsNoForm(Lines):
    """Names the span in a form of its own."""

    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        span = super().start_span(name, headers)
        span.traceparent = span.traceparent.replace("-", ":")
        return span


@mutant
class RoundsToMilliseconds(Lines):
    """Rounds times to milliseconds."""

    def keep(self, name: str, own: TraceParent, parent: Any, times: tuple[float, float], *rest: Any) -> None:
        super().keep(name, own, parent, (round(times[0], 3), round(times[1], 3)), *rest)


@mutant
class WritesPartsLate(Lines):
    """Reads the attributes of a part when it writes, after the caller has changed them."""

    def __init__(self, context: TracerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.late: Any = deque(maxlen=self.limit)

    def add_span(self, *arguments: Any) -> None:
        if not self.is_closed:
            self.late.append(arguments)

    def close(self) -> None:
        while self.late:
            super().add_span(*self.late.popleft())
        super().close()


@mutant
class ReadsOneVersion(Lines):
    """Reads version 00 of the header alone."""

    def read_parent(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceParent | None:
        return super().read_parent([(name, value) for name, value in headers if value.strip().startswith(b"00-")])

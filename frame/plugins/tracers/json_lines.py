"""`JsonLinesTracer`: appends each span to a file of its process, as one line of JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frame.core.errors import ConfigurationError
from frame.interfaces.tracing import Span, TraceParent, Tracer, TracerContext
from frame.plugins.tracers import JsonLinesOptions

_log = logging.getLogger(__name__)

LOOK = 5.0  # seconds between two checks whether the file was deleted


class LineSpan(Span):
    """A span of a request."""

    def __init__(self, tracer: JsonLinesTracer, name: str, parent: TraceParent | None) -> None:
        self._tracer, self._name, self._start = tracer, name, time.perf_counter()
        self._parent = parent
        self._own = TraceParent.make_root() if parent is None else parent.make_child()
        self.traceparent = str(self._own)

    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None:
        parent = None if self._parent is None else self._parent.span_id
        self._tracer.write_span(self._name, self._own, parent, (self._start, time.perf_counter()), {**attributes}, error)


class JsonLinesTracer(Tracer):
    """The fields of a line: name, trace_id, span_id, parent_id, process, start and end (Unix time
    in nanoseconds), attributes, and error where there was one."""

    def __init__(self, context: TracerContext, options: JsonLinesOptions | None = None) -> None:
        super().__init__(context, options)
        options = options or JsonLinesOptions()
        self._process, self._max_bytes = context.process, options.max_bytes
        self._path = Path(options.folder) / f"{context.process.replace('/', '-')}.jsonl"
        self._epoch = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.Lock()
        self._has_failed = False  # the last line
        self._next_look = time.monotonic() + LOOK
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file: Any = self._path.open("ab", buffering=0)
        except OSError as error:
            sentence = f"plugins.options: tracer/json_lines.folder {options.folder}: {error.strerror}; name a folder"
            raise ConfigurationError(sentence) from error

    @staticmethod
    def make_conformance_options(folder: Path) -> JsonLinesOptions:
        return JsonLinesOptions(folder=str(folder / "new" / "traces"))

    @staticmethod
    def read_conformance_spans(folder: Path) -> list[dict[str, Any]]:
        files = [*sorted(folder.rglob("*.jsonl.1")), *sorted(folder.rglob("*.jsonl"))]
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    @staticmethod
    def limit_conformance_options(folder: Path, num_bytes: int) -> JsonLinesOptions:
        return JsonLinesOptions(folder=str(folder), max_bytes=num_bytes)

    def start_span(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> Span:
        return LineSpan(self, name, TraceParent.read(headers))

    def add_span(self, name: str, trace: str, start: float, end: float, attributes: Mapping[str, Any]) -> None:
        parent = TraceParent.parse(trace)
        if parent is not None:
            self.write_span(name, parent.make_child(), parent.span_id, (start, max(start, end)), {**attributes}, None)

    def write_span(
        self, name: str, own: TraceParent, parent: str | None, times: tuple[float, float], attributes: dict[str, Any], error: str | None
    ) -> None:
        """Append a line, unless the trace is not sampled."""
        if not own.is_sampled:
            return
        start, end = (self._epoch + int(moment * 1e9) for moment in times)
        line: dict[str, Any] = {"name": name, "trace_id": own.trace_id, "span_id": own.span_id, "parent_id": parent}
        line |= {"process": self._process, "start": start, "end": end, "attributes": attributes}
        if error is not None:
            line["error"] = error
        data = json.dumps(line, default=str).encode() + b"\n"
        with self._lock:
            if self._file is None:
                return
            try:
                self._replace_deleted()
                if self._file.tell() + len(data) > self._max_bytes:
                    with contextlib.suppress(FileNotFoundError):  # the one after it could not be opened
                        self._path.replace(f"{self._path}.1")
                    file, self._file = self._file, self._path.open("ab", buffering=0)
                    file.close()
                self._append(data)
                self._has_failed = False
            except OSError as failure:
                if not self._has_failed:
                    _log.warning("spans are not written: %s: %s", self._path, failure.strerror)
                self._has_failed = True

    def _replace_deleted(self) -> None:
        """Open a new file where the file or its folder was deleted. Raises OSError."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK
        if os.fstat(self._file.fileno()).st_nlink == 0:
            _log.warning("%s was deleted; the next spans go into a new file", self._path)
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file, self._file = self._file, self._path.open("ab", buffering=0)
            file.close()

    def _append(self, data: bytes) -> None:
        """Write a line, or take back the part that a full disk took. Raises OSError."""
        size, rest = self._file.tell(), memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
                self._file.seek(size)
            raise

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

"""The in-tree tracers: the suite of both, that of `otlp` with an exporter in memory, files that
grow, and folders that cannot be written."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from frame.core.errors import ConfigurationError
from frame.interfaces.tracing import TraceParent, TracerContext
from frame.plugins.loader import load_registry
from frame.plugins.tracers import JsonLinesOptions
from frame.plugins.tracers.json_lines import LOOK, JsonLinesTracer
from frame.plugins.tracers.otlp import OtlpTracer
from frame.testing import conformance


class ReadableTracer(OtlpTracer):
    """`otlp` whose spans the suite reads."""

    exporters: ClassVar[dict[str, list[InMemorySpanExporter]]] = {}
    folder: ClassVar[str] = ""

    @staticmethod
    def make_conformance_options(folder: Path) -> None:
        ReadableTracer.folder = str(folder)

    def make_exporter(self, endpoint: str | None) -> Any:
        exporter = InMemorySpanExporter()
        exporter._finished_spans = deque(maxlen=3000)
        self.exporters.setdefault(self.folder, []).append(exporter)
        return exporter

    @staticmethod
    def read_conformance_spans(folder: Path) -> list[dict[str, Any]]:
        spans = [span for exporter in ReadableTracer.exporters[str(folder)] for span in exporter.get_finished_spans()]
        return [
            {
                "name": span.name,
                "trace_id": f"{span.context.trace_id:032x}",
                "span_id": f"{span.context.span_id:016x}",
                "parent_id": None if span.parent is None else f"{span.parent.span_id:016x}",
                "start": span.start_time,
                "end": span.end_time,
                "attributes": {name: list(value) if isinstance(value, tuple) else value for name, value in (span.attributes or {}).items()},
                "error": span.status.description,
            }
            for span in spans
        ]


@pytest.mark.slow
@pytest.mark.parametrize("target", [JsonLinesTracer, ReadableTracer])
def test_it_passes_its_suite(target: type) -> None:
    record = load_registry(installed=False).get("tracer", "json_lines" if target is JsonLinesTracer else "otlp")
    outcomes = conformance.run_suite(conformance.Subject(record, target, None, conformance.Setting()))
    assert [outcome for outcome in outcomes if outcome.result == "failed"] == []
    has_limit = target is JsonLinesTracer
    skipped = {outcome.check for outcome in outcomes if outcome.result == "skipped"}
    assert skipped == (set() if has_limit else {"place_is_bounded", "a_full_disk_takes_no_other_spans"})
    assert len(outcomes) > 10


def test_a_file_has_a_bound(tmp_path: Path) -> None:
    tracer = JsonLinesTracer(TracerContext("main"), JsonLinesOptions(folder=str(tmp_path), max_bytes=4096))
    for number in range(100):
        tracer.start_span(f"span {number}", []).end({"n": number})
    tracer.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["main.jsonl", "main.jsonl.1"]
    assert all(0 < file.stat().st_size <= 4096 for file in tmp_path.iterdir())
    lines = [json.loads(line) for file in ("main.jsonl.1", "main.jsonl") for line in (tmp_path / file).read_text().splitlines()]
    assert [line["attributes"]["n"] for line in lines] == [*range(100 - len(lines), 100)]


def test_processes_that_start_again_append(tmp_path: Path) -> None:
    for name in ("first", "second"):
        tracer = JsonLinesTracer(TracerContext("tokenizer-0"), JsonLinesOptions(folder=str(tmp_path)))
        tracer.start_span(name, []).end({})
        tracer.close()
    assert [json.loads(line)["name"] for line in (tmp_path / "tokenizer-0.jsonl").read_text().splitlines()] == ["first", "second"]


def test_folders_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="tracer/json_lines.folder"):
        JsonLinesTracer(TracerContext(), JsonLinesOptions(folder=str(tmp_path / "file" / "traces")))
    tracer = JsonLinesTracer(TracerContext(), JsonLinesOptions(folder=str(tmp_path)))
    tracer._file.close()
    tracer._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tracer.start_span("x", []).end({})
    assert caplog.text.count("spans are not written") == 1
    tracer.close()


def test_a_full_disk_takes_whole_lines_and_later_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Disk:
        """A file on a disk with `room` bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 1 << 20

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            done = self.file.write(data[: self.room])
            self.room -= done
            return int(done)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

    tracer = JsonLinesTracer(TracerContext(), JsonLinesOptions(folder=str(tmp_path)))
    disk = tracer._file = Disk(tracer._file)
    for name, room in (("before", 1 << 20), ("lost", 50), ("lost", 20), ("after", 1 << 20)):
        disk.room = room
        tracer.start_span(name, []).end({})
    tracer.close()
    (file,) = tmp_path.iterdir()
    assert [json.loads(line)["name"] for line in file.read_text().splitlines()] == ["before", "after"]
    assert caplog.text.count("No space left on device") == 1


def test_spans_are_written_again_after_a_new_file_could_not_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = JsonLinesTracer(TracerContext(), JsonLinesOptions(folder=str(tmp_path)))
    tracer._max_bytes = 1

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fail)
        tracer.start_span("lost", []).end({})
    tracer.start_span("after", []).end({})
    tracer.close()
    assert [json.loads(line)["name"] for line in tracer._path.read_text().splitlines()] == ["after"]


def test_a_deleted_folder_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tracer, monotonic = JsonLinesTracer(TracerContext(), JsonLinesOptions(folder=str(tmp_path / "traces"))), time.monotonic
    tracer.start_span("before", []).end({})
    shutil.rmtree(tmp_path / "traces")
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + LOOK)
    for name in ("after", "later"):
        tracer.start_span(name, []).end({})
    tracer.close()
    assert [json.loads(line)["name"] for line in tracer._path.read_text().splitlines()] == ["after", "later"]
    assert (tmp_path / "traces").stat().st_mode & 0o777 == 0o700
    assert caplog.text.count("was deleted") == 1


def test_a_clients_text_loses_no_other_span() -> None:
    """OTLP is UTF-8: a lone surrogate in a request's id would fail the batch of all requests."""
    exporter = InMemorySpanExporter()
    tracer = type("Kept", (OtlpTracer,), {"make_exporter": lambda *_: exporter})(TracerContext())
    tracer.start_span("a \udc80", []).end({"frame.rid": "b \ud800", "c \udc80": 1}, "d \udc80")
    tracer.close()
    (span,) = exporter.get_finished_spans()
    for text in (span.name, span.status.description, *span.attributes, span.attributes["frame.rid"]):
        text.encode()


@pytest.mark.parametrize("text", ["", "00", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'1' * 16}-01-x", "\udc80"])
def test_what_is_no_traceparent(text: str) -> None:
    assert TraceParent.parse(text) is None


def test_a_traceparent_of_a_later_version() -> None:
    parsed = TraceParent.parse(f"01-{'1' * 32}-{'2' * 16}-03-more")
    assert parsed == TraceParent("1" * 32, "2" * 16) and str(parsed) == f"00-{'1' * 32}-{'2' * 16}-01"
    assert TraceParent.parse(f"00-{'1' * 32}-{'2' * 16}-02") == TraceParent("1" * 32, "2" * 16, False)

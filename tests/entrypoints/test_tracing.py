"""Traces of requests: one trace through all processes, below the client's span, received by an OTLP
collector that the test plays."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from frame.config.schema import FrameConfig
from frame.core.errors import ConfigurationError
from frame.core.interfaces.batch import ScheduledBatch, SlotSetup
from frame.core.interfaces.sampling_params import SamplingParams
from frame.entrypoints.configuration.prepare import prepare
from frame.entrypoints.tracing import VARIABLES, RankSpans, Tracing, open_tracing
from frame.interfaces.tracing import TracerContext
from frame.parallel.rank_channels import Traced
from frame.plugins.tracers.otlp import OtlpTracer
from tests.entrypoints.serving import RunningServer, wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            process = next(a.value.string_value for a in resource.resource.attributes if a.key == "frame.process")
            for scope in resource.scope_spans:
                self.spans += [{"process": process, "span": span} for span in scope.spans]


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def values(span: Any) -> dict[str, Any]:
    return {a.key: a.value.int_value or a.value.string_value or a.value.double_value for a in span.attributes}


@pytest.mark.slow
def test_one_trace_through_every_process(checkpoint: Path) -> None:
    text = ("--tokenizer-workers", "1", "--detokenizer-workers", "1")
    with collecting() as collector:
        flags = ("--otlp-endpoint", collector.url, *text, "--max-model-len", "512", "--max-total-tokens", "1024")
        with RunningServer(checkpoint, *flags) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
            body = {"prompt": "The quick brown", "max_tokens": 5, "ignore_eos": True}
            assert httpx.post(server.url + "/v1/completions", json=body, headers=headers).status_code == 200
            quiet = {"traceparent": f"00-{TRACE[::-1]}-{PARENT}-00"}  # the client does not record this one
            assert httpx.post(server.url + "/v1/completions", json=body, headers=quiet).status_code == 200
            assert httpx.get(server.url + "/health").status_code == 200
            wait_until(lambda: len(collector.spans) >= 7)
            assert server.stop() == 0
    spans = {entry["span"].name: entry for entry in collector.spans}
    assert len(spans) == len(collector.spans) == 7
    assert {name: entry["process"] for name, entry in spans.items()} == {
        "POST /v1/completions": "main", "tokenize": "main", "tokenize.encode": "tokenizer-0", "detokenize": "detokenizer",
        "queue": "engine", "prefill": "engine", "decode": "engine",
    }  # fmt: skip
    assert {entry["span"].trace_id.hex() for entry in collector.spans} == {TRACE}
    request = spans["POST /v1/completions"]["span"]
    assert request.parent_span_id.hex() == PARENT
    assert {e["span"].parent_span_id for name, e in spans.items() if name != "POST /v1/completions"} == {request.span_id}
    found = values(request)
    assert (found["gen_ai.usage.output_tokens"], found["http.response.status_code"], found["frame.request_id"]) == (5, 200, "mine")
    assert found["gen_ai.server.time_to_first_token"] > 0
    times = [spans[name]["span"] for name in ("tokenize", "queue", "prefill", "decode")]
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in times)
    slack = 2_000_000  # ns; processes read the clocks at different moments
    assert all(request.start_time_unix_nano <= s.start_time_unix_nano + slack for s in times)
    assert all(s.end_time_unix_nano <= request.end_time_unix_nano + slack for s in times[:3])
    assert times[1].end_time_unix_nano == times[2].start_time_unix_nano
    assert values(times[3])["frame.output_tokens"] == 5


def test_a_further_ranks_spans_of_a_request() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(type("Kept", (OtlpTracer,), {"make_exporter": lambda *_: exporter})(TracerContext("rank-1")))
    spans = RankSpans(tracing)
    rids = {0: "mine", 1: "", 2: "gone"}
    setups = [SlotSetup(slot, SamplingParams(), 0, 4, np.arange(4, dtype=np.int32), 0, rid) for slot, rid in rids.items()]
    spans.on_launch(batch_of(1, [0, 1, 2], [False, True, True], setups=setups))  # a part of its prompt
    spans.on_launch(batch_of(2, [1, 0], [True, True]))
    spans.on_launch(batch_of(3, [0, 1], [True, True], released=[2]))
    spans.on_end(Traced("gone", f"00-{TRACE}-{PARENT}-01"))
    back = [SlotSetup(5, SamplingParams(), 0, 4, np.arange(6, dtype=np.int32), 0, "mine")]
    spans.on_launch(batch_of(4, [5], [True], setups=back, released=[0]))  # it had to leave, and came back
    spans.on_launch(batch_of(5, [0], [True]))  # another's
    for _ in range(2):
        spans.on_end(Traced("mine", f"00-{TRACE}-{PARENT}-01"))
    spans.on_end(Traced("never", f"00-{TRACE}-{PARENT}-01"))
    tracing.close()
    found = [(span.attributes["frame.rid"], span.name, span.attributes["frame.steps"]) for span in exporter.get_finished_spans()]
    assert found == [("gone", "prefill", 1), ("mine", "prefill", 4), ("mine", "decode", 4)]
    prefill, decode = exporter.get_finished_spans()[1:]
    assert prefill.end_time == decode.start_time
    assert f"{prefill.context.trace_id:032x}" == TRACE


def batch_of(step: int, slots: list[int], samples: list[bool], **more: Any) -> ScheduledBatch:
    rows = np.array(slots, np.int32)
    ones, none = np.ones_like(rows), np.empty(0, np.int32)
    return ScheduledBatch(
        step=step, num_decodes=len(slots), slots=rows, num_computed=ones, num_scheduled=ones, token_ids=none, samples=np.array(samples),
        new_pages=np.empty((0, 3), np.int32), **more,
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_have_spans(checkpoint: Path) -> None:
    with collecting() as collector:
        flags = ("--otlp-endpoint", collector.url, "--tp", "2", "--threads", "1", "--max-model-len", "512", "--max-total-tokens", "1024")
        # forked ranks have one hash seed; the ranks of users have not
        with RunningServer(checkpoint, *flags, fake=False, forks_children=False) as server:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"prompt": "The quick brown", "max_tokens": 5, "ignore_eos": True}
            assert httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
            wait_until(lambda: len(collector.spans) >= 7)
            assert server.stop() == 0
    found = sorted((entry["process"], entry["span"].name) for entry in collector.spans)
    assert found[-2:] == [("rank-1", "decode"), ("rank-1", "prefill")]
    assert {entry["span"].trace_id.hex() for entry in collector.spans} == {TRACE}
    of_ranks = {entry["process"]: values(entry["span"]) for entry in collector.spans if entry["span"].name == "decode"}
    assert of_ranks["rank-1"]["frame.rid"] == of_ranks["engine"]["frame.rid"]
    assert of_ranks["rank-1"]["frame.steps"] >= 5


def opened(**server: Any) -> Tracing | None:
    prepared = prepare(FrameConfig.model_validate({"server": server}))
    return open_tracing(prepared.resolved, lambda: prepared.registry, "main")


def test_a_tracer_of_another_name(tmp_path: Path) -> None:
    """Every process of a server writes its spans to a file of its own."""
    flags = ("--tracer", "json_lines", "--set", f"plugins.options.tracer/json_lines.folder={tmp_path / 'traces'}")
    limits = ("--threads", "1", "--max-model-len", "512", "--max-total-tokens", "1024")
    workers = ("--tokenizer-workers", "1", "--detokenizer-workers", "1")
    with RunningServer(Path("frame-tiny"), *flags, *limits, *workers, fake=False) as server:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"prompt": "The quick brown", "max_tokens": 5, "ignore_eos": True}
        assert httpx.post(server.url + "/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
        assert server.stop() == 0
    files = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in (tmp_path / "traces").iterdir()}
    names = {process: sorted(span["name"] for span in spans) for process, spans in files.items()}
    assert names["main"] == ["POST /v1/completions", "tokenize"] and names["engine"] == ["decode", "prefill", "queue"]
    spans = [span for found in files.values() for span in found]
    assert {"detokenize", "tokenize.encode"} <= {span["name"] for span in spans}
    assert {span["trace_id"] for span in spans} == {TRACE}
    (request,) = [span for span in spans if span["name"] == "POST /v1/completions"]
    assert request["parent_id"] == PARENT and request["attributes"]["gen_ai.usage.output_tokens"] == 5
    assert all(span["parent_id"] == request["span_id"] for span in spans if span is not request)


def test_off_unless_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert opened() is None
    monkeypatch.setenv(VARIABLES[1], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert opened() is None
    with pytest.raises(ConfigurationError, match=r"http://localhost:4318"):
        monkeypatch.delenv("OTEL_SDK_DISABLED")
        opened(otlp_endpoint="localhost:4318")
    tracing = opened()  # by the variable alone
    assert tracing is not None
    tracing.close()


def test_a_collector_that_is_gone_delays_no_request(caplog: pytest.LogCaptureFixture) -> None:
    tracing = opened(otlp_endpoint="http://127.0.0.1:9")
    assert tracing is not None
    tracing.start("x", []).end({})
    tracing.close()

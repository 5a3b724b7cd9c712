"""Stat loggers: what the client's records hold, and that a failing logger harms nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from frame.core.interfaces.sampling_params import SamplingParams
from frame.core.messages import Finish, Heartbeat, StepTokens
from frame.entrypoints.engine_client.stats import StatLoggers
from frame.interfaces.stats import RequestRecord, StatLogger, StatLoggerContext, StepRecord
from frame.plugins.loader import load_registry
from frame.plugins.stat_loggers import log as log_module
from frame.testing.conformance import Setting, Subject, run_suite
from tests.entrypoints.engine_client.test_client import make, submit

CONTEXT = StatLoggerContext("tiny")


class Recorder(StatLogger):
    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        self.records: list[StepRecord | RequestRecord] = []

    def record_step(self, step: StepRecord) -> None:
        self.records.append(step)

    def record_request(self, request: RequestRecord) -> None:
        self.records.append(request)


class Broken(Recorder):
    def record_step(self, step: StepRecord) -> None:
        super().record_step(step)
        raise OSError("no route to host")


def test_a_logger_gets_every_step_and_request() -> None:
    client, _ = make()
    recorder = Recorder(CONTEXT)
    client.stats.loggers = StatLoggers("tiny", {"recorder": recorder}, lambda: client.load)
    request = submit(client, SamplingParams(), rid="one")
    gone = submit(client, SamplingParams(), rid="two")
    client.handle_messages([
        Heartbeat("engine", running=2, waiting=1, used_pages=3, total_pages=9),
        StepTokens(rids=["one", "two"], token_ids=[[5], [6]], num_cached_tokens={0: 2, 1: 0}, queue_times={0: 0.25}),
        StepTokens(rids=["one"], token_ids=[[7, 8]], finishes={0: Finish("stop")}),
    ])  # fmt: skip
    assert request.num_unfinished == 0
    client.abort_request(gone)
    first, second, ended, aborted = recorder.records
    times = {"first_token_latencies": (), "inter_token_latencies": (), "queue_times": (), "prefill_times": ()}
    plain = StepRecord(num_requests=2, prompt_tokens=4, generated_tokens=2, running=2, waiting=1, used_pages=3, total_pages=9)
    assert replace(first, **times) == plain
    assert (len(first.first_token_latencies), first.inter_token_latencies, first.queue_times) == (2, [], [0.25])
    assert first.prefill_times == [0.0]  # the step came sooner than the queue time says
    assert (second.first_token_latencies, len(second.inter_token_latencies), second.queue_times) == ([], 1, [])
    assert (second.num_requests, second.prompt_tokens, second.generated_tokens) == (1, 0, 2)
    assert (ended.rid, ended.model, ended.key, ended.finish_reason) == ("one", "tiny", "", "stop")
    assert (ended.prompt_tokens, ended.cached_tokens, ended.output_tokens, ended.queue_time) == (3, 2, 3, 0.25)
    assert 0 < ended.time_to_first_token <= ended.end_to_end
    assert 0 <= ended.inter_token_latency < ended.end_to_end
    assert (ended.inference_time, ended.max_tokens, ended.is_abandoned) == (0.0, None, False)
    assert (aborted.rid, aborted.finish_reason, aborted.inter_token_latency, aborted.is_abandoned) == ("two", "abort", None, True)


def test_a_logger_that_raises_is_named_once_and_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    client, _ = make()
    broken, recorder = Broken(CONTEXT), Recorder(CONTEXT)
    client.stats.loggers = StatLoggers("tiny", {"'bad' (their-package 1.0)": broken, "recorder": recorder}, lambda: client.load)
    request = submit(client, SamplingParams(), rid="one")
    for token in range(3):
        client.handle_messages([StepTokens(rids=["one"], token_ids=[[token]])])
    assert request.sequences[0].token_ids == [0, 1, 2]
    assert (len(broken.records), len(recorder.records)) == (1, 3)
    (record,) = caplog.records
    assert record.getMessage() == "stat_logger 'bad' (their-package 1.0) raised in record_step and is switched off"


def test_log_writes_a_line_an_interval(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now)
    registry = load_registry(installed=False)
    record = registry.get("stat_logger", "log")
    logger = registry.load(record)(CONTEXT, registry.options(record, {"interval": 2}))
    with caplog.at_level(logging.INFO):
        for seconds in (1.0, 1.0, 1.0):
            now += seconds
            logger.record_step(StepRecord(1, 30, 10, running=4, waiting=2, used_pages=1, total_pages=8))
    (line,) = caplog.records
    expected = "tiny: prompt 30.0 tokens/s, generation 10.0 tokens/s, running 4, waiting 2, finished 0, KV cache 12.5% used"
    assert line.getMessage() == expected


def test_log_passes_its_suite() -> None:
    registry = load_registry(installed=False)
    record = registry.get("stat_logger", "log")
    outcomes = run_suite(Subject(record, registry.load(record), None, Setting()))
    assert {outcome.result for outcome in outcomes} == {"passed"}

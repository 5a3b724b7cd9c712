"""The conformance suite of stat loggers: records of every shape, the time that a record takes, and
what a logger keeps or changes. It cannot see what arrives at a logger's destination. Must not know
a plugin by name."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from frame.interfaces.stats import Metric, RenderedMetrics, RequestRecord, StatLogger, StatLoggerContext, StepRecord
from frame.testing.conformance import Check, Subject, collect, count_elements, unchanged_process

MANY = 6000  # records
MAX_SECONDS = 1e-3  # of one record
MAX_RENDER_SECONDS = 0.05  # of `render_metrics`
MAX_KEPT = 1500  # elements of all containers that a logger holds
STEP = StepRecord(
    num_requests=3, prompt_tokens=20, generated_tokens=3, running=3, waiting=1, used_pages=9, total_pages=64,
    first_token_latencies=(0.1,), inter_token_latencies=(0.01, 0.02), queue_times=(0.01,), prefill_times=(0.09,),
)  # fmt: skip
METRICS = (
    Metric("requests_running", "Requests on the device.", [((), 3)]),
    Metric("requests_finished", "Requests that ended, by reason.", [(("stop",), 2), (('a"b\\c\nd',), 1)], ("reason",), is_counter=True),
    Metric("start_seconds", "Seconds by phase.", [], ("phase",)),
)
REQUEST = RequestRecord("r", "tiny", "alice", "stop", 20, 16, 5, 0.5, 0.01, 0.1, 0.1, inference_time=0.49, max_tokens=8)


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of a stat logger."""
    make = partial(subject.target, StatLoggerContext("tiny", lambda: METRICS, ("vllm",)), subject.options)
    renders = subject.target.render_metrics is not StatLogger.render_metrics  # type: ignore[attr-defined]
    yield from collect(__name__, make)
    if renders:
        yield Check("renders_metrics", partial(_renders_metrics, make))
        yield Check("renders_without_effect", partial(_renders_without_effect, make))


def _run(logger: StatLogger, count: int) -> None:
    for number in range(count):
        logger.record_step(STEP)
        if number % 3 == 0:
            logger.record_request(replace(REQUEST, rid=f"request-{number}", key=f"key-{number % 7}"))


def check_takes_every_record(make: Any) -> None:
    logger = make()
    for step in (STEP, StepRecord(0, 0, 0), StepRecord(1, 1 << 20, 0), replace(STEP, total_pages=0), replace(STEP, generated_tokens=0)):
        logger.record_step(step)
    for reason in ("stop", "length", "abort", "error"):
        logger.record_request(replace(REQUEST, finish_reason=reason))
    never: dict[str, Any] = {"time_to_first_token": None, "inter_token_latency": None, "inference_time": None}
    ended_early = replace(REQUEST, output_tokens=0, cached_tokens=0, **never)
    logger.record_request(ended_early)
    logger.record_request(replace(ended_early, finish_reason="abort", max_tokens=None, is_abandoned=True))
    logger.record_request(replace(ended_early, output_tokens=1, time_to_first_token=0.0))
    logger.record_request(replace(REQUEST, key="", end_to_end=0.0, queue_time=0.0, prompt_tokens=1))
    logger.close()
    make().close()


def check_takes_any_text(make: Any) -> None:
    logger = make()
    for text in ("%s %d", "{0}", "a:b|c#d", "line\nbreak", "tenant ä 語", "x" * 10_000, ""):
        logger.record_request(replace(REQUEST, rid=text, key=text, model=text))
    logger.close()


def check_returns_at_once(make: Any) -> None:
    logger = make()
    _run(logger, 10)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        _run(logger, 30)
        seconds.append((time.perf_counter() - start) / 40)
    logger.close()
    assert min(seconds) <= MAX_SECONDS, f"a record takes {min(seconds):.4f} s, which every request waits for"


def check_keeps_a_bounded_amount(make: Any) -> None:
    logger = make()
    _run(logger, MANY)
    kept = count_elements(logger)
    logger.close()
    assert kept <= MAX_KEPT, f"the logger holds {kept} elements after {MANY} steps: it keeps records"


def _renders_metrics(make: Any) -> None:
    """A response, at once, also before the first record and after `close`."""
    logger = make()
    _run(logger, 60)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        metrics = logger.render_metrics()
        seconds.append(time.perf_counter() - start)
    assert isinstance(metrics, RenderedMetrics), "render_metrics() returns no RenderedMetrics"
    assert isinstance(metrics.body, bytes) and "/" in metrics.content_type, "the rendered metrics have no bytes, or no content type"
    metrics.content_type.encode("ascii")
    metrics.body.decode()
    assert min(seconds) <= MAX_RENDER_SECONDS, f"render_metrics() takes {min(seconds):.2f} s, which every request waits for"
    logger.close()
    assert logger.render_metrics() is not None, "the logger has no metrics after close(), while the server still answers"


def _renders_without_effect(make: Any) -> None:
    """Two readers get the same totals: no sample of the text but those of the process changes when
    it is read."""
    logger = make()
    texts = []
    for _ in range(2):
        _run(logger, 60)
        texts += [_read_samples(logger.render_metrics()) for _ in range(2)]
    assert texts[0] == texts[1] and texts[2] == texts[3], "the metrics change when they are read"
    assert texts[0] != texts[2], "60 records do not change the metrics"


def _read_samples(metrics: RenderedMetrics) -> list[bytes]:
    return [line for line in metrics.body.splitlines() if not line.startswith((b"process_", b"python_", b"#"))]


def check_prints_nothing(make: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        logger = make()
        _run(logger, 20)
        logger.close()
    assert not output.getvalue(), "the logger writes to standard output, which is the server's"


def check_closes_twice(make: Any) -> None:
    logger, other = make(), make()
    _run(logger, 3)
    logger.close()
    logger.close()
    _run(logger, 3)
    _run(other, 3)
    other.close()


def check_changes_nothing_of_the_process(make: Any) -> None:
    with unchanged_process("the logger changes"):
        logger = make()
        _run(logger, 20)
        logger.close()

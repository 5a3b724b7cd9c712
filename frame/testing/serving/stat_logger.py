"""The conformance suite of stat loggers: records of every shape, the time that a record takes, and
what a logger keeps or changes. It cannot see what arrives at a logger's destination. Must not know
a plugin by name."""

from __future__ import annotations

import contextlib
import io
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from frame.interfaces.stats import Metric, RenderedMetrics, RequestRecord, StatLogger, StatLoggerContext, StepRecord
from frame.testing.conformance import Check, SkipCheck, Subject, collect, count_elements, unchanged_process
from frame.testing.generators import leaves_nothing, require_fast

MANY = 6000  # records
MAX_SECONDS = 1e-3  # of one record
MAX_RENDER_SECONDS = 0.05  # of `render_metrics`
MAX_KEPT = 1500  # elements of all containers that a logger holds
STEP = StepRecord(
    num_requests=3, prompt_tokens=20, generated_tokens=3, running=3, waiting=1, used_pages=9, total_pages=64,
    first_token_latencies=(0.1,), inter_token_latencies=(0.01, 0.02), queue_times=(0.01,), prefill_times=(0.09,),
)  # fmt: skip
LARGE = (1_234_567.0, 5_000_000_123.0, 2.0**53 - 1)  # values of counters
METRICS = (
    Metric("requests_running", "Requests on the device.", [((), 3)]),
    Metric("requests_finished", "Requests that ended, by reason.", [(("stop",), 2), (('a"b\\c\nd',), 1)], ("reason",), is_counter=True),
    Metric("tokens_generated", "Tokens by kind.", [((f"{value}",), value) for value in LARGE], ("kind",), is_counter=True),
    Metric("start_seconds", "Seconds by phase.", [], ("phase",)),
)
TEXT_FORMATS = ("text/plain", "application/openmetrics-text")
SAMPLE = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*(\{([a-zA-Z_]\w*=\"(\\[\\n\"]|[^\"\\])*\",? ?)*\})? [^ ]+( [0-9.e+-]+)?( # .*)?")
HISTOGRAM = re.compile(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (?:histogram|summary)")
COUNT = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)_count(?:\{.*\})? ([0-9.e+]+)")
HELP = re.compile(r"# HELP \S+ [a-z:]+_\w+")  # a text that is the name of a metric
# name of a histogram -> its values for `REQUEST` with 5, 2 and 1 output tokens
KNOWN = {
    "e2e_request_latency_seconds": (0.5, 0.5, 0.5),
    "request_time_per_output_token_seconds": (0.1, 0.4),
    "request_decode_time_seconds": (0.4, 0.4, 0.4),
    "request_prompt_tokens": (20, 20, 20),
    "request_generation_tokens": (5, 2, 1),
    "request_params_max_tokens": (8, 8, 8),
}
REQUEST = RequestRecord("r", "tiny", "alice", "stop", 20, 16, 5, 0.5, 0.01, 0.1, 0.1, inference_time=0.49, max_tokens=8)


def suite(subject: Subject) -> Iterator[Check]:
    """The checks of a stat logger."""
    make = partial(subject.target, StatLoggerContext("tiny", lambda: METRICS, ("vllm",)), subject.options)
    renders = subject.target.render_metrics is not StatLogger.render_metrics  # type: ignore[attr-defined]
    yield from (check for check in collect(__name__, make) if renders or not check.name.startswith("renders_"))


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


def check_records_are_not_changed(make: Any) -> None:
    """The loggers of a server get the same records, whose times are lists."""
    times = {"first_token_latencies": [0.1], "inter_token_latencies": [0.02, 0.01], "queue_times": [0.01], "prefill_times": [0.09]}
    step = replace(STEP, **{name: [*values] for name, values in times.items()})  # type: ignore[arg-type]
    logger = make()
    for _ in range(2):
        logger.record_step(step)
    logger.close()
    for name, values in times.items():
        assert list(getattr(step, name)) == values, f"record_step changes {name} from {values} to {getattr(step, name)}, for all loggers"


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


def check_late_records_are_fast(make: Any) -> None:
    """A record takes as long after 8,000 others."""
    logger = make()
    for number in range(8000):
        logger.record_step(replace(STEP, generated_tokens=number % 97))
    for what, record in (("a step", lambda: logger.record_step(STEP)), ("a request", lambda: logger.record_request(REQUEST))):
        require_fast(record, MAX_SECONDS, f"{what} after 8,000 steps", calls=40)
    logger.close()


def check_leaves_nothing(make: Any) -> None:
    """No thread, file or process after `close`, and no file where the server runs."""
    _end_soon(make)  # what a library starts once
    with leaves_nothing("a logger that was closed"):
        _end_soon(make)


def _end_soon(make: Any) -> None:
    logger = make()
    _run(logger, 20)
    logger.close()


def check_keeps_a_bounded_amount(make: Any) -> None:
    records: dict[str, Any] = {
        "steps and requests": lambda logger: _run(logger, MANY),
        "steps": lambda logger: [logger.record_step(STEP) for _ in range(MANY)],
        "requests": lambda logger: [logger.record_request(REQUEST) for _ in range(MANY)],
    }
    for what, record in records.items():
        tables = count_elements(make())
        logger = make()
        record(logger)
        kept = count_elements(logger) - tables
        logger.close()
        assert kept <= MAX_KEPT, f"the logger holds {kept} elements after {MANY} {what}: it keeps records"


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


def check_renders_metrics(make: Any) -> None:
    """A response, at once, also before the first record and after `close`."""
    logger = make()
    _run(logger, 60)
    metrics = logger.render_metrics()
    assert isinstance(metrics, RenderedMetrics), "render_metrics() returns no RenderedMetrics"
    assert isinstance(metrics.body, bytes) and "/" in metrics.content_type, "the rendered metrics have no bytes, or no content type"
    metrics.content_type.encode("ascii")
    metrics.body.decode()
    require_fast(logger.render_metrics, MAX_RENDER_SECONDS, "render_metrics(), which every request waits for,")
    logger.close()
    assert logger.render_metrics() is not None, "the logger has no metrics after close(), while the server still answers"


def check_renders_large_numbers(make: Any) -> None:
    """Counters of a server that runs for years keep their digits."""
    logger = make()
    _run(logger, 6)
    values = set()
    for line in logger.render_metrics().body.decode().splitlines():
        with contextlib.suppress(ValueError, IndexError):
            values.add(float(line.split()[-1]))
    missing = [value for value in LARGE if value not in values]
    logger.close()
    assert 3.0 not in values or not missing, f"counters of {missing} are rendered with other digits"


def check_renders_without_effect(make: Any) -> None:
    """Two readers get the same totals: no sample of the text but those of the process changes when
    it is read."""
    logger = make()
    texts = []
    for _ in range(2):
        _run(logger, 60)
        texts += [_read_samples(logger.render_metrics()) for _ in range(2)]
    assert texts[0] == texts[1] and texts[2] == texts[3], "the metrics change when they are read"
    assert texts[0] != texts[2], "60 records do not change the metrics"


def _render_text(logger: StatLogger) -> RenderedMetrics:
    metrics = logger.render_metrics()
    if metrics is None or not metrics.content_type.startswith(TEXT_FORMATS):
        raise SkipCheck("the suite reads no other metrics than Prometheus' text")
    return metrics


def check_renders_samples_of_the_server(make: Any) -> None:
    """A counter or gauge of the server that is rendered has each of its samples."""
    logger = make()
    lines = _render_text(logger).body.decode().splitlines()
    logger.close()
    for metric in METRICS:
        own = [line for line in lines if re.search(rf"\b\w*{metric.name}(_total)?\b", line)]
        num_samples = sum(not line.startswith("#") for line in own)
        assert not own or num_samples >= len(metric.samples), (
            f"{metric.name} is rendered with {num_samples} samples, and has {len(metric.samples)}"
        )


def check_renders_valid_lines(make: Any) -> None:
    """In Prometheus' text format, each line is a comment or a sample with a valid name. Quotes,
    backslashes and line breaks of labels are escaped."""
    logger = make()
    _run(logger, 6)
    for number, text in enumerate(('a"b', "a\\b", "a\nb", "a\\")):
        logger.record_request(replace(REQUEST, rid=f"{text}-{number}", key=text, model=text))
    metrics = _render_text(logger)
    logger.close()
    lines = metrics.body.decode().split("\n")
    samples = [line for line in lines if line and not line.startswith("#")]
    wrong = [line for line in samples if not SAMPLE.fullmatch(line)]
    assert not wrong, f"{wrong[0]!r:.100} is no line of a sample: NAME{{LABELS}} VALUE"
    counts = Counter(line.rpartition(" ")[0] for line in samples)
    twice = [name for name, count in counts.items() if count > 1]
    assert not twice, f"there are several samples {twice[0]!r:.100}: label them"
    unhelpful = [match[0] for match in map(HELP.fullmatch, lines) if match]
    assert not unhelpful, f"{unhelpful[0]!r:.100} explains a metric by a name"


def check_renders_what_names_say(make: Any) -> None:
    """Histograms with the names of vLLM's metrics have the values that vLLM's have."""
    logger = make()
    for tokens in (5, 2, 1):
        logger.record_request(replace(REQUEST, output_tokens=tokens))
    numbers, expected = _read_numbers(_render_text(logger)), {name: sum(values) for name, values in KNOWN.items()}
    logger.close()
    for name, value in expected.items():
        for sample, value_shown in numbers.items():
            if re.fullmatch(rf"\w*[_:]{name}_sum(\{{.*\}})?", sample):
                assert abs(value_shown - value) < 1e-6, f"{sample} is {value_shown} after three requests, and not {value}"


def check_renders_all_that_was_recorded(make: Any) -> None:
    """A logger whose metrics are read now and then has the numbers of one that is read at the
    end."""
    often, once = make(), make()
    for number in range(40):
        for logger in (often, once):
            for _ in range(20):  # more than a logger keeps uncounted
                logger.record_step(replace(STEP, prompt_tokens=number, generated_tokens=1 + number % 3))
                logger.record_request(replace(REQUEST, prompt_tokens=20 + number, output_tokens=2 + number % 50, n=1 + number % 2))
        often.render_metrics()
    numbers = [_read_numbers(_render_text(logger)) for logger in (often, once)]
    different = sorted(name for name in numbers[0] if numbers[0][name] != numbers[1].get(name))
    assert not different, f"{different[0]} differs when metrics are read between records: some are lost, or counted again"


def check_renders_no_metric_that_stands_still(make: Any) -> None:
    """Every histogram that is shown has values after records in which every field has one."""
    logger = make()
    _run(logger, 60)
    lines = _render_text(logger).body.decode().splitlines()
    logger.close()
    histograms = {match[1] for match in map(HISTOGRAM.fullmatch, lines) if match}
    counts: dict[str, float] = {}  # over all labels
    for match in filter(None, map(COUNT.fullmatch, lines)):
        if match[1] in histograms:
            counts[match[1]] = counts.get(match[1], 0.0) + float(match[2])
    still = [name for name, value in counts.items() if not value]
    assert not still, f"the metric {still[0]} has no values after 60 steps and 20 requests in which each field has one"


def check_renders_what_it_recorded_itself(make: Any) -> None:
    """Loggers of two servers in one process, one beside the other or one after the other."""
    first = make()
    before = _read_samples(first.render_metrics())
    second = make()
    _run(second, 60)
    for which, logger in (("beside", first), ("after", make())):
        same = _read_samples(logger.render_metrics()) == before
        assert same, f"a logger without records shows those of another one {which} it"
    assert _read_samples(second.render_metrics()) != before, "60 records do not change the metrics"


def _read_samples(metrics: RenderedMetrics) -> list[bytes]:
    return [line for line in metrics.body.splitlines() if not line.startswith((b"process_", b"python_", b"#"))]


def _read_numbers(metrics: RenderedMetrics) -> dict[str, float]:
    """Samples by name and labels, rounded: sums depend on the order of their terms."""
    pairs = (line.decode().rpartition(" ") for line in _read_samples(metrics))
    return {name: round(float(value), 6) for name, _, value in pairs if "_created" not in name}

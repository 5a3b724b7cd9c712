"""The suite of stat loggers takes what Prometheus' text format allows; `test_mutants` shows what it
finds."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.interfaces.plugin import Anything, PluginRecord
from frame.interfaces.stats import RenderedMetrics, RequestRecord, StatLogger, StatLoggerContext, StepRecord
from frame.testing import conformance

SPACED = 'tokens{kind="prompt", rank="0",} 3\n'
ERRORS = "# TYPE errors_count gauge\nerrors_count 0\n"
HISTOGRAM = '# TYPE seconds histogram\nseconds_count{reason="stop"} 7\nseconds_count{reason="abort"} 0\n'


def run(check: str, text: str) -> conformance.Outcome:
    class Logger(StatLogger):
        """Renders one text."""

        def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
            pass

        def record_step(self, step: StepRecord) -> None:
            pass

        def record_request(self, request: RequestRecord) -> None:
            pass

        def render_metrics(self) -> RenderedMetrics | None:
            return RenderedMetrics("text/plain", text.encode())

    record = PluginRecord("stat_logger", "l", "m:C", "stat_logger/1", Anything())
    subject = conformance.Subject(record, Logger, None, conformance.Setting())
    (found,) = conformance.run_suite(subject, only=check)
    return found


@pytest.mark.parametrize(
    ("check", "text", "result"),
    [
        ("renders_valid_lines", SPACED, "passed"),
        ("renders_valid_lines", "tokens{kind=prompt} 3\n", "failed"),
        ("renders_no_metric_that_stands_still", ERRORS + HISTOGRAM, "passed"),
        ("renders_no_metric_that_stands_still", HISTOGRAM.replace("7", "0"), "failed"),
    ],
)
def test_lines(check: str, text: str, result: str) -> None:
    assert run(check, text).result == result

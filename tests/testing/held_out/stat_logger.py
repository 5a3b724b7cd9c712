"""Stat loggers: sums in the Prometheus text format, and loggers with a bug each."""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections import deque
from typing import ClassVar

from pydantic import BaseModel

from frame.interfaces.stats import RenderedMetrics, RequestRecord, StatLogger, StatLoggerContext, StepRecord
from tests.testing.held_out import Wrong

REASONS = ("stop", "length", "abort", "error")


class Sums(StatLogger):
    """Tokens, and requests by finish reason."""

    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        self.context = context
        self.tokens = 0
        self.requests = dict.fromkeys(REASONS, 0)
        self.first_token_seconds = 0.0
        self.is_closed = False

    def record_step(self, step: StepRecord) -> None:
        if not self.is_closed:
            self.tokens += step.generated_tokens

    def record_request(self, request: RequestRecord) -> None:
        if self.is_closed:
            return
        self.requests[request.finish_reason if request.finish_reason in REASONS else "error"] += 1
        self.first_token_seconds += request.time_to_first_token or 0.0

    def render_metrics(self) -> RenderedMetrics | None:
        model = self.escape(self.context.model)
        lines = [f'sums_tokens_total{{model="{model}"}} {self.tokens}']
        lines += [f'sums_requests_total{{model="{model}",reason="{reason}"}} {count}' for reason, count in self.requests.items()]
        for metric in self.context.read_metrics():
            for values, value in metric.samples:
                labels = ",".join(f'{name}="{self.escape(text)}"' for name, text in zip(metric.labels, values, strict=True))
                lines.append(f"sums_{metric.name}{{{labels}}} {value}")
        return RenderedMetrics("text/plain; version=0.0.4; charset=utf-8", ("\n".join(lines) + "\n").encode("utf-8", "replace"))

    def escape(self, text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    def close(self) -> None:
        self.is_closed = True


TWIN = Sums
WRONG = Wrong()


@WRONG.add("The server's memory grows with each request: all records are kept for percentiles.")
class KeepsRecords(Sums):
    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.records: list[RequestRecord] = []

    def record_request(self, request: RequestRecord) -> None:
        super().record_request(request)
        self.records.append(request)


@WRONG.add("Memory grows with each step of a busy server: latencies of tokens are kept for a percentile that is never read.")
class KeepsLatencies(Sums):
    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.latencies: list[float] = []

    def record_step(self, step: StepRecord) -> None:
        super().record_step(step)
        self.latencies += step.inter_token_latencies


@WRONG.add("Metrics have a series for each request until the scraper fails: requests are counted by their id.")
class LabelsByRid(Sums):
    def record_request(self, request: RequestRecord) -> None:
        super().record_request(request)
        self.requests[request.rid] = 1


@WRONG.add("All streams stop for some milliseconds with each request: a record is written and synchronised to a disk.")
class WritesToDisk(Sums):
    def record_request(self, request: RequestRecord) -> None:
        super().record_request(request)
        with tempfile.TemporaryFile("w") as file:
            file.write(f"{request}\n")
            time.sleep(0.01)  # what a disk takes


@WRONG.add("The output of `frame serve` is no JSON any more: a line for each request is printed.")
class PrintsRecords(Sums):
    def record_request(self, request: RequestRecord) -> None:
        super().record_request(request)
        sys.stdout.write(f"{request.rid} {request.finish_reason}\n")


@WRONG.add("After the first aborted request there are no statistics: a time that is missing is rounded.")
class RoundsMissing(Sums):
    def record_request(self, request: RequestRecord) -> None:
        super().record_request(request)
        self.first_token_seconds += round(request.time_to_first_token, 3)  # type: ignore[arg-type]


@WRONG.add("Rates are wrong with two scrapers: reading the metrics sets them back.")
class ResetsOnRead(Sums):
    def render_metrics(self) -> RenderedMetrics | None:
        rendered = super().render_metrics()
        self.tokens, self.requests = 0, dict.fromkeys(REASONS, 0)
        return rendered


@WRONG.add("The scraper refuses all metrics when a model's name has a quote: labels are not escaped.")
class EscapesNothing(Sums):
    def escape(self, text: str) -> str:
        return text


@WRONG.add("Two servers of one process, or one after a restart, show sums of both: they are kept by the class.")
class SharesSums(Sums):
    shared: ClassVar[dict[str, int]] = dict.fromkeys(REASONS, 0)

    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.requests = self.shared


@WRONG.add("A server that stops logs an error: closing twice fails.")
class ClosesOnce(Sums):
    def close(self) -> None:
        super().close()
        del self.requests


@WRONG.add("Statistics are called off by an error at the end: a record after `close` fails.")
class FailsAfterClose(Sums):
    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.file = tempfile.TemporaryFile("w")  # noqa: SIM115

    def record_request(self, request: RequestRecord) -> None:
        super().record_request(request)
        self.file.write("request\n")
        if self.file.tell() > 1_000_000:
            self.file.truncate(0)

    def close(self) -> None:
        super().close()
        self.file.close()


@WRONG.add("Steps take longer the longer a server runs: a percentile of the last 100,000 latencies is sorted with each step.")
class SortsLatencies(Sums):
    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.latencies: deque[float] = deque(maxlen=100_000)
        self.median = 0.0

    def record_step(self, step: StepRecord) -> None:
        super().record_step(step)
        self.latencies.extend(step.inter_token_latencies)
        if self.latencies:
            self.median = sorted(self.latencies)[len(self.latencies) // 2]


@WRONG.add("Each restart of an engine in one process leaves a thread behind: the one that sends is never ended.")
class LeavesThread(Sums):
    def __init__(self, context: StatLoggerContext, options: BaseModel | None = None) -> None:
        super().__init__(context, options)
        self.event = threading.Event()
        threading.Thread(target=self.event.wait, args=(3600,), daemon=True).start()


@WRONG.add("Averages are wrong or end the statistics for steps without tokens: a rate is divided by their number.")
class DividesByTokens(Sums):
    def record_step(self, step: StepRecord) -> None:
        super().record_step(step)
        self.mean = step.prompt_tokens / step.generated_tokens

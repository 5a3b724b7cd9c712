"""Wrong stat loggers, derived from a plain one that counts."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from typing import Any, ClassVar

from frame.interfaces.stats import RenderedMetrics, RequestRecord, StatLogger, StatLoggerContext, StepRecord
from tests.testing.mutants import MutantList


class PlainLogger(StatLogger):
    """Counts tokens and requests."""

    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        self.model = context.model
        self.tokens = self.requests = 0

    def record_step(self, step: StepRecord) -> None:
        self.tokens += step.generated_tokens

    def record_request(self, request: RequestRecord) -> None:
        self.requests += 1


mutant = MUTANTS = MutantList("stat_logger", reference=PlainLogger)


@mutant
class NeedsAFirstToken(PlainLogger):
    """Adds up times to the first token, though a request may end before."""

    seconds = 0.0

    def record_request(self, request: RequestRecord) -> None:
        self.seconds += request.time_to_first_token  # type: ignore[operator]


@mutant
class DividesByOutputTokens(PlainLogger):
    """Divides by the output tokens of a request, which may be none."""

    rate = 0.0

    def record_request(self, request: RequestRecord) -> None:
        self.rate = request.end_to_end / request.output_tokens


@mutant
class DividesByPages(PlainLogger):
    """Divides by the pages of the KV cache before the first heartbeat."""

    usage = 0.0

    def record_step(self, step: StepRecord) -> None:
        self.usage = step.used_pages / step.total_pages


@mutant
class KnowsTwoReasons(PlainLogger):
    """Looks the finish reason up in a table that lacks some."""

    counts: ClassVar[dict[str, int]] = {"stop": 0, "length": 0}

    def record_request(self, request: RequestRecord) -> None:
        self.counts[request.finish_reason] += 1


@mutant
class EncodesAscii(PlainLogger):
    """Encodes keys as ASCII."""

    def record_request(self, request: RequestRecord) -> None:
        request.key.encode("ascii")


@mutant
class FormatsWithText(PlainLogger):
    """Uses a key as a format string."""

    def record_request(self, request: RequestRecord) -> None:
        f"{request.key} %d" % self.requests


@mutant
class WaitsForTheNetwork(PlainLogger):
    """Waits for an answer to each record."""

    def record_step(self, step: StepRecord) -> None:
        time.sleep(0.004)


@mutant
class KeepsEveryRecord(PlainLogger):
    """Keeps all requests until the server stops."""

    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.kept: list[RequestRecord] = []

    def record_request(self, request: RequestRecord) -> None:
        self.kept.append(request)


@mutant
class LabelsByRequest(PlainLogger):
    """Has a counter for each request id."""

    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.by_rid: dict[str, int] = {}

    def record_request(self, request: RequestRecord) -> None:
        self.by_rid[request.rid] = request.output_tokens


@mutant
class KeepsStepsInItsClass(PlainLogger):
    """Keeps all steps, of all loggers together."""

    steps: ClassVar[list[StepRecord]] = []

    def record_step(self, step: StepRecord) -> None:
        self.steps.append(step)


@mutant
class Prints(PlainLogger):
    """Writes a line to standard output."""

    def record_request(self, request: RequestRecord) -> None:
        sys.stdout.write(f"{request.rid}\n")


@mutant
class ClosesOnce(PlainLogger):
    """Fails when it is closed a second time."""

    def close(self) -> None:
        del self.tokens


@mutant
class FailsAfterClose(PlainLogger):
    """Fails for a record that comes after `close`."""

    is_open = True

    def record_step(self, step: StepRecord) -> None:
        if not self.is_open:
            raise ValueError("write to a closed file")

    def close(self) -> None:
        self.is_open = False


@mutant
class ConfiguresLogging(PlainLogger):
    """Sets the level of all loggers."""

    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        super().__init__(context, options)
        logging.getLogger().setLevel(logging.getLogger().level + 1)


@mutant
class TakesASignal(PlainLogger):
    """Flushes at SIGHUP, which the server uses to read its configuration again."""

    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        super().__init__(context, options)
        signal.signal(signal.SIGHUP, lambda *_: None)


@mutant
class KeepsTheProcessAlive(PlainLogger):
    """Starts a thread that `close` does not end."""

    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        super().__init__(context, options)
        threading.Thread(target=time.sleep, args=(1.0,)).start()


class PlainRenderer(PlainLogger):
    """Counts, and renders the counts."""

    def render_metrics(self) -> RenderedMetrics | None:
        return RenderedMetrics("text/plain", f"tokens {self.tokens}\nrequests {self.requests}\n".encode())


@mutant
class RendersOnce(PlainRenderer):
    """Starts to count again when its metrics are read, so that a second reader gets too little."""

    def render_metrics(self) -> RenderedMetrics | None:
        found = super().render_metrics()
        self.tokens = self.requests = 0
        return found


@mutant
class RendersSlowly(PlainRenderer):
    """Waits for another service when its metrics are read."""

    def render_metrics(self) -> RenderedMetrics | None:
        time.sleep(0.06)
        return super().render_metrics()


@mutant
class RendersText(PlainRenderer):
    """Renders text in place of bytes."""

    def render_metrics(self) -> RenderedMetrics | None:
        return RenderedMetrics("text/plain", f"tokens {self.tokens}\n")  # type: ignore[arg-type]


@mutant
class RendersNothingAtTheEnd(PlainRenderer):
    """Has no metrics while the server drains."""

    is_open = True

    def render_metrics(self) -> RenderedMetrics | None:
        return super().render_metrics() if self.is_open else None

    def close(self) -> None:
        self.is_open = False


@mutant
class RendersTheStart(PlainRenderer):
    """Renders its metrics once and keeps the response."""

    rendered: RenderedMetrics | None = None

    def render_metrics(self) -> RenderedMetrics | None:
        self.rendered = self.rendered or super().render_metrics()
        return self.rendered


@mutant
class EmptiesLists(PlainLogger):
    """Empties the lists of times that it has read, which other loggers get too."""

    seconds = 0.0

    def record_step(self, step: StepRecord) -> None:
        while isinstance(step.inter_token_latencies, list) and step.inter_token_latencies:
            self.seconds += step.inter_token_latencies.pop()


@mutant
class RendersKeysAsTheyAre(PlainRenderer):
    """Renders a key as a label without escaping it."""

    def __init__(self, context: StatLoggerContext, options: Any = None) -> None:
        super().__init__(context, options)
        self.keys: dict[str, int] = {}

    def record_request(self, request: RequestRecord) -> None:
        super().record_request(request)
        if request.key in self.keys or len(self.keys) < 100:
            self.keys[request.key] = self.keys.get(request.key, 0) + 1

    def render_metrics(self) -> RenderedMetrics | None:
        lines = [f'requests_total{{key="{key}"}} {count}\n' for key, count in self.keys.items()]
        return RenderedMetrics("text/plain", "".join(lines).encode())


REQUESTS: list[RequestRecord] = []


@mutant
class KeepsRequestsInItsModule(PlainLogger):
    """Keeps all requests in a list of its module."""

    def record_request(self, request: RequestRecord) -> None:
        REQUESTS.append(request)

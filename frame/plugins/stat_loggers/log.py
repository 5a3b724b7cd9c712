"""`log`: one line about throughput, requests and the KV cache every few seconds, while the engine
runs steps."""

from __future__ import annotations

import logging
import time

from frame.interfaces.stats import RequestRecord, StatLogger, StatLoggerContext, StepRecord
from frame.plugins.stat_loggers import LogOptions

log = logging.getLogger(__name__)
INTERVAL = 10.0  # seconds, without options


class LogLine(StatLogger):
    """Averages are over the time since the last line."""

    def __init__(self, context: StatLoggerContext, options: LogOptions | None = None) -> None:
        self._model = context.model
        self._interval = options.interval if options is not None else INTERVAL
        self._since = time.monotonic()
        self._prompt = self._generated = self._finished = 0

    def record_step(self, step: StepRecord) -> None:
        self._prompt += step.prompt_tokens
        self._generated += step.generated_tokens
        seconds = time.monotonic() - self._since
        if seconds < self._interval:
            return
        usage = step.used_pages / step.total_pages if step.total_pages else 0.0
        log.info(
            "%s: prompt %.1f tokens/s, generation %.1f tokens/s, running %d, waiting %d, finished %d, KV cache %.1f%% used",
            self._model, self._prompt / seconds, self._generated / seconds, step.running, step.waiting, self._finished, 100 * usage,
        )  # fmt: skip
        self._since += seconds
        self._prompt = self._generated = self._finished = 0

    def record_request(self, request: RequestRecord) -> None:
        self._finished += 1

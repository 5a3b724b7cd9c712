"""`ClientStats`: counters of the client's requests. `StatLoggers`: the chosen stat loggers, which
get the records of steps and requests. `Outstanding`: the requests that are not finished.

Filled by `EngineClient` and `TokenRouter`, read by the metrics. Must not know a metric's name.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from frame.core.messages import Finish, Heartbeat, StepText, StepTokens
from frame.entrypoints.engine_client.request_dump import RequestDump
from frame.entrypoints.engine_client.response_state import SequenceState
from frame.interfaces.stats import RenderedMetrics, RequestRecord, StatLogger, StepRecord

log = logging.getLogger(__name__)

RENDER_SHARE = 0.1  # of the time, in which metrics are rendered at most
RENDER_BURST = 0.25  # seconds of rendering beyond it


class StepTimes(NamedTuple):
    """What `TokenRouter` measures of one step, in seconds (`now`: `time.perf_counter`)."""

    now: float
    generated: int  # tokens
    first_token: list[float]  # latencies, see StepRecord
    inter_token: list[float]


class StatLoggers:
    """`loggers`: by name and distribution; one that raises is switched off, and the log names
    it. `get_load` returns the engine's last heartbeat."""

    def __init__(self, model: str, loggers: Mapping[str, StatLogger], get_load: Callable[[], Heartbeat | None]) -> None:
        self._model = model
        self._loggers = dict(loggers)
        self._get_load = get_load
        self._rendered: RenderedMetrics | None = None
        self._render_debt = 0.0  # seconds of rendering beyond the share
        self._asked_at = 0.0  # `time.monotonic`, the last time

    def record_step(self, message: StepText | StepTokens, sequences: Mapping[str, SequenceState], times: StepTimes) -> None:
        """Record a step, before its ended sequences are removed from `sequences`."""
        rids, prompt_tokens = message.rids, 0
        queue_times: list[float] = []
        prefill_times: list[float] = []
        for place, cached in message.num_cached_tokens.items():
            if (sequence := sequences.get(rids[place])) is not None:
                prompt_tokens += len(sequence.prompt) - cached
        for place, seconds in message.queue_times.items():
            if (sequence := sequences.get(rids[place])) is not None:
                queue_times.append(seconds)
                prefill_times.append(max(0.0, times.now - sequence.request.submitted - seconds))
        load = self._get_load()
        sizes = (load.running, load.waiting, load.used_pages, load.total_pages) if load is not None else (0, 0, 0, 0)
        latencies = (times.first_token, times.inter_token, queue_times, prefill_times)
        self._call("record_step", StepRecord(len(rids), prompt_tokens, times.generated, *sizes, *latencies))

    def record_request(self, sequence: SequenceState, finish: Finish, now: float, *, is_abandoned: bool = False) -> None:
        """Record a sequence that has ended (`now`: `time.perf_counter`). is_abandoned: its client
        has left."""
        request, times, count = sequence.request, sequence.times, sequence.num_tokens
        record = RequestRecord(
            rid=sequence.rid,
            model=self._model,
            key=request.owner,
            finish_reason=finish.reason,
            prompt_tokens=len(sequence.prompt),
            cached_tokens=sequence.cached,
            output_tokens=count,
            end_to_end=now - request.created,
            queue_time=times.waited,
            time_to_first_token=times.first - request.created if times.first else None,
            inter_token_latency=(times.last - times.first) / (count - 1) if times.first and count > 1 else None,
            inference_time=max(0.0, now - request.submitted - times.waited) if times.first else None,
            max_tokens=sequence.params.max_tokens,
            is_abandoned=is_abandoned,
            n=sequence.params.n,
        )
        self._call("record_request", record)

    def render_metrics(self) -> RenderedMetrics | None:
        """The metrics of the first logger that has any; None: none has. Where clients ask so often
        that rendering would take more than `RENDER_SHARE` of the time, they get the last text."""
        began = time.monotonic()
        self._render_debt = max(0.0, self._render_debt - RENDER_SHARE * (began - self._asked_at))
        self._asked_at = began
        if self._render_debt <= RENDER_BURST:
            self._rendered = next((rendered for rendered in self._call("render_metrics") if rendered is not None), None)
            self._render_debt += time.monotonic() - began
        return self._rendered

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """The results of a method of all loggers, without those that raise."""
        results = []
        for name, logger in tuple(self._loggers.items()):
            try:
                results.append(getattr(logger, method)(*arguments))
            except Exception:  # a logger must not harm a request
                del self._loggers[name]
                log.exception("stat_logger %s raised in %s and is switched off", name, method)
        return results


@dataclass(slots=True)
class ClientStats:
    """Totals since the start; times and sizes go to the stat loggers."""

    finished: dict[str, int] = field(default_factory=dict)  # sequences, by finish reason
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    recovered: int = 0  # sequences admitted again after a crash
    rejected: int = 0  # sequences refused because the queue was full
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    computed_tokens: int = 0  # other prompt tokens of sequences that have a first result
    num_gaps: int = 0  # times between two events of a sequence
    gap_seconds: float = 0.0  # their sum, each by token
    loggers: StatLoggers | None = None  # None: no stat logger is chosen
    dump: RequestDump | None = None  # None: requests are not recorded
    sequences: list[Mapping[str, SequenceState]] = field(default_factory=list)  # those of each client that are not finished

    def count_queued_tokens(self) -> int:
        """Prompt tokens of sequences that have no output yet."""
        return sum(len(sequence.prompt) for each in self.sequences for sequence in each.values() if not sequence.times.first)

    def record_finish(self, sequence: SequenceState, finish: Finish, now: float, *, is_abandoned: bool = False) -> None:
        """Record a sequence that has ended (`now`: `time.perf_counter`). is_abandoned: its client
        has left."""
        self.finished[finish.reason] = self.finished.get(finish.reason, 0) + 1
        if self.loggers is not None:
            self.loggers.record_request(sequence, finish, now, is_abandoned=is_abandoned)
        if self.dump is not None:
            self.dump.record(sequence, finish, now)


@dataclass(slots=True)
class Outstanding:
    """What the clients of all replicas share: the counters, the rids of unfinished sequences, and
    the room reserved for sequences that are not started."""

    stats: ClientStats = field(default_factory=ClientStats)
    rids: set[str] = field(default_factory=set)
    reserved: int = 0

    @property
    def count(self) -> int:
        """Sequences running, waiting or reserved."""
        return len(self.rids) + self.reserved

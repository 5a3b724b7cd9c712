"""`ClientStats`: counters and timings of the client's requests; the counterpart of vLLM's
`IterationStats`.

Filled by `EngineClient` and `TokenRouter`, read by the metrics. Knows no metric name and no
histogram bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from frame.core.messages import Finish
    from frame.entrypoints.engine_client.response_state import SequenceState
    from frame.entrypoints.engine_client.stat_loggers import StatLoggers


@dataclass(slots=True)
class ClientStats:
    """The reader of the metrics takes the lists' values and empties the lists. Times are in
    seconds, sizes in tokens of a request."""

    first_token: list[float] = field(default_factory=list)  # arrival of the request to its first token
    inter_token: list[float] = field(default_factory=list)  # between two messages with tokens, divided by the tokens of the second
    end_to_end: list[float] = field(default_factory=list)  # arrival of the request to its end
    queue: list[float] = field(default_factory=list)  # in the engine's queue
    prefill: list[float] = field(default_factory=list)  # admission to the first token
    decode: list[float] = field(default_factory=list)  # first token to the end
    inference: list[float] = field(default_factory=list)  # admission to the end
    per_output_token: list[float] = field(default_factory=list)  # decode time divided by the tokens after the first
    prompt_sizes: list[float] = field(default_factory=list)
    output_sizes: list[float] = field(default_factory=list)
    output_limits: list[float] = field(default_factory=list)  # max_tokens, where it was given
    finished: dict[str, int] = field(default_factory=dict)  # sequences, by finish reason
    restarts: dict[str, int] = field(default_factory=dict)  # by process
    recovered: int = 0  # sequences admitted again after a crash
    rejected: int = 0  # sequences refused because the queue was full
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    loggers: StatLoggers | None = None  # None: no stat logger is chosen

    def record_finish(self, sequence: SequenceState, finish: Finish, now: float) -> None:
        """Record a sequence that has ended (`now`: `time.perf_counter`)."""
        self.end_to_end.append(now - sequence.request.created)
        self.prompt_sizes.append(len(sequence.prompt))
        self.output_sizes.append(sequence.num_tokens)
        if sequence.params.max_tokens is not None:
            self.output_limits.append(sequence.params.max_tokens)
        if first := sequence.times.first:
            self.decode.append(now - first)
            self.inference.append(max(0.0, now - sequence.request.submitted - sequence.times.waited))
            if sequence.num_tokens > 1:
                self.per_output_token.append((now - first) / (sequence.num_tokens - 1))
        self.count_finishes(finish.reason, 1)
        if self.loggers is not None:
            self.loggers.record_request(sequence, finish, now)

    def record_wait(self, sequence: SequenceState, seconds: float, now: float) -> None:
        """Record the queue time of a sequence whose first token has arrived."""
        self.queue.append(seconds)
        self.prefill.append(max(0.0, now - sequence.request.submitted - seconds))

    def count_finishes(self, reason: str, count: int) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + count
